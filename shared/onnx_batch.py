"""Several sequences of one model, any of which can go through one pass together, each with any number of new tokens.

The graph is `shared/models/lanes.py`'s: a pass over one sequence costs what it costs without it, and in a pass over
several each has a lane, to which its cache is bound for as long as it stays there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from shared.causal_lm import Logits
from shared.errors import ContextLengthError, ModelFileError
from shared.models.lanes import with_lanes
from shared.onnx_lm import OnnxCausalLM, OnnxModel
from shared.onnx_session import bind_array, load_session, run_bound

NOBODY_READS = np.ones((1, 1), np.int64)
SPARE_LENGTH = 8
"""Tokens that the cache of an empty lane has room for; one is written, and nobody reads it."""


class OnnxBatchModel(OnnxModel):
    """A decoder's weights, and a pass over at most `max_batch` sequences."""

    def __init__(self, directory: Path, *, context_length: int, max_batch: int, num_threads: int | None = None) -> None:
        """Load a model directory; raises what `OnnxModel` raises."""
        self.max_batch = max(2, max_batch)
        super().__init__(directory, context_length=context_length, num_threads=num_threads)
        shape = (1, self.config.num_kv_heads, SPARE_LENGTH, self.config.head_size)
        self._spare = [ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, self.cache_type))] * 2 * self.config.num_layers
        self._logits = self.new_logits()
        self._lanes: list[BatchSequence | None] = [None] * self.max_batch
        self._binding = self.binding()
        bind_array(self._binding, "in_lanes", np.array(True))
        bind_array(self._binding, self.config.attention_mask, NOBODY_READS)
        for lane in range(self.max_batch):
            self._bind_lane(self._binding, lane, None)

    def _open(self) -> ort.InferenceSession:
        config = self.config
        graph = onnx.load(config.model_path, load_external_data=False)
        graph = with_lanes(graph, self.max_batch, config.logits)
        self.config = dataclasses.replace(  # A sequence alone has lane 0.
            config,
            past_key=f"{config.past_key}.0",
            past_value=f"{config.past_value}.0",
            present_key=f"{config.present_key}.0",
            present_value=f"{config.present_value}.0",
        )
        folder = _follow_links(graph, self.directory)
        return load_session(config.model_path, self.num_threads, graph=graph.SerializeToString(), folder=folder)

    def new_cache(self) -> BatchSequence:
        """A new, empty sequence. Its memory is touched only as it fills."""
        return BatchSequence(self)

    def forward_batch(
        self, sequences: Sequence[BatchSequence], tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Logits]:
        """Append to each of the (different) sequences its tokens; logits [num_logits, V] of each, as `forward` gives.

        Raises:
            ContextLengthError: a cache has no room; nothing was appended.
            EngineError: inference failed; the caches are as before.
        """
        if len(sequences) == 1:
            return [sequences[0].forward(tokens[0], num_logits[0])]
        for sequence, new in zip(sequences, tokens, strict=True):
            if len(sequence.tokens) + len(new) > self.context_length:
                raise ContextLengthError(f"a sequence is at the end of its context of {self.context_length} tokens")
        order = self._seat(sequences)
        counts = [len(tokens[i]) for i in order]
        wanted = [num_logits[i] for i in order]
        ends = np.cumsum(counts)
        rows = [np.arange(end - more, end) for end, more in zip(ends, wanted, strict=True)]
        logits = self._run_lanes(
            np.concatenate([np.asarray(tokens[i], np.int64) for i in order]),
            [len(sequences[i].tokens) for i in order],
            counts,
            np.concatenate(rows),
        )
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.append(new)
        parts = dict(zip(order, np.split(logits, np.cumsum(wanted)[:-1]), strict=True))
        return [parts[i] for i in range(len(sequences))]

    def _seat(self, sequences: Sequence[BatchSequence]) -> list[int]:
        """Give the first lanes to these sequences, and those that sit there their own again; their order of lanes."""
        size = len(sequences)
        staying = [sequence for sequence in self._lanes[:size] if sequence in sequences]
        coming = iter([sequence for sequence in sequences if sequence not in staying])
        for lane, seated in enumerate(self._lanes):
            wanted = None if lane >= size else seated if seated in staying else next(coming)
            if wanted is not seated:
                self._bind_lane(self._binding, lane, wanted)
                self._lanes[lane] = wanted
        return [sequences.index(sequence) for sequence in self._lanes[:size] if sequence]

    def _run_lanes(self, tokens: Any, lengths: Sequence[int], counts: Sequence[int], wanted: Any) -> Logits:
        """A pass over the first lanes: tokens [R], of which each has `counts` behind `lengths`; logits [wanted, V]."""
        binding, empty = self._binding, self.max_batch - len(counts)
        bind_array(binding, self.config.input_ids, tokens[np.newaxis])
        if self._has_position_ids:
            positions = [np.arange(length, length + count) for length, count in zip(lengths, counts, strict=True)]
            bind_array(binding, self.config.position_ids, np.concatenate(positions)[np.newaxis])
        bind_array(binding, "row_counts", np.array([*counts, *[1] * empty], np.int64))
        bind_array(binding, "num_rows", np.array([len(tokens)], np.int64))
        bind_array(binding, "pads", np.array([0, 0, 0, 0, empty, 0], np.int64))
        for lane, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            bind_array(binding, f"{lane}.last", np.array([length + count - 1], np.int32))
            bind_array(binding, f"{lane}.total", np.array(length + count, np.int32))
        bind_array(binding, "logits_rows", wanted)
        logits = self._logits.narrow(1, len(wanted))
        binding.bind_ortvalue_output(self.config.logits, ort.OrtValue.ortvalue_from_numpy(logits))
        run_bound(self._session, binding, self.directory.name)
        self._forget_looked_up_rows(len(tokens))
        widened: Logits = self._logits.widened(logits)[0]
        return widened

    def bind_alone(self, binding: Any) -> None:
        """Fill the other lanes, and say that they are empty. Their caches are bound once."""
        bind_array(binding, "in_lanes", np.array(False))
        bind_array(binding, "row_counts", np.zeros(self.max_batch, np.int64))
        bind_array(binding, "num_rows", np.zeros(1, np.int64))
        bind_array(binding, "pads", np.zeros(6, np.int64))
        for lane in range(self.max_batch):
            self._bind_lengths(binding, lane)
            if lane:
                self._bind_caches(binding, lane, self._spare)

    def _bind_lane(self, binding: Any, lane: int, sequence: BatchSequence | None) -> None:
        self._bind_caches(binding, lane, sequence.caches if sequence else self._spare)
        self._bind_lengths(binding, lane)

    def _bind_lengths(self, binding: Any, lane: int) -> None:
        """As an empty lane has them."""
        bind_array(binding, f"{lane}.last", np.zeros(1, np.int32))
        bind_array(binding, f"{lane}.total", np.array(1, np.int32))

    def _bind_caches(self, binding: Any, lane: int, caches: Sequence[Any]) -> None:
        """caches: keys and values of layer 0, then of layer 1, …"""
        config = self.config
        for index, cache in enumerate(caches):
            layer, past, present = index // 2, config.past_key, config.present_key
            if index % 2:
                past, present = config.past_value, config.present_value
            binding.bind_ortvalue_input(f"{past[:-1] % layer}{lane}", cache)
            binding.bind_ortvalue_output(f"{present[:-1] % layer}{lane}", cache)

    def _choose_logits(self, binding: Any, num_rows: int, num_logits: int) -> int:
        bind_array(binding, "logits_rows", np.arange(num_rows - num_logits, num_rows))
        return num_logits


class BatchSequence(OnnxCausalLM):
    """One sequence of an `OnnxBatchModel`: a `CausalLM`."""

    def __init__(self, model: OnnxBatchModel) -> None:
        super().__init__(model)
        self.caches = [ort.OrtValue.ortvalue_from_numpy(buffer) for pair in self._cache for buffer in pair]
        model.bind_alone(self._binding)

    def append(self, tokens: Sequence[int]) -> None:
        """Count tokens whose keys and values a pass over several sequences has put into the cache."""
        self._tokens.extend(tokens)


def _follow_links(graph: onnx.ModelProto, directory: Path) -> Path:
    """Name the weights' files as they are really called; the folder they are in.

    Raises:
        ModelFileError: they are in several folders.
    """
    places = [entry for tensor in graph.graph.initializer for entry in tensor.external_data if entry.key == "location"]
    folders: set[Path] = set()
    for place in places:
        real = (directory / place.value).resolve()
        folders.add(real.parent)
        place.value = real.name
    if len(folders) > 1:
        raise ModelFileError(f"the weights of {directory} are links into several folders: {sorted(map(str, folders))}")
    return folders.pop() if folders else directory
