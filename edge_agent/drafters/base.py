"""What a drafter is, and what it may ask about the worth of its drafts."""

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


class Appraiser(Protocol):
    """Says what drafting is worth in the coming round. Gains are savings over a direct round, in direct rounds.

    Cheap: drafters ask before every token, some from the inference thread.
    """

    def has_taken_in(self, drafter: str, num_tokens: int) -> None:
        """A drafter with a cache of its own begins with so many of the prompt's tokens in it."""

    def draft_limit(self, drafter: str) -> int:
        """The longest draft worth asking of this drafter; 0 to leave it out."""

    def promise(self, drafter: str) -> float:
        """The expected gain of asking this drafter, its own cost paid; infinite where asking is free."""

    def gain(self, draft: Draft) -> float:
        """The expected gain of verifying as much of this draft as is best; 0 where none of it is worth it. Called once
        for each draft that is made."""

    def go_on(self, drafter: str, confidences: Sequence[float]) -> bool:
        """Whether a draft of tokens with these confidences is worth lengthening by one."""


class Unpriced:
    """An appraiser to whom every draft is worth making and a second one isn't: for measuring drafters by themselves."""

    def has_taken_in(self, drafter: str, num_tokens: int) -> None:
        """All the same."""

    def draft_limit(self, drafter: str) -> int:
        """None to speak of."""
        return 1_000_000

    def promise(self, drafter: str) -> float:
        """Less than a draft that is there."""
        return 0.5

    def gain(self, draft: Draft) -> float:
        """The same for any draft."""
        return 1.0 if draft.tokens else 0.0

    def go_on(self, drafter: str, confidences: Sequence[float]) -> bool:
        """Always."""
        return True


class NullDrafter:
    """Proposes nothing: direct decoding."""

    name = "none"

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """No token."""
        return Draft()

    def close(self) -> None:
        """Nothing to give back."""
