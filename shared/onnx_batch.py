"""Several sequences of one model whose caches lie side by side, so that one pass can step any of them together.

GroupQueryAttention takes a batch of sequences of different lengths, one new token each, but only with all caches in one
tensor [B, …]. Here every cache is a row of such a tensor, and a batch is bound to its first B rows: the rows of those
that decode are moved to the front (a copy, once, when the set changes), so no row is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort

from shared.causal_lm import Logits
from shared.errors import ContextLengthError
from shared.onnx_lm import OnnxModel
from shared.onnx_sequence import OnnxSequence


class OnnxBatchModel:
    """A model with room for `max_rows` sequences. Its memory is touched only as they fill."""

    def __init__(self, model: OnnxModel, max_rows: int) -> None:
        self.model = model
        config = model.config
        shape = (max_rows, config.num_kv_heads, model.context_length, config.head_size)
        self._keys = [np.zeros(shape, model.cache_type) for _ in range(config.num_layers)]
        self._values = [np.zeros(shape, model.cache_type) for _ in range(config.num_layers)]
        self._logits = model.new_logits()
        self._rows: list[BatchRow] = []
        self._max_rows = max_rows
        self._bindings: dict[tuple[int, int], Any] = {}

    @staticmethod
    def load(directory: Path, context_length: int, max_rows: int, num_threads: int | None = None) -> OnnxBatchModel:
        """Load a model directory; raises what `OnnxModel` raises."""
        return OnnxBatchModel(OnnxModel(directory, context_length=context_length, num_threads=num_threads), max_rows)

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self.model.vocab_size

    @property
    def context_length(self) -> int:
        """Most tokens that a sequence can hold."""
        return self.model.context_length

    def new_cache(self) -> BatchRow:
        """A new, empty sequence.

        Raises:
            LookupError: all rows are taken. A row is never given back: pool it.
        """
        if len(self._rows) == self._max_rows:
            raise LookupError(f"all {self._max_rows} rows are taken")
        row = BatchRow(self, len(self._rows))
        self._rows.append(row)
        return row

    def decode_batch(self, caches: Sequence[BatchRow], tokens: Sequence[int]) -> Logits:
        """Append one token to each of the (different) caches; logits [B, V], overwritten by the next pass.

        Raises:
            ContextLengthError: a cache is full; nothing was appended.
            EngineError: inference failed; the caches are as before.
        """
        if any(len(cache.tokens) >= self.context_length for cache in caches):
            raise ContextLengthError(f"a sequence is at the end of its context of {self.context_length} tokens")
        size = len(caches)
        vacant = [row.index for row in self._rows[:size] if row not in caches]
        for outsider, place in zip([cache for cache in caches if cache.index >= size], vacant, strict=True):
            self._swap(outsider.index, place)
        order = np.argsort([cache.index for cache in caches])
        rows = [caches[i] for i in order]
        logits = self.run(0, [[tokens[i]] for i in order], [len(row.tokens) for row in rows], 1)
        for i in order:
            caches[i].append([tokens[i]])
        return cast(Logits, logits[np.argsort(order), 0])

    def run(self, first: int, tokens: Sequence[Sequence[int]], lengths: Sequence[int], num_logits: int) -> Logits:
        """One pass over rows first, first + 1, …: see `OnnxModel.run`."""
        return self.model.run(self._binding(first, len(tokens)), tokens, lengths, num_logits, self._logits)

    def _binding(self, first: int, batch: int) -> Any:
        """The caches of rows first … first + batch - 1, past and present in one buffer."""
        if (first, batch) not in self._bindings:
            binding, config = self.model.binding(), self.model.config
            for layer in range(config.num_layers):
                for buffers, past, present in (
                    (self._keys, config.past_key, config.present_key),
                    (self._values, config.past_value, config.present_value),
                ):
                    value = ort.OrtValue.ortvalue_from_numpy(buffers[layer][first : first + batch])
                    binding.bind_ortvalue_input(past % layer, value)
                    binding.bind_ortvalue_output(present % layer, value)
            self._bindings[first, batch] = binding
        return self._bindings[first, batch]

    def _swap(self, a: int, b: int) -> None:
        """Let two sequences change rows."""
        first, second = self._rows[a], self._rows[b]
        length = max(len(first.tokens), len(second.tokens))
        for buffer in (*self._keys, *self._values):
            kept = buffer[a, :, :length].copy()
            buffer[a, :, :length] = buffer[b, :, :length]
            buffer[b, :, :length] = kept
        first.index, second.index = b, a
        self._rows[a], self._rows[b] = second, first


class BatchRow(OnnxSequence):
    """One sequence of an `OnnxBatchModel`: a `CausalLM`. `index`: the row it lies in now."""

    def __init__(self, batch_model: OnnxBatchModel, index: int) -> None:
        super().__init__(batch_model.vocab_size, batch_model.context_length)
        self.index = index
        self._batch_model = batch_model

    def append(self, tokens: Sequence[int]) -> None:
        """Count tokens whose keys and values a batch pass has put into the cache."""
        self._tokens.extend(tokens)

    def _run(self, tokens: Sequence[int], num_logits: int) -> Logits:
        return cast(Logits, self._batch_model.run(self.index, [tokens], [len(self._tokens)], num_logits)[0])
