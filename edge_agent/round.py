"""One round of the loop as the rest of the agent sees it: what was decided, drafted, judged and committed."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from edge_agent.decision import Decision
from shared.acceptance import Draft, TokenLogprobs


class Origin(StrEnum):
    """Who produced a committed token."""

    DRAFT = "draft"
    TARGET = "target"
    CLOUD = "cloud"


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


class TokenEvent(NamedTuple):
    """A committed token. position: its index in the sequence, the prompt included."""

    position: int
    token: int
    origin: Origin
    logprobs: TokenLogprobs | None = None


class Round(NamedTuple):
    """A finished round. Times in seconds by a monotonic clock.

    tokens: what the answer gained; a stop id ends the answer and is not among them. accepted: how many draft tokens the
    target agreed with. next_token: the recovered or bonus token (in `tokens` too, unless a stop or limit came first).
    """

    number: int
    decision: Decision
    draft: Draft
    accepted: int
    next_token: int
    tokens: tuple[TokenEvent, ...]
    draft_s: float
    verify_s: float
    finish_reason: FinishReason | None = None
