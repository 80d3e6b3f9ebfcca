"""What a drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.acceptance import Draft
from shared.sampling import Sampler


class Drafter(Protocol):
    """Proposes tokens for one request."""

    @property
    def name(self) -> str:
        """Its name in metrics and reports."""

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """Up to `gamma` tokens to follow the committed `tokens`; fewer, or none, where it has no idea.

        `tokens` is append-only over a request's life. The sampler belongs to the caller: fork it to draw with it.
        """

    def close(self) -> None:
        """The request has ended."""


class NullDrafter:
    """Proposes nothing: direct decoding."""

    name = "none"

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """No token."""
        return Draft()

    def close(self) -> None:
        """Nothing to give back."""
