"""Rounds of several sessions with drafts: a pass for each, or one pass for all?

    python -m benchmarks.batched_verify --model DIR [--sessions 1 2 4 8] [--rows 1 2 4] [--held 256] [--repeats 5]

One by one is what the service does. `scatter` puts ONNX's TensorScatter and Attention (operator set 24) in the place of
GroupQueryAttention, `slots` one GroupQueryAttention for each sequence, with everything else of the pass in common. They
take turns, and their logits must agree as far as kernels for one row and for many do. Nothing else should run then.
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

from benchmarks.batched_graphs import scattered, slotted
from shared.onnx_batch import OnnxBatchModel
from shared.onnx_lm import DecoderConfig, OnnxModel
from shared.onnx_session import bind_array, session_options

CONTEXT = 1024
NOBODY_READS = np.ones((1, 1), np.int64)
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def _session(graph: onnx.ModelProto, directory: Path, num_threads: int) -> ort.InferenceSession:
    options = session_options(num_threads)
    options.add_session_config_entry(WEIGHTS_FOLDER, str(directory))
    return ort.InferenceSession(graph.SerializeToString(), options, ["CPUExecutionProvider"])


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
        self._session = _session(graph, directory, num_threads)
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


class SlotModel:
    """Every sequence keeps its slot, and the bindings of its caches with it."""

    def __init__(self, directory: Path, caches: list[Floats], num_threads: int) -> None:
        """caches: keys and values of layer 0, then of layer 1, …, each with a row a slot."""
        self._config = config = DecoderConfig.from_directory(directory)
        self._num_slots = len(caches[0])
        graph = slotted(onnx.load(config.model_path, load_external_data=False), self._num_slots)
        self._session = _session(graph, directory, num_threads)
        self._caches = caches
        self._spare = np.zeros((1, config.num_kv_heads, 8, config.head_size), np.float32)
        self._bindings: dict[int, Any] = {}

    def run(self, tokens: Ids, lengths: Ids) -> Floats:
        """Logits [B, S, V] of tokens [B, S] behind `lengths` [B] held ones."""
        (batch, new), config = tokens.shape, self._config
        binding = self._binding(batch)
        empty = self._num_slots - batch
        bind_array(binding, config.input_ids, tokens.reshape(1, -1))
        bind_array(binding, config.attention_mask, NOBODY_READS)
        bind_array(binding, "num_rows", np.array([batch * new]))
        bind_array(binding, "row_counts", np.array([new] * batch + [1] * empty))
        bind_array(binding, "pads", np.array([0, 0, 0, 0, empty, 0]))
        for slot in range(batch):
            bind_array(binding, f"last.{slot}", np.array([lengths[slot] + new - 1], np.int32))
            bind_array(binding, f"total.{slot}", np.array(lengths[slot] + new, np.int32))
        logits = np.empty((1, batch * new, config.vocab_size), np.float32)
        binding.bind_ortvalue_output(config.logits, ort.OrtValue.ortvalue_from_numpy(logits))
        self._session.run_with_iobinding(binding)
        return logits.reshape(batch, new, -1)

    def _binding(self, batch: int) -> Any:
        """Slots from `batch` on have the spare cache."""
        if batch not in self._bindings:
            binding, config = self._session.io_binding(), self._config
            for index, cache in enumerate(self._caches):
                layer, past, present = index // 2, config.past_key, config.present_key
                if index % 2:
                    past, present = config.past_value, config.present_value
                for slot in range(self._num_slots):
                    buffer = cache[slot : slot + 1] if slot < batch else self._spare
                    _bind_cache(binding, f"{past % layer}.{slot}", f"{present % layer}.{slot}", buffer)
            for slot in range(batch, self._num_slots):
                bind_array(binding, f"last.{slot}", np.array([0], np.int32))
                bind_array(binding, f"total.{slot}", np.array(1, np.int32))
            self._bindings[batch] = binding
        return self._bindings[batch]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--held", type=int, default=256, help="tokens in the longest cache; the others hold fewer")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    most = max(arguments.sessions)
    model = OnnxModel(arguments.model, context_length=CONTEXT)
    grouped = OnnxBatchModel(model, most)
    rows = [grouped.new_cache() for _ in range(most)]
    lengths = np.array([arguments.held - 13 * index for index in range(most)], np.int64)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        row.forward([(7 * at + index) % 1000 for at in range(length)], 0)
    caches = [buffer for pair in zip(grouped._keys, grouped._values, strict=True) for buffer in pair]
    # Each writes what the others write, at the same places: the caches can be shared.
    scatter, slots = (kind(arguments.model, caches, model.num_threads) for kind in (ScatterModel, SlotModel))

    def one_by_one(tokens: Ids, lengths: Ids) -> Floats:
        found = []
        for row, ids in zip(rows, tokens.tolist(), strict=False):
            found.append(row.forward(ids, len(ids)).copy())
            row.truncate(len(row.tokens) - len(ids))
        return np.array(found)

    contenders = {"one by one": one_by_one, "scatter": scatter.run, "slots": slots.run}
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
