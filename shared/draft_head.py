"""What drafting with a head asks of the head, and of the target whose hidden states it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shared.causal_lm import Logits

Features = NDArray[np.floating]
"""Hidden states, [rows, hidden size]: a target's after its last norm, or those a head puts in their place."""


@runtime_checkable
class HiddenStates(Protocol):
    """A decoder that keeps the hidden state of each token in its cache, for as long as the token is there."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens in the cache."""

    def hidden_states(self, start: int, stop: int) -> Features:
        """Those of the tokens start..stop, [stop - start, hidden size]; a view that the next pass may overwrite.

        Raises:
            ValueError: the cache doesn't hold these tokens.
        """


class HeadOutput(NamedTuple):
    """logits: [vocab_size], of the token after the last one. features: the head's own of the last, [1, hidden size]."""

    logits: Logits
    features: Features


class DraftHead(Protocol):
    """A draft head over one sequence, with a cache that can be rewound.

    It takes a token in together with the feature of the token before it. A sequence's first token has none before it:
    it is only noted.
    """

    @property
    def context_length(self) -> int:
        """Most tokens that the cache can hold."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that were taken in, in order, the first one included."""

    def forward(self, tokens: Sequence[int], features: Features) -> HeadOutput:
        """Take in `tokens`; what they say of the token that follows, and the feature to draft on with.

        features: a row for each token, less one where `tokens` begin the sequence; at least one. The logits are those
        of a buffer that the next call overwrites. Ids that the head doesn't know lie far under all others.

        Raises:
            ValueError: `features` don't fit the tokens; nothing was taken in.
            ContextLengthError: the cache has no room; nothing was taken in.
            EngineError: inference failed; the cache is as it was before.
        """

    def truncate(self, length: int) -> None:
        """Forget every token after the first `length`.

        Raises:
            ValueError: `length` is negative or more than the cache holds; nothing was forgotten.
        """
