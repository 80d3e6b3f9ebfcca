"""Questions to the simulation: how many edges at a given p95, and where the hint should turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cloud_service.capacity.plan import Costs, Edges, Limits
from cloud_service.capacity.simulation import Outcome, simulate
from cloud_service.load import best_gamma

MOST_EDGES = 1 << 17
PRECISION = 0.03
"""The search ends when its bounds are so near to each other."""


@dataclass(frozen=True)
class Target:
    """What is good enough: the 95th percentile of a token's or an answer's time, and the share handed back."""

    token_ms: float | None = None
    answer_s: float | None = None
    handed_back: float = 0.01

    def met_by(self, outcome: Outcome) -> bool:
        """Whether it is; an idle service meets everything."""
        if outcome.handed_back_share > self.handed_back:
            return False
        token_ok = self.token_ms is None or not outcome.token_p95_ms > self.token_ms
        return token_ok and (self.answer_s is None or not outcome.answer_p95_s > self.answer_s)


def most_edges(
    costs: Costs, limits: Limits, edges: Edges, target: Target, seconds: float = 300.0, seed: int = 0
) -> Outcome:
    """The outcome with the most edges that still meets the target, to within a few percent; 0 edges if one is too many.

    edges: its `number` is where the search begins.
    """

    def tried(number: int) -> Outcome:
        return simulate(costs, limits, replace(edges, number=number), seconds, seed)

    best, too_many = tried(0), max(edges.number, 1)
    while target.met_by(outcome := tried(too_many)) and too_many < MOST_EDGES:
        best, too_many = outcome, 2 * too_many
    while too_many - best.edges > max(1.0, PRECISION * too_many):
        outcome = tried((best.edges + too_many) // 2)
        if target.met_by(outcome):
            best = outcome
        else:
            too_many = outcome.edges
    return best


@dataclass(frozen=True)
class Turn:
    """For so many busy sessions: the draft length with the most tokens a second in the simulation, and by the rule.

    tokens_per_second: by draft length, from 0 (the cloud generates).
    """

    sessions: int
    tokens_per_second: tuple[float, ...]
    best: int
    rule: int

    @property
    def lost_by_rule(self) -> float:
        """Share of the best throughput that the rule's choice leaves."""
        return 1.0 - self.tokens_per_second[self.rule] / max(self.tokens_per_second)


def hint_turns(
    costs: Costs, limits: Limits, edges: Edges, sessions: Sequence[int], seconds: float = 300.0, seed: int = 0
) -> list[Turn]:
    """Where the hint should turn as sessions grow: each decodes all the time, as the rule assumes."""
    found = []
    for number in sessions:
        busy = replace(edges, number=number, pause_s=0.0, prompt_tokens=1.0, answer_tokens=1e6)
        rates = tuple(
            simulate(costs, limits, replace(busy, gamma=gamma), seconds, seed).tokens_per_second
            for gamma in range(limits.max_gamma + 1)
        )
        idle_ms = edges.rtt_ms + edges.draft_ms
        rule = best_gamma(edges.acceptance, costs.passes, idle_ms, number, limits.max_gamma)
        found.append(Turn(number, rates, max(range(len(rates)), key=rates.__getitem__), rule))
    return found
