"""One timed answer of one contender."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerTiming:
    """Times in seconds from the request on. What a contender can't know of itself is None.

    num_judged, num_accepted: by draft position, how many tokens the target judged there and agreed with; what follows
    a first rejection is not judged.
    """

    text: str
    num_tokens: int
    total_s: float
    first_token_s: float
    num_first_tokens: int = 1
    draft_s: float | None = None
    num_rounds: int | None = None
    num_drafted: int | None = None
    num_judged: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()
    cpu_s: float | None = None
    joules: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed, what came with the first round excluded; None for an answer that ended there."""
        decoded, took = self.num_tokens - self.num_first_tokens, self.total_s - self.first_token_s
        return decoded / took if decoded > 0 and took > 0 else None
