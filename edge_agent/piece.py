"""What one round adds to an answer."""

from __future__ import annotations

from typing import NamedTuple

from edge_agent.round import FinishReason, Origin, Round, TokenEvent
from shared.acceptance import TokenLogprobs


class LoggedToken(NamedTuple):
    """A token of the answer with its log probability."""

    token: int
    logprobs: TokenLogprobs


class Piece(NamedTuple):
    """What one round adds to the answer.

    tokens: those that count; after a stop string none do, though the round may have committed more. logprobs: of the
    tokens whose text is out by now. wait_s: time the round took to come.
    """

    text: str
    round: Round
    tokens: tuple[TokenEvent, ...]
    logprobs: tuple[LoggedToken, ...]
    finish_reason: FinishReason | None
    wait_s: float

    @property
    def num_accepted(self) -> int:
        """Draft tokens that became part of the answer."""
        return sum(event.origin is Origin.DRAFT for event in self.tokens)
