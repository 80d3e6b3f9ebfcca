"""Memory that a model's passes write their logits to, kept from one pass to the next."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shared.causal_lm import Logits

UNKNOWN_LOGIT = -1e4
"""Of an id that a trimmed projection doesn't know: never drawn beside known ones, and still finite where a grammar
leaves no other."""


class LogitsMemory:
    """Rows over the ids that a projection knows, and the same rows over the whole vocabulary."""

    def __init__(self, known: slice | NDArray[np.int32], vocab_size: int, dtype: Any) -> None:
        """known: the ids that the projection has rows for, ascending."""
        self._known = known
        self._num_known = len(range(vocab_size)[known]) if isinstance(known, slice) else len(known)
        self._vocab_size = vocab_size
        self._narrow = np.empty(0, dtype)
        self._wide = np.empty(0, dtype)

    def narrow(self, batch: int, rows: int) -> Logits:
        """What a pass is to fill, [batch, rows, known ids], in one piece. Overwritten by the next pass."""
        size = batch * rows * self._num_known
        if self._narrow.size < size:
            self._narrow = np.empty(size, self._narrow.dtype)
        return cast(Logits, self._narrow[:size].reshape(batch, rows, self._num_known))

    def widened(self, narrow: Logits) -> Logits:
        """[batch, rows, vocab_size] of what a pass has filled; itself when it knows every id."""
        if self._num_known == self._vocab_size:
            return narrow
        batch, rows, _ = narrow.shape
        size = batch * rows * self._vocab_size
        if self._wide.size < size:
            self._wide = np.full(size, UNKNOWN_LOGIT, self._wide.dtype)
        wide = self._wide[:size].reshape(batch, rows, self._vocab_size)
        wide[..., self._known] = narrow
        return cast(Logits, wide)
