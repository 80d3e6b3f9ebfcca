"""Whether to draft for one request, how much, and how much of a draft to verify. Costs in direct rounds: c(1) is 1.

Speculation must never make an answer slower. Estimates alone can't promise that, so there is a purse besides
(`SpeculationLedger`): every verified draft pays in what it saved or takes out what it lost, a small share of the
decoding time flows in for trying things out, and no draft is verified that could lose more than the purse holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge_agent.acceptance_window import AcceptancePrior, AcceptanceWindow
from edge_agent.cost_model import CostCurve
from edge_agent.gamma_chooser import best_length, measured_speedup
from edge_agent.policy import Drafting
from shared.acceptance import Draft

EXPECTED_RATES = {"ngram": 0.5, "prediction": 0.7, "model": 0.7}
"""Acceptance of a drafter's token before any was judged."""

FREE_DRAFT = 0.03
"""A drafter whose token costs less than this share of a direct token is free: its drafts are judged when they are
there, and nothing is lost by asking."""

MARGIN = 0.01
"""Expected gains under this share of a direct round are noise."""

OFF_AFTER = 8
"""Drafts in a row that weren't worth verifying, until drafting is switched off."""

LOOK_EVERY = 4
"""Rounds between looks at what a free drafter would propose, while drafting is off."""

VALUE_ROUNDS = 16.0

MOST_PATIENCE = 4
"""A trial that fails makes the next one wait longer, up to this many times as long."""


class SpeculationLedger:
    """What speculation may lose, in direct rounds, and when to try again what lost; one a process."""

    def __init__(self, credit: float = 3.0, most: float = 6.0) -> None:
        self._credit = credit
        self._most = most
        self._since_trial = 0
        self._patience = 1

    @property
    def credit(self) -> float:
        """The most that the next draft may lose."""
        return max(self._credit, 0.0)

    def accrue(self, decoded: float, share: float) -> None:
        """Decoding took `decoded` direct rounds: a share of it may be spent on trying."""
        self._since_trial += 1
        self._credit = min(self._credit + decoded * share, self._most)

    def may_try(self, loss: float, every: int) -> bool:
        """Whether something that doesn't promise to pay may be tried: rarely, ever more rarely, and never on tick."""
        return self._since_trial >= every * self._patience and self._credit >= loss

    def tried(self) -> None:
        """A trial was made: if it shows nothing, the next one waits longer."""
        self._since_trial = 0
        self._patience = min(self._patience * 2, MOST_PATIENCE)

    def paid(self) -> None:
        """A draft was worth verifying without being a trial."""
        self._patience = 1

    def settle(self, gain: float) -> None:
        """A verified draft saved (or, negative, lost) this much."""
        self._credit = min(self._credit + gain, self._most)


class DraftAdvisor:
    """One request's view of its drafters."""

    def __init__(
        self, drafters: Mapping[str, float], prior: AcceptancePrior, ledger: SpeculationLedger, probe_every: int
    ) -> None:
        """drafters: cost of a token of each, in direct rounds. probe_every: rounds between trials of what lost."""
        self._drafters = dict(drafters)
        self._ledger = ledger
        self._probe_every = probe_every
        self._unused = 0
        self._since_look = 0
        self._trial = False
        self._decoded = VALUE_ROUNDS / 2
        self._committed = VALUE_ROUNDS / 2
        self._limits: dict[str, int] = {}
        self.window = AcceptanceWindow(prior)

    @property
    def value(self) -> float:
        """What a token costs on average, in direct rounds; 1 where speculation gains nothing."""
        return min(1.0, self._decoded / self._committed)

    @property
    def speedup(self) -> float:
        """Direct time over time with drafts, of the last rounds."""
        return self._committed / self._decoded

    def update_costs(self, drafters: Mapping[str, float]) -> None:
        """The drafters' costs as they are measured now."""
        self._drafters.update(drafters)

    def advise(self, curve: CostCurve, ceiling: int) -> Drafting:
        """What drafting promises in the coming round. ceiling: the longest draft to think of."""
        self._trial = False
        free = [name for name in self._drafters if self._is_free(name)]
        costly = {name: self._plan(name, curve, ceiling) for name in self._drafters if not self._is_free(name)}
        looking = bool(free) and (not self._is_off or self._since_look >= LOOK_EVERY)
        self._limits = {**dict.fromkeys(free, ceiling if looking else 0), **costly}
        best = max(costly, key=lambda name: costly[name], default=None)
        if free and not self._is_off:
            return Drafting(ceiling, 0, self.speedup, free=True)
        if best is not None and costly[best]:
            rates = self._rates(best, costly[best])
            return Drafting(costly[best], 0, measured_speedup(rates, curve, self._drafters[best]), free=False)
        if looking:
            self._since_look = 0
            return Drafting(0, ceiling, self.speedup)
        if best is not None and self._may_try(curve.extra(1) + self._drafters[best]):
            self._trial = True
            self._limits[best] = 1
            return Drafting(0, 1, self.speedup, free=False)
        return Drafting(0, 0, self.speedup)

    def limit(self, drafter: str) -> int:
        """The longest draft worth asking of this drafter in the coming round; 0 for none."""
        return self._limits.get(drafter, 0)

    def saving(self, drafter: str, curve: CostCurve) -> float:
        """What this drafter is expected to save of a token's time, as a share of a direct token."""
        limit = self.limit(drafter)
        if not limit:
            return 0.0
        return max(0.0, 1.0 - 1.0 / measured_speedup(self._rates(drafter, limit), curve, self._drafters[drafter]))

    def trim(self, draft: Draft, curve: CostCurve, *, forced: bool = False) -> int:
        """How many tokens of a draft to verify, now that it is there and its cost is spent."""
        if not draft.tokens:
            return 0
        most_extra = float("inf") if forced else self._ledger.credit
        rates = self.window.rates(draft)
        length = best_length(rates, curve, value=self.value, margin=MARGIN, most_extra=most_extra).length
        self._unused = 0 if length else self._unused + 1
        if length:
            self._ledger.paid()
        if length or forced:
            return max(length, 1)
        if self._trial or self._may_try(curve.extra(1)):
            self._ledger.tried()
            return 1
        return 0

    def observe(self, draft: Draft, accepted: int, verify_cost: float, draft_cost: float, share: float) -> None:
        """A round is over. costs: what it took, in direct rounds. share: of the time, for trying things out."""
        cost = verify_cost + draft_cost
        self._since_look += 1
        tokens = accepted + 1
        keep = 1.0 - 1.0 / VALUE_ROUNDS
        self._decoded = self._decoded * keep + cost
        self._committed = self._committed * keep + tokens
        self._ledger.accrue(cost, share)
        # A direct round neither saves nor loses: how far its own time lies off the average is noise.
        self._ledger.settle(tokens - cost if draft.tokens else -draft_cost)
        self.window.add(draft, accepted)

    @property
    def _is_off(self) -> bool:
        return self._unused >= OFF_AFTER

    def _is_free(self, drafter: str) -> bool:
        return self._drafters[drafter] < FREE_DRAFT

    def _may_try(self, loss: float) -> bool:
        return self._ledger.may_try(loss, self._probe_every)

    def _rates(self, drafter: str, gamma: int) -> list[float]:
        return self.window.typical_rates(drafter, gamma, EXPECTED_RATES.get(drafter, 0.5))

    def _plan(self, drafter: str, curve: CostCurve, ceiling: int) -> int:
        """The best gamma of a drafter whose tokens cost something, before it has drafted."""
        return best_length(
            self._rates(drafter, ceiling),
            curve,
            value=self.value,
            draft_cost=self._drafters[drafter],
            margin=MARGIN,
            most_extra=self._ledger.credit,
        ).length
