"""Toy models that are exact: float64 logits that depend on the last tokens alone, whatever the batch or the cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from shared.causal_lm import Logits
from shared.draft_head import HeadOutput
from shared.errors import ContextLengthError
from shared.inference_thread import InferenceThread


class TableLM:
    """A language model by hashing: the logits after a context are random, but fixed by its last `order` tokens.

    sharpness scales the logits: large values make the model sure of itself. `tied_to` and `blend` make a draft model
    that resembles a target: blend 0 is the target itself, 1 a stranger.
    """

    def __init__(
        self,
        vocab_size: int = 16,
        seed: int = 0,
        *,
        order: int = 2,
        sharpness: float = 2.0,
        context_length: int = 4096,
        tied_to: TableLM | None = None,
        blend: float = 1.0,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.seed = seed
        self.order = order
        self.sharpness = sharpness
        self.tied_to = tied_to
        self.blend = blend
        self.tokens: list[int] = []
        self.num_forward_calls = 0
        self.num_forward_tokens = 0
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    def logits_after(self, context: Sequence[int]) -> np.ndarray:
        """float64 [vocab_size]."""
        key = tuple(context[-self.order :])
        if key not in self._rows:
            rng = np.random.default_rng([self.seed, self.vocab_size, *key])
            row = rng.normal(size=self.vocab_size) * self.sharpness
            if self.tied_to is not None:
                row = self.blend * row + (1 - self.blend) * self.tied_to.logits_after(context)
            self._rows[key] = row
        return self._rows[key]

    def forward(self, tokens: Sequence[int], num_logits: int) -> Logits:
        if len(self.tokens) + len(tokens) > self.context_length:
            raise ContextLengthError(f"{len(self.tokens)} + {len(tokens)} tokens are over {self.context_length}")
        if not 0 <= num_logits <= len(tokens):
            raise ValueError(f"num_logits must be in 0..{len(tokens)}, got {num_logits}")
        self.num_forward_calls += 1
        self.num_forward_tokens += len(tokens)
        self.tokens.extend(tokens)
        end = len(self.tokens)
        rows = [self.logits_after(self.tokens[: end - num_logits + i + 1]) for i in range(num_logits)]
        return np.array(rows) if rows else np.empty((0, self.vocab_size))

    def hidden_states(self, start: int, stop: int) -> np.ndarray:
        """One number a token: the token itself, so that a head can tell whose state it was given."""
        if not 0 <= start <= stop <= len(self.tokens):
            raise ValueError(f"{start}..{stop} is not within {len(self.tokens)}")
        return np.array(self.tokens[start:stop], float)[:, np.newaxis]

    def truncate(self, length: int) -> None:
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"length must be in 0..{len(self.tokens)}, got {length}")
        del self.tokens[length:]


class TableHead:
    """A draft head that would say what `lm` says, of the ids it knows, and insists on the features that belong there.

    known: all ids by default.
    """

    def __init__(self, lm: TableLM, known: Iterable[int] | None = None) -> None:
        self.context_length = lm.context_length
        self.tokens: list[int] = []
        self.fed: list[int] = []
        """How many tokens each call took in."""
        self._lm = lm
        self._unknown = sorted(set(range(lm.vocab_size)) - set(range(lm.vocab_size) if known is None else known))

    def forward(self, tokens: Sequence[int], features: np.ndarray) -> HeadOutput:
        before = [*self.tokens[-1:], *tokens[:-1]]
        assert features[:, 0].tolist() == before, "a token is taken in with the feature of the one before it"
        assert len(self.tokens) + len(tokens) <= self.context_length
        self.fed.append(len(tokens))
        self.tokens.extend(tokens)
        row = self._lm.logits_after(self.tokens).copy()
        row[self._unknown] = -1e4
        return HeadOutput(row, np.array([[float(tokens[-1])]]))

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]


@asynccontextmanager
async def inference() -> AsyncIterator[InferenceThread]:
    """A thread for models, stopped when the block ends."""
    thread = InferenceThread()
    try:
        yield thread
    finally:
        thread.stop()
