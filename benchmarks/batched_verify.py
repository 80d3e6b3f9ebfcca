"""Rounds of several sessions with drafts: a pass for each, or one pass for all?

    python -m benchmarks.batched_verify --model DIR [--sessions 1 2 4 8] [--rows 1 2 4] [--held 256] [--repeats 5]

`lanes` is what the service does where it costs less than one by one: a GroupQueryAttention for each sequence, with
everything else of the pass in common. `scatter` puts ONNX's TensorScatter and Attention (operator set 24) in its place.
They take turns; their logits must agree as far as kernels for one row and for many do. Nothing else should run then.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from benchmarks.batched_graphs import scattered
from shared.onnx_batch import BatchSequence, OnnxBatchModel
from shared.onnx_lm import DecoderConfig
from shared.onnx_session import bind_array, load_session

CONTEXT = 1024
NOBODY_READS = np.ones((1, 1), np.int64)

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def _bind_cache(binding: Any, past: str, present: str, buffer: Floats) -> None:
    value = ort.OrtValue.ortvalue_from_numpy(buffer)
    binding.bind_ortvalue_input(past, value)
    binding.bind_ortvalue_output(present, value)


class ScatterModel:
    """Caches are the first rows of one tensor a layer."""

    def __init__(self, directory: Path, caches: list[Floats], num_threads: int) -> None:
        """caches: keys and values of layer 0, then of layer 1, …"""
        self._config = DecoderConfig.from_directory(directory)
        graph = scattered(onnx.load(self._config.model_path, load_external_data=False), self._config)
        self._session = load_session(
            self._config.model_path, num_threads, graph=graph.SerializeToString(), folder=directory
        )
        self._caches = caches

    def run(self, tokens: Ids, lengths: Ids) -> Floats:
        """Logits [B, S, V] of tokens [B, S] behind `lengths` [B] held ones."""
        (batch, new), config = tokens.shape, self._config
        binding = self._session.io_binding()
        bind_array(binding, config.input_ids, tokens)
        bind_array(binding, config.attention_mask, NOBODY_READS)
        bind_array(binding, "position_ids", lengths[:, None] + np.arange(new))
        bind_array(binding, "past_lengths", lengths)
        bind_array(binding, "lengths", lengths + new)
        for index, cache in enumerate(self._caches):
            layer, past, present = index // 2, config.past_key, config.present_key
            if index % 2:
                past, present = config.past_value, config.present_value
            _bind_cache(binding, past % layer, present % layer, cache[:batch])
        logits = np.empty((batch, new, config.vocab_size), np.float32)
        binding.bind_ortvalue_output(config.logits, ort.OrtValue.ortvalue_from_numpy(logits))
        self._session.run_with_iobinding(binding)
        return logits


def stacked(sequences: list[BatchSequence]) -> list[Floats]:
    """Their caches, a row a sequence: keys and values of layer 0, then of layer 1, …"""
    buffers = [[cache.numpy() for cache in sequence.caches] for sequence in sequences]
    return [np.concatenate(parts) for parts in zip(*buffers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--held", type=int, default=256, help="tokens in the longest cache; the others hold fewer")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    most = max(arguments.sessions)
    model = OnnxBatchModel(arguments.model, context_length=CONTEXT, max_batch=most)
    sequences = [model.new_cache() for _ in range(most)]
    lengths = np.array([arguments.held - 13 * index for index in range(most)], np.int64)
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        sequence.forward([(7 * at + index) % 1000 for at in range(length)], 0)
    scatter = ScatterModel(arguments.model, stacked(sequences), model.num_threads)

    def one_by_one(tokens: Ids, lengths: Ids) -> Floats:
        found = []
        for sequence, ids in zip(sequences, tokens.tolist(), strict=False):
            found.append(sequence.forward(ids, len(ids)).copy())
            sequence.truncate(len(sequence.tokens) - len(ids))
        return np.array(found)

    def in_lanes(tokens: Ids, lengths: Ids) -> Floats:
        batch, new = tokens.shape
        logits = np.array(model.forward_batch(sequences[:batch], tokens.tolist(), [new] * batch))
        for sequence, length in zip(sequences, lengths.tolist(), strict=False):
            sequence.truncate(length)
        return logits

    contenders = {"one by one": one_by_one, "scatter": scatter.run, "lanes": in_lanes}
    print("sessions  rows  " + "".join(f"{name + ' (ms)':>16}" for name in contenders) + "   differences of logits")
    for num_sessions in arguments.sessions:
        for new in arguments.rows:
            tokens = np.arange(num_sessions * new, dtype=np.int64).reshape(num_sessions, new) + 100
            logits = [run(tokens, lengths[:num_sessions]) for run in contenders.values()]
            worst = ", ".join(f"{float(np.abs(other - logits[0]).max()):.2f}" for other in logits[1:])
            times = _in_turns(list(contenders.values()), tokens, lengths[:num_sessions], arguments.repeats)
            print(f"{num_sessions:8}  {new:4}  " + "".join(f"{ms:16.1f}" for ms in times) + f"   {worst}", flush=True)


def _in_turns(contenders: list[Callable[[Ids, Ids], Floats]], tokens: Ids, lengths: Ids, repeats: int) -> list[float]:
    """The median of each, in milliseconds."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for run, measured in zip(contenders, times, strict=True):
            started = time.perf_counter()
            run(tokens, lengths)
            measured.append((time.perf_counter() - started) * 1e3)
    return [statistics.median(measured) for measured in times]


if __name__ == "__main__":
    main()
