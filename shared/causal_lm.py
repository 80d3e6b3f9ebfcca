"""What the rest of Souschef asks of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.floating]
"""Unnormalised log probabilities, [rows, vocab_size] (float32 from ONNX Runtime, float64 from a toy)."""


class CausalLM(Protocol):
    """A causal decoder over one sequence, with a cache that can be rewound."""

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""

    @property
    def context_length(self) -> int:
        """Most tokens that the cache can hold."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens whose keys and values are in the cache, in order."""

    def forward(self, tokens: Sequence[int], num_logits: int) -> Logits:
        """Append `tokens` to the cache; return logits [num_logits, vocab_size] for the last positions.

        Row i predicts the token after `tokens[len(tokens) - num_logits + i]`. `num_logits` 0 skips the vocabulary
        projection (prefill) and returns an array of shape [0, vocab_size].

        Raises:
            ContextLengthError: the cache has no room; nothing was appended.
            EngineError: inference failed; the cache is as it was before.
        """

    def truncate(self, length: int) -> None:
        """Forget every token after the first `length`. Costs nothing; 0 forgets all.

        Raises:
            ValueError: `length` is negative or more than the cache holds; nothing was forgotten.
        """
