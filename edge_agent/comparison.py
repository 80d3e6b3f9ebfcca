"""Do two answers to one request agree, and if not, was it a near-tie?

One row and several rows go through different INT4 kernels, so their logits differ in the last bits. Two answers may
part only where the target could hardly tell two tokens apart: where the gap between them is within twice the difference
that the row count makes. That difference is measured on the tokens that both answers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from edge_agent.round import TokenEvent
from shared.acceptance import TokenLogprobs, common_prefix_length
from shared.sampling import GREEDY_BELOW, SamplingParams, uniform

NOISE_FLOOR = 0.05
"""Nats. The row count moves some of 50,000 logits further than the few that are compared here show."""


class Outcome(StrEnum):
    """How two answers compare."""

    EQUAL = "equal"
    NEAR_TIE = "near_tie"
    PARTED = "parted"


@dataclass(frozen=True)
class Comparison:
    """position: the first token of the answers that differs. gap: between the two tokens there, by the first answer;
    noise: the largest difference of a log probability on the tokens before. In nats; None where nothing is known."""

    outcome: Outcome
    position: int | None = None
    gap: float | None = None
    noise: float | None = None


def compare(first: Sequence[TokenEvent], second: Sequence[TokenEvent], sampling: SamplingParams) -> Comparison:
    """Compare two answers to the same request. Both need log probabilities for more than equality."""
    shared = common_prefix_length([event.token for event in first], [event.token for event in second])
    if shared == len(first) == len(second):
        return Comparison(Outcome.EQUAL)
    noise = max((_difference(a, b) for a, b in zip(first[:shared], second[:shared], strict=True)), default=0.0)
    if shared == min(len(first), len(second)):  # One of them ended here: by a stop id, which has no event.
        return Comparison(Outcome.PARTED, shared, None, noise)
    gap = _gap(first[shared], second[shared].token, sampling)
    near = gap is not None and gap <= 2 * max(noise, NOISE_FLOOR)
    return Comparison(Outcome.NEAR_TIE if near else Outcome.PARTED, shared, gap, noise)


def _gap(event: TokenEvent, other: int, sampling: SamplingParams) -> float | None:
    """How much the event's token was ahead of `other`, noise of the draw included, in nats of the raw logits."""
    known = _known(event.logprobs, event.token)
    if other not in known:
        return None
    ahead = known[event.token] - known[other]
    if sampling.temperature < GREEDY_BELOW:
        return ahead
    u = uniform(sampling.seed, event.position, np.array([event.token, other]))
    gumbel = -np.log(-np.log(u))
    return abs(ahead + sampling.temperature * float(gumbel[0] - gumbel[1]))


def _difference(a: TokenEvent, b: TokenEvent) -> float:
    first, second = _known(a.logprobs, a.token), _known(b.logprobs, b.token)
    return max((abs(first[token] - second[token]) for token in first.keys() & second.keys()), default=0.0)


def _known(logprobs: TokenLogprobs | None, token: int) -> dict[int, float]:
    return {} if logprobs is None else dict(logprobs.top) | {token: logprobs.logprob}
