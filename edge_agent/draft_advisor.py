"""Whom to ask for a draft, how long it may grow, and how much of it to verify. Costs in direct rounds: c(1) is 1.

Any number of drafters. Each has a cost a token, and those with a cache of their own have a catch-up: what they must
take in before they can draft again. A drafter that costs next to nothing is always asked, and its draft judged once it
is there. One that costs something is asked if it *promises* a gain: the average, over the times it was asked, of what
its drafts were worth less what they cost. Before it has shown anything it promises what drafters of its kind give
elsewhere, once the answer can bear the disappointment; else nothing, and it begins with trials. Either way its account
(`SpeculationLedger`) bounds what it may lose. A catch-up is made only where the promise, over the rest of the answer,
is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edge_agent.acceptance_window import AcceptancePrior, AcceptanceWindow
from edge_agent.cost_model import CostCurve
from edge_agent.gamma_chooser import Choice, best_length
from edge_agent.policy import Drafting
from edge_agent.speculation_ledger import SpeculationLedger
from shared.acceptance import Draft

EXPECTED_RATES = {"ngram": 0.5, "prediction": 0.7, "head": 0.45, "model": 0.6}
"""Acceptance of a drafter's token before any was judged."""

FREE_DRAFT = 0.03
"""A drafter whose token costs less than this share of a direct token is free: its drafts are judged when they are
there, and nothing is lost by asking."""

MARGIN = 0.01
"""Expected gains under this share of a direct round are noise."""

SMALL_CATCH_UP = 0.25
"""Direct rounds of catching up that are no investment but a part of the draft."""

ENOUGH_RETURN = 4.0
"""Times its cost that a catch-up has to bring, however little that is in time."""

OFF_AFTER = 8
"""Drafts in a row that weren't worth verifying, until drafting is switched off."""

LOOK_EVERY = 4
"""Rounds between looks at what a free drafter would propose, while drafting is off."""

VALUE_ROUNDS = 16.0
VALUE_KEPT = 1.0 - 1.0 / VALUE_ROUNDS

TRIAL_SHARE = 0.1
"""A costly drafter is tried, its catching up included, for at most this share of what the answer has taken so far: a
short answer pays for no trial, whatever the accounts hold."""

TOKENS_A_ROUND = 2.0
"""What a round with a draft is taken to commit, where a gain over the rest of an answer is reckoned."""


class Prospect(NamedTuple):
    """What lies ahead of a round. catch_up: what each drafter has to take in first, in direct rounds; nothing if not
    named. tokens_left: what the answer will probably still need. least_saving: what a catch-up must save beyond itself.
    """

    catch_up: Mapping[str, float]
    tokens_left: float
    least_saving: float


class Outcome(NamedTuple):
    """A finished round, its costs in direct rounds. draft_costs: what each costly drafter spent on its draft.
    catch_up_costs: what it spent on catching up before.
    """

    draft: Draft
    accepted: int
    verify_cost: float
    draft_costs: Mapping[str, float]
    catch_up_costs: Mapping[str, float]


class DraftAdvisor:
    """One request's view of its drafters."""

    def __init__(
        self, drafters: Mapping[str, float], prior: AcceptancePrior, ledger: SpeculationLedger, probe_every: int
    ) -> None:
        """drafters: cost of a token of each, in direct rounds. probe_every: rounds between trials of what lost."""
        self._drafters = drafters
        self._accounts = ledger.accounts
        self._ledger = ledger
        self._probe_every = probe_every
        self._unused = 0
        self._since_look = 0
        self._decoded = VALUE_ROUNDS / 2
        self._committed = VALUE_ROUNDS / 2
        self.value = 1.0
        """What a token costs on average, in direct rounds; 1 where speculation gains nothing."""
        self._spent = 0.0
        self._curve = CostCurve((1.0,))
        self._limits: dict[str, int] = {}
        self._promises: dict[str, float] = {}
        self._trials: list[str] = []
        self._appraised: list[tuple[Draft, Choice]] = []
        self.window = AcceptanceWindow(prior)

    @property
    def speedup(self) -> float:
        """Direct time over time with drafts, of the last rounds."""
        return self._committed / self._decoded

    def advise(self, drafters: Mapping[str, float], curve: CostCurve, ceiling: int, prospect: Prospect) -> Drafting:
        """What drafting promises in the coming round. drafters: their costs as they are measured now. ceiling: the
        longest draft to think of."""
        self._drafters, self._curve = drafters, curve
        self._promises = {}
        free: list[str] = []
        asked: list[str] = []
        trials: list[str] = []
        extra = curve.extra(1)
        for name, cost in drafters.items():
            if cost < FREE_DRAFT:
                free.append(name)
                continue
            loss, catch_up = cost + extra, prospect.catch_up.get(name, 0.0)
            self._promises[name] = self.window.promise(name, self._unseen(name, loss, catch_up))
            if self._pays(name, loss, catch_up, prospect):
                asked.append(name)
            elif self._may_try(name, loss, catch_up):
                trials.append(name)
        self._trials = trials
        looking = not self._is_off or self._since_look >= LOOK_EVERY
        self._limits = dict.fromkeys([*asked, *trials, *(free if looking else [])], ceiling)
        if free and not self._is_off:
            return Drafting(ceiling, 0, self.speedup, free=True)
        if asked:
            return Drafting(ceiling, 0, 1.0 + max(self._promises[name] for name in asked), free=True)
        if self._limits:
            self._since_look = 0
            return Drafting(0, ceiling, self.speedup, free=bool(free))
        return Drafting(0, 0, self.speedup, rests=self._since_look + 1 < LOOK_EVERY)

    def limit(self, drafter: str) -> int:
        """The longest draft worth asking of this drafter in the coming round; 0 for none."""
        return self._limits.get(drafter, 0)

    def promise(self, drafter: str) -> float:
        """What asking this drafter is expected to gain, its cost paid; a trial only where nothing else gains."""
        if self.is_free(drafter):
            return math.inf
        return math.ulp(0.0) if drafter in self._trials else self._promises[drafter]

    def gain(self, draft: Draft) -> float:
        """What the best length of a draft is expected to gain, now that it is there and its cost is spent."""
        choice = self._choose(draft, self._accounts[draft.drafter].rounds.credit)
        self._appraised.append((draft, choice))
        return choice.gain

    def go_on(self, drafter: str, confidences: Sequence[float]) -> bool:
        """Whether one more token promises more than drafting and verifying it cost, and the account can bear it."""
        length = len(confidences)
        if self._loss(drafter, length + 1) > self._accounts[drafter].rounds.credit:
            return False
        rates = self.window.rates(Draft((0,) * length, drafter, confidences=tuple(confidences)))
        chance = math.prod(rates) * self.window.typical_rates(drafter, 1, EXPECTED_RATES.get(drafter, 0.5))[0]
        extra = self._curve.at(length + 2) - self._curve.at(length + 1) + self._drafters[drafter]
        return chance * self.value > extra

    def trim(self, draft: Draft, *, forced: bool = False) -> int:
        """How many tokens of a draft to verify."""
        if not draft.tokens:
            return 0
        length = self._length(draft, forced=forced)
        account = self._accounts[draft.drafter]
        self._unused = 0 if length else self._unused + 1
        if length:
            account.paid()
            return length
        on_trial = draft.drafter in self._trials or account.may_try
        if forced or (on_trial and account.rounds.credit >= self._curve.extra(1)):
            account.tried(self._probe_every)
            return 1
        return 0

    def observe(self, round: Outcome, share: float) -> None:
        """A round is over. share: of its time, for trying things out."""
        self._since_look += 1
        cost = round.verify_cost + sum(round.draft_costs.values())
        self._spent += cost
        self._decoded = self._decoded * VALUE_KEPT + cost
        self._committed = self._committed * VALUE_KEPT + round.accepted + 1
        self.value = min(1.0, self._decoded / self._committed)
        self._ledger.accrue(cost * share)
        for draft, choice in self._appraised:
            cost = self._drafters[draft.drafter]
            if cost >= FREE_DRAFT:
                self.window.asked(draft.drafter, choice.gain - len(draft.tokens) * cost)
        self._appraised.clear()
        for name, spent in round.draft_costs.items():
            self._accounts[name].settle(-spent)
        for name, spent in round.catch_up_costs.items():
            self._accounts[name].starts.put(-spent)
        if round.draft.tokens:
            # A direct round neither saves nor loses: how far its own time lies off the average is noise.
            self._accounts[round.draft.drafter].settle(round.accepted + 1 - round.verify_cost)
        self.window.add(round.draft, round.accepted)

    def is_free(self, drafter: str) -> bool:
        """Whether asking costs next to nothing."""
        return self._drafters.get(drafter, 1.0) < FREE_DRAFT

    @property
    def _is_off(self) -> bool:
        return self._unused >= OFF_AFTER

    def _choose(self, draft: Draft, most_extra: float) -> Choice:
        rates = self.window.each_rate(draft)
        return best_length(rates, self._curve, value=self.value, margin=MARGIN, most_extra=most_extra)

    def _length(self, draft: Draft, *, forced: bool) -> int:
        """The best length; where drafts are forced, whatever it may lose."""
        if forced:
            return self._choose(draft, math.inf).length
        known = next((choice for appraised, choice in self._appraised if appraised is draft), None)
        return (known or self._choose(draft, self._accounts[draft.drafter].rounds.credit)).length

    def _unseen(self, drafter: str, loss: float, catch_up: float) -> float:
        """What a costly drafter promises before it has shown anything: the gain of one token, at its kind's rate.
        loss: of one draft token that is rejected."""
        too_dear = loss + catch_up > SMALL_CATCH_UP and loss + catch_up > TRIAL_SHARE * self._spent
        return 0.0 if too_dear else max(0.0, EXPECTED_RATES.get(drafter, 0.5) * self.value - loss)

    def _pays(self, drafter: str, loss: float, catch_up: float, prospect: Prospect) -> bool:
        """Whether a costly drafter's promise is worth its catching up."""
        promise = self._promises[drafter]
        if promise <= MARGIN or self._accounts[drafter].rounds.credit < loss:
            return False
        if catch_up <= SMALL_CATCH_UP:
            return True
        saving = promise * prospect.tokens_left / TOKENS_A_ROUND
        least = min(prospect.least_saving, ENOUGH_RETURN * catch_up)
        return saving - catch_up > least and self._accounts[drafter].starts.credit >= 0.0

    def _may_try(self, drafter: str, loss: float, catch_up: float) -> bool:
        account, whole = self._accounts[drafter], loss + catch_up
        return (
            account.may_try
            and account.rounds.credit >= loss
            and account.starts.credit >= whole
            and self._spent * TRIAL_SHARE >= whole
        )

    def _loss(self, drafter: str, length: int) -> float:
        """What a draft of this length loses if all of it is rejected."""
        return length * self._drafters[drafter] + self._curve.extra(length)
