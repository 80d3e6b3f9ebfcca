"""The controller behind every request: reads the device, the link and the run, asks the policy, and learns."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from edge_agent.acceptance_window import AcceptancePrior
from edge_agent.config import Objective
from edge_agent.controller import RoundState
from edge_agent.cost_model import CostCurve, CostModel
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.device_state import UNKNOWN_DEVICE, DeviceState
from edge_agent.draft_advisor import EXPECTED_RATES, DraftAdvisor, Outcome, Prospect
from edge_agent.energy import CpuTimeMeter, EnergyAccount, EnergyMeter, EnergyUse, radio_j
from edge_agent.gamma_chooser import Choice, best_length, curve_mix
from edge_agent.link_state import NO_LINK, LinkState
from edge_agent.policy import NO_DRAFTING, Drafting, PolicyInputs, PolicyMemory, Wishes, decide
from edge_agent.request import Execution, GenerationRequest, Speculation
from edge_agent.round import Round
from edge_agent.speculation_ledger import SpeculationLedger
from edge_agent.thresholds import Thresholds
from shared.acceptance import Draft
from shared.errors import CloudUnavailableError

ENERGY_WEIGHTS = {Objective.LATENCY: 0.0, Objective.BALANCED: 0.5, Objective.ENERGY: 1.0}
DECISIONS_KEPT = 50
LONGEST_DRAFT = 16
LAST_COMMITTED = 16
"""Tokens that a drafter may be behind and still draft at its usual cost: those of the last round."""
ANY_GAIN = 1.0
"""Of asking, where a draft is wanted whatever it is worth: the first one is taken."""
CLOUD_CHOICE_EVERY = 8
"""Rounds between new choices of the draft length for an unchanged link."""
NO_CHOICE = Choice(0, 0.0, 1.0, float("inf"))
FIRST_GUESS_OF_LENGTH = 128.0


class EngineLoad(NamedTuple):
    """Requests that decode now, and requests that wait for it."""

    running: int = 1
    waiting: int = 0


ALONE = EngineLoad()


@dataclass(frozen=True)
class Senses:
    """Where the policy looks before each round. Each call must be cheap: it stands in the request's path."""

    device: Callable[[], DeviceState] = lambda: UNKNOWN_DEVICE
    link: Callable[[], LinkState] = lambda: NO_LINK
    load: Callable[[], EngineLoad] = lambda: ALONE


@dataclass(frozen=True)
class NotedDecision:
    """A decision as `GET /v1/policy` lists it."""

    at: float
    request_id: str
    round: int
    decision: Decision


class PolicyEngine:
    """What requests share: costs, acceptance so far, the device's rung, thresholds. Opens one controller a request."""

    def __init__(
        self,
        costs: CostModel,
        thresholds: Thresholds,
        *,
        drafters: Sequence[str] = ("prediction", "ngram"),
        cloud_drafters: Sequence[str] | None = None,
        catch_up_s: Mapping[str, float] | None = None,
        senses: Senses | None = None,
        meter: EnergyMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """drafters: the names of those that sessions use; the costly ones need a cost in `costs`. cloud_drafters: those
        that draft for the cloud, where the device's own target can draft too; the same by default. catch_up_s: seconds
        a token that a drafter with a cache of its own needs to take in what was committed without it.
        """
        self.costs = costs
        self.thresholds = thresholds
        self.drafters = tuple(drafters)
        self.cloud_drafters = self.drafters if cloud_drafters is None else tuple(cloud_drafters)
        self.catch_up_s = dict(catch_up_s or {})
        self.senses = senses or Senses()
        self.energy = EnergyAccount(meter or CpuTimeMeter(4.0))
        self.joules = CostModel(costs.curve.values)
        self.prior = AcceptancePrior()
        self.ledger = SpeculationLedger(self.drafters)
        self.clock = clock
        self.memory = PolicyMemory()
        self.decisions: deque[NotedDecision] = deque(maxlen=DECISIONS_KEPT)
        self.typical_length = FIRST_GUESS_OF_LENGTH
        self.speedup = math.nan
        """Of the latest round on the device: expected direct time over time with drafts. NaN before the first."""
        self._measured_joules = False

    def open(self, request: GenerationRequest) -> PolicyController:
        """The controller of a new request; it starts from the same place as every other."""
        return PolicyController(self, request)

    def update_thresholds(self, thresholds: Thresholds) -> None:
        """New thresholds, from the next round on."""
        self.thresholds = thresholds

    def relative_curve(self) -> CostCurve:
        """The curve that drafts are chosen by: c(m) in direct rounds, of time or energy as the objective says."""
        weight = ENERGY_WEIGHTS[self.thresholds.objective] if self._measured_joules else 0.0
        return curve_mix(self.costs.relative, self.joules.relative, weight)

    def drafter_costs(self) -> dict[str, float]:
        """Time of a draft token in direct rounds, by drafter."""
        direct = self.costs.direct
        return {name: self.costs.draft_cost(name) / direct for name in self.drafters}

    def learn_energy(self, positions: int, joules: float) -> None:
        """A round over so many positions, alone on the machine, took so many joules."""
        self.joules.observe_verify(positions, joules)
        self._measured_joules = True

    def learn_length(self, num_generated: int) -> None:
        """An answer ended after so many tokens."""
        self.typical_length += 0.1 * (num_generated - self.typical_length)

    def snapshot(self) -> dict[str, Any]:
        """The policy as `GET /v1/policy` shows it."""
        last = self.decisions[-1].decision if self.decisions else None
        return {
            "mode": last.mode.value if last else None,
            "gamma": last.gamma if last else None,
            "reason": last.reason.value if last else None,
            "heat_rung": self.memory.heat.name.lower(),
            "battery_rung": self.memory.charge.name.lower(),
            "thresholds": self.thresholds.model_dump(mode="json"),
            "cost_model": {
                "verify_ms": [round(value * 1e3, 3) for value in self.costs.curve.values],
                "draft_token_ms": {name: round(cost * 1e3, 4) for name, cost in self.costs.draft_costs.items()},
            },
            "acceptance": {name: round(self.prior.honesty(name), 3) for name in self.drafters},
            "credit": {name: round(account.rounds.credit, 3) for name, account in self.ledger.accounts.items()},
            "energy_source": self.energy.source,
            "decisions": [
                {
                    "request_id": noted.request_id,
                    "round": noted.round,
                    "mode": noted.decision.mode.value,
                    "gamma": noted.decision.gamma,
                    "reason": noted.decision.reason.value,
                    "age_s": round(self.clock() - noted.at, 3),
                }
                for noted in self.decisions
            ],
        }


class PolicyController:
    """One request's `RoundController`."""

    def __init__(self, engine: PolicyEngine, request: GenerationRequest) -> None:
        self._engine = engine
        self._wishes = Wishes(
            request.execution, request.speculation, request.privacy, request.max_gamma, request.structured
        )
        self._request_id = request.request_id
        self._advisor = DraftAdvisor(engine.drafter_costs(), engine.prior, engine.ledger, engine.thresholds.probe_every)
        self._forced = request.speculation is Speculation.ON
        self._drafts_for_cloud = False
        self._last: Decision | None = None
        self._proposed: list[Draft] = []
        self._position = len(request.prompt)
        self._expected_left = request.max_tokens
        self._taken_in: dict[str, int] = {}
        self._cloud_failed_at: float | None = None
        self._cloud_link = NO_LINK
        self._cloud_choice = NO_CHOICE
        self._load = EngineLoad()
        self._spent = EnergyUse()

    @property
    def energy(self) -> EnergyUse:
        """Joules of this request so far; how they are known: `energy_source`."""
        return self._spent

    @property
    def energy_source(self) -> str:
        """`rapl`, `battery`, `cpu_time_model` or `simulated`."""
        return self._engine.energy.source

    @property
    def speedup(self) -> float:
        """Estimated direct time over time with drafts, of the last rounds."""
        return self._advisor.speedup

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over verified draft tokens; None while none was verified."""
        return self._advisor.window.acceptance_rate

    def has_taken_in(self, drafter: str, num_tokens: int) -> None:
        """See `Appraiser.has_taken_in`."""
        self._taken_in[drafter] = num_tokens

    def draft_limit(self, drafter: str) -> int:
        """See `Appraiser.draft_limit`."""
        if self._drafts_for_cloud or self._forced:
            return LONGEST_DRAFT
        return self._advisor.limit(drafter)

    def promise(self, drafter: str) -> float:
        """See `Appraiser.promise`."""
        if self._drafts_for_cloud or self._forced:
            return ANY_GAIN
        return self._advisor.promise(drafter)

    def gain(self, draft: Draft) -> float:
        """See `Appraiser.gain`. Drafts are noted: what they cost and were worth is learnt when the round is over."""
        if not draft.tokens:
            return 0.0
        self._proposed.append(draft)
        if self._drafts_for_cloud or self._forced:
            return 2 * ANY_GAIN
        return self._advisor.gain(draft)

    def go_on(self, drafter: str, confidences: Sequence[float]) -> bool:
        """See `Appraiser.go_on`. A draft for the cloud has the length that its link asks for."""
        return self._drafts_for_cloud or self._advisor.go_on(drafter, confidences)

    def decide(self, state: RoundState) -> Decision:
        """The orders for the next round."""
        engine = self._engine
        now = engine.clock()
        engine.energy.begin(self)
        self._load = engine.senses.load()
        self._position = len(state.request.prompt) + state.num_generated
        decision, engine.memory = decide(self._inputs(state, now), engine.thresholds, engine.memory, now)
        self._note(state, decision, now)
        return decision

    def trim(self, state: RoundState, draft: Draft) -> int:
        """The length that promises the most, judged by this draft's own confidences."""
        if self._drafts_for_cloud:
            return len(draft)  # Its length was chosen for the link; the cloud charges by the round trip.
        return self._advisor.trim(draft, forced=self._forced)

    def observe(self, state: RoundState, round: Round) -> None:
        """Learn costs, acceptance and energy from a finished round."""
        engine = self._engine
        joules = engine.energy.end(self)
        self._spend(state, round, joules)
        clean = self._is_clean_sample(round)
        positions = len(round.draft.tokens) + 1
        if round.decision.mode.on_device:
            if self._wishes.speculation is Speculation.OFF:
                engine.ledger.accrue(self._verify_cost(round, clean) * engine.thresholds.probe_share)
            else:
                self._advisor.observe(self._outcome(round, clean), engine.thresholds.probe_share)
            engine.speedup = self._advisor.speedup
            if clean:
                engine.costs.observe_verify(positions, round.verify_s)
                if (
                    joules > 0
                    and ENERGY_WEIGHTS[engine.thresholds.objective]
                    and not round.draft_s > 0.1 * round.verify_s
                ):
                    engine.learn_energy(positions, joules)
        else:
            self._advisor.window.add(round.draft, round.accepted)
            self._learn_drafts(round.draft_s)
        self._last = round.decision
        if round.finish_reason is not None:
            engine.learn_length(state.num_generated + len(round.tokens))

    def cloud_failed(self, state: RoundState) -> Decision:
        """Go on here, and leave the cloud alone for a while.

        Raises:
            CloudUnavailableError: the request is for the cloud only.
        """
        engine = self._engine
        if self._wishes.execution is Execution.ONLY_CLOUD:
            raise CloudUnavailableError("the cloud verifier can't be reached and the request forbids the device")
        now = self._cloud_failed_at = engine.clock()
        decision, engine.memory = decide(self._inputs(state, now), engine.thresholds, engine.memory, now)
        decision = Decision(decision.mode, decision.gamma, Reason.CLOUD_UNAVAILABLE, decision.pace_s)
        self._note(state, decision, now)
        return decision

    def _inputs(self, state: RoundState, now: float) -> PolicyInputs:
        engine, thresholds = self._engine, self._engine.thresholds
        link = engine.senses.link()
        if link != self._cloud_link or state.round % CLOUD_CHOICE_EVERY == 0:
            self._cloud_link, self._cloud_choice = link, self._choose_for_cloud(link)
        self._expected_left = max(1, min(state.num_left, max(int(engine.typical_length) - state.num_generated, 32)))
        cloud = self._cloud_choice
        failed = self._cloud_failed_at
        return PolicyInputs(
            wishes=self._wishes,
            device=engine.senses.device(),
            link=link,
            link_failed=failed is not None and now - failed < thresholds.cloud_retry_s,
            drafting=NO_DRAFTING if self._wishes.speculation is Speculation.OFF else self._drafting(),
            cloud_gamma=cloud.length,
            cloud_speed=cloud.tokens * engine.costs.direct / cloud.cost,
            direct_s=engine.costs.calibrated_direct,
            num_generated=state.num_generated,
            num_left=state.num_left,
            expected_left=self._expected_left,
            context_left=state.context_left,
            waiting=self._load.waiting,
            previous=self._last.mode if self._last else None,
        )

    def _drafting(self) -> Drafting:
        engine = self._engine
        ceiling = min(engine.thresholds.max_gamma, self._wishes.max_gamma, engine.costs.num_positions - 1)
        return self._advisor.advise(engine.drafter_costs(), engine.relative_curve(), ceiling, self._prospect())

    def _prospect(self) -> Prospect:
        catch_up = {name: self._catch_up(name) for name in self._engine.catch_up_s}
        gate = self._engine.thresholds.benefit_gate_s / self._engine.costs.direct
        return Prospect(catch_up, self._expected_left, gate)

    def _choose_for_cloud(self, link: LinkState) -> Choice:
        """The best draft for the link: a round trip is paid once a round, so drafts are longer than here."""
        if not link.usable or link.rtt_s is None or not link.verify_cost_s:
            return NO_CHOICE
        trip = link.rtt_s + link.queue_s
        curve = CostCurve(tuple(trip + cost for cost in link.verify_cost_s))
        costs = self._engine.costs
        best = Choice(0, 0.0, 1.0, curve.at(1))
        for name in self._engine.cloud_drafters:
            rates = self._advisor.window.typical_rates(name, link.gamma_limit, EXPECTED_RATES.get(name, 0.5))
            choice = best_length(rates, curve, value=curve.at(1), draft_cost=costs.draft_cost(name))
            best = max(best, choice, key=lambda candidate: candidate.gain)
        return best

    def _note(self, state: RoundState, decision: Decision, now: float) -> None:
        self._proposed.clear()  # Other orders, other drafts: those for a cloud that failed aren't the device's.
        self._drafts_for_cloud = decision.mode is Mode.CLOUD_VERIFY
        last = self._last
        if last is None or (last.mode, last.gamma, last.reason) != (decision.mode, decision.gamma, decision.reason):
            self._engine.decisions.append(NotedDecision(now, self._request_id, state.round, decision))

    def _is_clean_sample(self, round: Round) -> bool:
        """Whether the round's time is that of one pass: alone, and with nothing to catch up on."""
        return round.number > 0 and self._load.running <= 1 and self._last is not None and self._last.mode.on_device

    def _outcome(self, round: Round, clean: bool) -> Outcome:
        """What the round cost in direct rounds."""
        verify_cost = self._verify_cost(round, clean)
        draft_costs, catch_up_costs = self._learn_drafts(round.draft_s)
        return Outcome(round.draft, round.accepted, verify_cost, draft_costs, catch_up_costs)

    def _verify_cost(self, round: Round, clean: bool) -> float:
        """In direct rounds: measured where that is sound, within bounds of what was expected."""
        costs = self._engine.costs
        expected = costs.at(len(round.draft.tokens) + 1)
        verify_s = min(max(round.verify_s, 0.7 * expected), 1.5 * expected) if clean else expected
        return verify_s / costs.direct

    def _learn_drafts(self, draft_s: float) -> tuple[dict[str, float], dict[str, float]]:
        """What the drafters that were asked cost, and what catching up cost, in direct rounds, by drafter.

        Measured where one alone was asked and had nothing to catch up on; else as it is known.
        """
        costs = self._engine.costs
        draft_costs: dict[str, float] = {}
        catch_up_costs: dict[str, float] = {}
        asked = [draft for draft in self._proposed if not self._advisor.is_free(draft.drafter)]
        for draft in asked or self._proposed[:1]:
            name, length = draft.drafter, len(draft.tokens)
            spent = length * costs.draft_cost(name)
            catch_up = self._catch_up(name)
            if catch_up > 0.0:
                catch_up_costs[name] = catch_up
            elif len(asked) <= 1 and self._load.running <= 1:
                spent = draft_s
                costs.observe_draft(name, length, spent)
            draft_costs[name] = spent / costs.direct
            self._taken_in[name] = self._position
        return draft_costs, catch_up_costs

    def _catch_up(self, drafter: str) -> float:
        """Direct rounds that a drafter needs to take in what was committed without it."""
        behind = self._position - self._taken_in.get(drafter, 0) - LAST_COMMITTED
        if behind <= 0:
            return 0.0
        return behind * self._engine.catch_up_s.get(drafter, 0.0) / self._engine.costs.calibrated_direct

    def _spend(self, state: RoundState, round: Round, joules: float) -> None:
        """A round's joules by the share of time: a first round is all prefill; a cloud round's wait costs the radio."""
        spent, busy = self._spent, round.draft_s + round.verify_s
        draft = joules * round.draft_s / busy if busy > 0 else 0.0
        spent.draft += draft
        on_device = round.decision.mode.on_device
        if on_device and state.round == 0:
            spent.prefill += joules - draft
        else:
            spent.verify += joules - draft
        if not on_device:
            network = self._engine.senses.device().network
            spent.cloud_radio += radio_j(network, 512, 512, round.verify_s)
