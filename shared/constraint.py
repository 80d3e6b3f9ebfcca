"""What a grammar or schema leaves of the next token's choice."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenConstraint(Protocol):
    """Which tokens may follow those appended so far."""

    def mask(self) -> NDArray[np.bool_] | None:
        """bool [vocab_size], true for each id that may come next; at least one is. None: any may.

        Raises:
            UnsupportedFieldError: the constraint can't be followed any further.
        """

    def append(self, token: int) -> None:
        """One more token, one that the mask allows. Raises `UnsupportedFieldError` as `mask` does."""

    def fork(self) -> TokenConstraint:
        """A copy: what it appends, the original never sees."""


class Unconstrained:
    """Allows everything, always."""

    def mask(self) -> None:
        """Any token may come."""

    def append(self, token: int) -> None:
        """Nothing follows from it."""

    def fork(self) -> Unconstrained:
        """Itself: it has no state."""
        return self


UNCONSTRAINED = Unconstrained()
