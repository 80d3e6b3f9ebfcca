"""How many draft tokens are worth verifying.

A round that verifies k draft tokens commits E(k) = 1 + sum_i prod_{j<=i} a_j tokens and costs c(k + 1) plus the draft.
Over a long answer the most tokens a second come from maximising, round by round,

    E(k) * value - cost(k)

with `value` the cost of a token on average (the renewal-reward form of maximising a ratio: a round's own ratio would
be too choosy, as most rounds of an n-gram drafter have nothing to offer and cost c(1) a token). In a run without
speculation value is c(1), and k = 0 gains exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edge_agent.cost_model import CostCurve


class Choice(NamedTuple):
    """length: draft tokens to verify. gain: expected saving over a direct round, in the curve's unit. tokens: E."""

    length: int
    gain: float
    tokens: float
    cost: float


def expected_tokens(rates: Sequence[float]) -> float:
    """E = 1 + sum_i prod_{j<=i} a_j: tokens a round commits, the recovered or bonus token included."""
    expected, survival = 1.0, 1.0
    for rate in rates:
        survival *= rate
        expected += survival
    return expected


def measured_speedup(rates: Sequence[float], curve: CostCurve, draft_cost: float) -> float:
    """S(gamma) = E * c(1) / (c(gamma + 1) + gamma * c_draft)."""
    gamma = len(rates)
    return expected_tokens(rates) * curve.at(1) / (curve.at(gamma + 1) + gamma * draft_cost)


def best_length(
    rates: Iterable[float],
    curve: CostCurve,
    *,
    value: float,
    draft_cost: float = 0.0,
    margin: float = 0.0,
    most_extra: float = float("inf"),
) -> Choice:
    """The length of at most len(rates) with the largest expected gain; 0 if none gains more than `margin`.

    rates: taken one by one, and no more of them than can matter. draft_cost: of one draft token; 0 once the draft is
    there. most_extra: no length may add more than this to a direct round (what a round loses if every token is
    rejected).
    """
    values, direct = curve.values, curve.values[0]
    least_step = curve.least_step + draft_cost
    best = 0, 0.0, 1.0, direct
    best_gain = margin
    expected, survival = 1.0, 1.0
    for length, rate in enumerate(rates, start=1):
        survival *= rate
        if survival * value <= least_step:
            break  # From here on a token costs more than it brings.
        expected += survival
        cost = (values[length] if length < len(values) else curve.at(length + 1)) + length * draft_cost
        extra = cost - direct
        if extra > most_extra:
            break
        gain = (expected - 1.0) * value - extra
        if gain > best_gain:
            best, best_gain = (length, gain, expected, cost), gain
    return Choice(*best)


def curve_mix(times: CostCurve, joules: CostCurve, energy_weight: float) -> CostCurve:
    """The curve to minimise: time alone, energy alone, or between. Both in direct rounds."""
    if energy_weight == 0:
        return times
    return CostCurve(
        tuple(
            (1 - energy_weight) * time + energy_weight * energy
            for time, energy in zip(times.values, joules.values, strict=False)
        )
    )
