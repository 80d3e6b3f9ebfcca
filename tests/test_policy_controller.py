"""The controller over whole requests: never slower, off and on again, private, and what it learns."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from edge_agent.controller import RoundState
from edge_agent.cost_model import CostModel
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.device_state import DeviceState, Network
from edge_agent.drafters import ChainDrafter, ModelDrafter, NgramDrafter
from edge_agent.link_state import LinkState
from edge_agent.policy_controller import EngineLoad, PolicyController, PolicyEngine, Senses
from edge_agent.request import Execution, GenerationRequest, Privacy, Speculation
from edge_agent.round import Origin, Round, TokenEvent
from edge_agent.session import Session
from edge_agent.speculation_ledger import STOCK, SpeculationLedger
from edge_agent.thresholds import PRESETS, Preset
from edge_agent.verifier import LocalVerifier
from shared.acceptance import Draft
from shared.errors import CloudUnavailableError
from shared.inference_thread import InferenceThread
from shared.sampling import SamplingParams
from tests.fakes import TableLM
from tests.simulated_rounds import CURVES, Drafts, Result, curve, play

REQUEST = GenerationRequest(prompt=(1,), max_tokens=64)
SERVER = PRESETS[Preset.SERVER]


Kind = Drafts | Callable[[int], Drafts]


class Bench:
    """A policy over one machine's costs, in simulated time."""

    def __init__(
        self, machine: str = "small", seed: int = 0, *, free: Sequence[str] = ("ngram",), costly: Sequence[Drafts] = ()
    ) -> None:
        """free: look-ups. costly: drafters whose costs were calibrated."""
        self.costs = curve(machine)
        self.now = 0.0
        self.rng = random.Random(seed)
        self.engine = PolicyEngine(
            CostModel(self.costs, {drafts.name: drafts.cost_s for drafts in costly}),
            SERVER,
            drafters=(*free, *(drafts.name for drafts in costly)),
            catch_up_s={drafts.name: drafts.catch_up_s for drafts in costly},
            clock=lambda: self.now,
        )

    def play(self, *kinds: Kind, request: GenerationRequest = REQUEST) -> Result:
        """One request."""
        drafts = [_constant(kind) if isinstance(kind, Drafts) else kind for kind in kinds]
        return play(self.engine.open(request), request, self.costs, drafts, self.rng, 0.05, self.pass_time)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def ratio(self, *kinds: Drafts, requests: int, request: GenerationRequest = REQUEST) -> float:
        """Direct time over time with the policy; without the prompt's."""
        results = [self.play(*kinds, request=request) for _ in range(requests)]
        return sum(r.tokens for r in results) * self.costs[0] / sum(r.seconds for r in results)


def _constant(drafts: Drafts) -> Callable[[int], Drafts]:
    return lambda tokens: drafts


MODEL = Drafts(1.0, 0.95, "model", 0.95, 0.029)
"""A third of a direct token's time on the laptop's curve."""

HEAD = Drafts(1.0, 1.0, "head", None, 0.008, 0.0004)
"""A cheap drafter that knows when it is right; so many tokens in 10 are."""


def test_a_round_that_goes_on_is_followed_by_a_direct_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are never right: the policy looks at them now and then, and says when it won't."""
    orders: list[Decision] = []
    decide = PolicyController.decide

    def noted(controller: PolicyController, state: RoundState) -> Decision:
        orders.append(decide(controller, state))
        return orders[-1]

    monkeypatch.setattr(PolicyController, "decide", noted)
    Bench().play(Drafts(1.0, 0.0))
    assert sum(each.goes_on for each in orders) > len(orders) / 5
    assert all(after.mode is Mode.LOCAL_DIRECT for each, after in pairwise(orders) if each.goes_on)
    assert any(each.reason is Reason.PROBE for each in orders), "it looks now and then"


@pytest.mark.parametrize("machine", CURVES)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.8])
def test_never_slower(machine: str, rate: float) -> None:
    """A category of the benchmark is some requests of 64 tokens; here the very first are among them."""
    assert Bench(machine).ratio(Drafts(0.6, rate), requests=12) > 0.97


@pytest.mark.parametrize("machine", CURVES)
def test_drafts_that_boast_and_are_useless_cost_little(machine: str) -> None:
    assert Bench(machine).ratio(Drafts(1.0, 0.0, confidence=0.77), requests=12) > 0.97


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.95])
def test_a_costly_drafter_is_never_slower_either(rate: float) -> None:
    drafts = replace(MODEL, rate=rate, confidence=max(rate, 0.3))
    assert Bench("laptop", costly=[drafts]).ratio(drafts, requests=20) > 0.97


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prompt_length", [20, 300])
def test_several_drafters_that_are_all_useless_cost_little(prompt_length: int, seed: int) -> None:
    """A category of the benchmark, five answers, by a policy that knows nothing yet."""
    useless = [
        Drafts(0.8, 0.0),
        replace(HEAD, rate=0.0),
        Drafts(1.0, 0.0, "model", 0.9, 0.04, 0.0036),
    ]
    request = replace(REQUEST, prompt=(1,) * prompt_length)
    assert Bench("laptop", seed, costly=useless[1:]).ratio(*useless, requests=5, request=request) > 0.97


@pytest.mark.parametrize("seed", range(5))
def test_the_drafter_that_pays_is_found_among_those_that_do_not(seed: int) -> None:
    kinds = [Drafts(0.5, 0.1), HEAD, Drafts(1.0, 0.3, "model", 0.9, 0.04, 0.0036)]
    request = replace(REQUEST, prompt=(1,) * 100)
    bench = Bench("laptop", seed, costly=kinds[1:])
    first = bench.play(*kinds, request=request)
    assert first.drafters["head"] > first.drafters["model"]
    assert bench.ratio(*kinds, requests=10, request=request) > 1.25


def test_a_sure_lookup_is_taken_before_a_drafter_that_costs() -> None:
    kinds = [Drafts(0.5, 0.97, confidence=0.95), HEAD]
    bench = Bench("laptop", costly=kinds[1:])
    for _ in range(5):
        bench.play(*kinds)
    result = bench.play(*kinds, request=replace(REQUEST, max_tokens=500))
    assert result.drafters["ngram"] > 20
    assert result.drafters["head"] > 20


def test_good_drafts_pay() -> None:
    assert Bench("small").ratio(Drafts(0.6, 0.9), requests=20) > 1.3
    assert Bench("laptop", costly=[MODEL]).ratio(MODEL, requests=20) > 1.1


def test_speculation_goes_off_and_comes_back_when_the_work_improves() -> None:
    """Useless for 300 tokens, then good: off with a reason, probed with a reason, and on again."""
    bench = Bench("small")
    request = replace(REQUEST, max_tokens=1200)
    result = bench.play(lambda tokens: Drafts(1.0, 0.0 if tokens < 300 else 0.95), request=request)
    reasons = [decision.reason for decision in result.decisions]
    assert Reason.ACCEPTANCE_LOW in reasons
    assert Reason.PROBE in reasons
    off = [decision for decision in result.decisions if decision.reason is Reason.ACCEPTANCE_LOW]
    assert all(decision.mode is Mode.LOCAL_DIRECT and decision.gamma == 0 for decision in off)
    assert reasons[-20:-1] == [Reason.NOMINAL] * 19
    assert min(result.verified[-20:-3]) >= 1


def test_off_is_not_permanent_for_a_costly_drafter() -> None:
    request = replace(REQUEST, max_tokens=3000)
    kind = lambda tokens: replace(MODEL, rate=0.0 if tokens < 300 else 0.97)  # noqa: E731
    result = Bench("laptop", free=(), costly=[MODEL]).play(kind, request=request)
    reasons = [decision.reason for decision in result.decisions]
    assert Reason.ACCEPTANCE_LOW in reasons
    assert Reason.PROBE in reasons
    assert max(result.verified[-20:]) > 0


def test_each_request_starts_at_the_same_gamma() -> None:
    bench = Bench("small")
    first = bench.play(Drafts(1.0, 0.0)).decisions[0]
    assert bench.play(Drafts(1.0, 0.9)).decisions[0] == first


def state(request: GenerationRequest = REQUEST, round: int = 0, generated: int = 0) -> RoundState:
    return RoundState(request, round, generated, 1000)


def a_round(decision: Decision, number: int, verify_s: float, draft: Draft | None = None) -> Round:
    return Round(number, decision, draft or Draft(), 0, 7, (), 0.0, verify_s)


def test_times_of_prefill_and_of_crowded_rounds_are_no_costs() -> None:
    load = EngineLoad(running=1)
    engine = PolicyEngine(CostModel(curve("small")), SERVER, senses=Senses(load=lambda: load))
    controller = engine.open(REQUEST)
    for number in range(60):
        load = EngineLoad(running=2 if number else 1)
        decision = controller.decide(state(round=number))
        controller.observe(state(round=number), a_round(decision, number, 5.0))
    assert engine.costs.direct == curve("small")[0]
    for number in range(60, 80):
        load = EngineLoad(running=1)
        decision = controller.decide(state(round=number))
        controller.observe(state(round=number), a_round(decision, number, 0.058))
    assert engine.costs.direct == pytest.approx(0.058)


LINK = LinkState(True, True, 0.02, tuple(curve("small")))
HOT = DeviceState(temperature_c=99.0, battery_percent=3.0, charging=False, network=Network.WIFI)


def open_with(request: GenerationRequest, link: LinkState = LINK, device: DeviceState = HOT, now: float = 0.0):  # type: ignore[no-untyped-def]
    engine = PolicyEngine(
        CostModel(curve("small")), SERVER, senses=Senses(lambda: device, lambda: link), clock=lambda: now
    )
    return engine, engine.open(request)


@pytest.mark.parametrize("execution", Execution)
def test_private_requests_never_leave_even_when_the_cloud_fails(execution: Execution) -> None:
    request = replace(REQUEST, execution=execution, privacy=Privacy.ON_DEVICE)
    _, controller = open_with(request)
    for number in range(50):
        decision = controller.decide(state(request, number))
        assert decision.mode.on_device
        controller.observe(state(request, number), a_round(decision, number, 0.03))


def test_a_cloud_that_fails_is_left_alone_for_a_while() -> None:
    _, controller = open_with(REQUEST)
    assert controller.decide(state()).mode is Mode.CLOUD_GENERATE
    fallback = controller.cloud_failed(state())
    assert (fallback.mode, fallback.reason) == (Mode.LOCAL_DIRECT, Reason.CLOUD_UNAVAILABLE)
    assert controller.decide(state(round=1)).reason is Reason.CLOUD_UNAVAILABLE


def test_only_cloud_fails_with_the_cloud() -> None:
    request = replace(REQUEST, execution=Execution.ONLY_CLOUD)
    _, controller = open_with(request, device=DeviceState())
    assert not controller.decide(state(request)).mode.on_device
    with pytest.raises(CloudUnavailableError):
        controller.cloud_failed(state(request))


def test_drafts_for_the_cloud_are_not_trimmed() -> None:
    request = replace(REQUEST, execution=Execution.PREFER_CLOUD)
    _, controller = open_with(request, device=DeviceState())
    decision = controller.decide(state(request))
    assert decision.mode is Mode.CLOUD_VERIFY
    draft = Draft((7,) * decision.gamma, "ngram", confidences=(0.01,) * decision.gamma)
    assert controller.draft_limit("ngram") >= decision.gamma
    assert controller.trim(state(request), draft) == decision.gamma


def test_what_drafting_for_the_cloud_costs_is_learnt_there() -> None:
    request = replace(REQUEST, execution=Execution.PREFER_CLOUD)
    engine, controller = open_with(request, device=DeviceState())
    for number in range(20):
        decision = controller.decide(state(request, number))
        draft = Draft((7,) * 4, "model", confidences=(0.9,) * 4)
        assert controller.gain(draft) > controller.promise("model")
        controller.observe(state(request, number), a_round(decision, number, 0.05, draft)._replace(draft_s=0.08))
    assert engine.costs.draft_cost("model") == pytest.approx(0.02)


def test_speculation_on_always_drafts() -> None:
    request = replace(REQUEST, speculation=Speculation.ON)
    result = Bench("small").play(Drafts(1.0, 0.0), request=request)
    assert min(result.verified[:-1]) >= 1


def test_energy_of_a_request_is_named_and_adds_up() -> None:
    spent = 0.0

    class Meter:
        source = "test"

        def total_j(self) -> float:
            return spent

    engine = PolicyEngine(CostModel(curve("small")), SERVER, meter=Meter())
    controller = engine.open(REQUEST)
    for number in range(5):
        spent += 100.0  # between the rounds of a lone request nobody pays
        decision = controller.decide(state(round=number))
        spent += 2.0
        controller.observe(state(round=number), a_round(decision, number, 0.03))
    assert controller.energy.total == pytest.approx(10.0)
    assert controller.energy.prefill == pytest.approx(2.0)
    assert controller.energy_source == "test"
    del controller
    gc.collect()


def test_snapshot_shows_the_decisions() -> None:
    bench = Bench("small")
    bench.play(Drafts(0.5, 0.7), request=replace(REQUEST, request_id="r1"))
    shown = bench.engine.snapshot()
    assert shown["mode"] in {mode.value for mode in Mode}
    assert shown["decisions"][0]["request_id"] == "r1"
    assert len(shown["cost_model"]["verify_ms"]) == 9
    assert shown["thresholds"]["max_gamma"] == 16


def test_thresholds_change_while_a_request_runs() -> None:
    bench = Bench("small")
    controller = bench.engine.open(REQUEST)
    assert controller.decide(state()).gamma > 2
    bench.engine.update_thresholds(SERVER.updated({"max_gamma": 2}))
    assert controller.decide(state(round=1)).gamma == 2


def test_real_loop_gives_the_target_own_text() -> None:
    """Through the session with toy models: whatever the policy chooses, the text is the target's."""
    target, draft = TableLM(16, 5), TableLM(16, 6, tied_to=TableLM(16, 5), blend=0.2)
    request = GenerationRequest((1, 2, 3, 1, 2, 3), 150, SamplingParams(seed=3))

    async def answer(engine: PolicyEngine | None) -> list[int]:
        thread = InferenceThread()
        try:
            verifier = LocalVerifier(target, thread)
            target.truncate(0)
            verifiers = {Mode.LOCAL_DIRECT: verifier, Mode.LOCAL_SPECULATIVE: verifier}
            used = engine or PolicyEngine(CostModel(curve("small")), SERVER.updated({"max_gamma": 0}))
            controller = used.open(request)
            chain = ChainDrafter([NgramDrafter(), ModelDrafter(draft, thread)], controller)
            session = Session(request, controller, chain, verifiers, 4096)
            return [event.token async for round in session.run() for event in round.tokens]
        finally:
            thread.stop()

    engine = PolicyEngine(
        CostModel([0.01, 0.0101, 0.0102, 0.0103, 0.0104], {"model": 0.001}), SERVER, drafters=("ngram", "model")
    )
    assert asyncio.run(answer(engine)) == asyncio.run(answer(None))
    assert engine.decisions[0].decision.mode is Mode.LOCAL_SPECULATIVE


CATCH_UP_CURVE = [0.042, 0.046, 0.057, 0.067, 0.077]
SURE = Draft((5, 5), "model", (), (0.95, 0.95))


def catching_up(
    prompt_length: int, max_tokens: int, *, shown: int = 0, taken_in: int = 0
) -> tuple[PolicyEngine, PolicyController]:
    """A request before its first round, with a draft model that takes 2 ms a token to take the prompt in, and that was
    worth asking so many times before."""
    engine = PolicyEngine(
        CostModel(CATCH_UP_CURVE, {"model": 0.005}),
        PRESETS[Preset.SERVER],
        drafters=("ngram", "model"),
        catch_up_s={"model": 0.002},
    )
    for _ in range(shown):
        engine.prior.asked("model", 0.3)
    request = GenerationRequest((1,) * prompt_length, max_tokens)
    controller = engine.open(request)
    controller.has_taken_in("model", taken_in)
    controller.decide(RoundState(request, 0, 0, 4000))
    return engine, controller


def test_a_draft_model_is_not_asked_where_taking_the_prompt_in_costs_more_than_it_saves() -> None:
    assert catching_up(prompt_length=200, max_tokens=128, shown=50)[1].draft_limit("model") > 0
    assert catching_up(prompt_length=2000, max_tokens=16, shown=50)[1].draft_limit("model") == 0
    assert catching_up(prompt_length=2000, max_tokens=16, shown=50)[1].draft_limit("ngram") > 0


def test_what_the_draft_model_still_holds_of_the_last_answer_is_not_caught_up_on() -> None:
    assert catching_up(prompt_length=1000, max_tokens=64, shown=50)[1].draft_limit("model") == 0
    assert catching_up(prompt_length=1000, max_tokens=64, shown=50, taken_in=950)[1].draft_limit("model") > 0


def test_an_unknown_draft_model_is_tried_only_where_little_is_at_stake() -> None:
    assert first_trial(prompt_length=20) is not None
    assert first_trial(prompt_length=200) is None


def test_a_trial_waits_until_the_answer_can_bear_it() -> None:
    """After 8 rounds the trial, catching up included, costs 0.79 of one: a tenth. Asked at once, a trial was 12 % of an
    answer of 18 tokens."""
    assert first_trial(prompt_length=20) == 8


def test_an_account_that_nobody_asks_hoards_nothing_that_another_needs() -> None:
    """Four shared the accrual, two of them never asked: a look-up that had lost its stock waited for 70 rounds."""
    ledger = SpeculationLedger(["prediction", "ngram", "pool", "head"])
    ledger.accounts["ngram"].settle(-STOCK)
    for _ in range(17):
        ledger.accrue(0.01)
    credits = {name: account.rounds.credit for name, account in ledger.accounts.items()}
    assert credits["ngram"] == pytest.approx(0.17)
    assert credits["pool"] == credits["prediction"] == STOCK
    ledger.accounts["ngram"].settle(STOCK)
    for _ in range(4):
        ledger.accrue(0.01)
    assert ledger.accounts["pool"].rounds.credit == pytest.approx(STOCK + 0.01)


def test_a_cheap_drafter_is_asked_before_it_has_shown_anything() -> None:
    """It then promises what its kind gives elsewhere; what it shows counts for more and more."""
    engine = PolicyEngine(
        CostModel([0.016, 0.0163, 0.021, 0.023, 0.027], {"head": 0.0012}), SERVER, drafters=("ngram", "head")
    )
    request = GenerationRequest((1,) * 20, 128)
    controller = engine.open(request)
    controller.decide(RoundState(request, 0, 0, 4000))
    assert controller.draft_limit("head") > 0
    assert controller.promise("head") == pytest.approx(0.45 - 0.075 - 0.3 / 16, abs=0.02)
    for _ in range(60):
        engine.prior.asked("head", -0.075)
    disappointed = engine.open(request)
    disappointed.decide(RoundState(request, 0, 0, 4000))
    assert disappointed.draft_limit("head") == 0


def first_trial(prompt_length: int) -> int | None:
    """The round of an answer of 128 tokens in which an unknown draft model is first asked."""
    _, controller = catching_up(prompt_length, 128)
    request = GenerationRequest((1,) * prompt_length, 128)
    decision = Decision(Mode.LOCAL_DIRECT, 0, Reason.NOMINAL)
    for number in range(128):
        at = RoundState(request, number, number, 4000)
        controller.decide(at)
        if controller.draft_limit("model"):
            return number
        controller.observe(at, Round(number, decision, Draft(), 0, 5, (), draft_s=0.0, verify_s=0.042))
    return None


def test_a_catch_up_stops_neither_other_drafters_nor_its_own() -> None:
    """The first draft of a model includes the prompt: seconds that say nothing about what a draft costs."""
    engine, controller = catching_up(prompt_length=256, max_tokens=128, shown=50)
    account = engine.ledger.accounts["model"]
    before = account.rounds.credit, account.starts.credit
    assert controller.gain(SURE) > 0
    assert controller.trim(state(), SURE) == 2
    tokens = tuple(TokenEvent(256 + index, 5, Origin.DRAFT) for index in range(3))
    decision = Decision(Mode.LOCAL_SPECULATIVE, 2, Reason.NOMINAL)
    controller.observe(state(), Round(0, decision, SURE, 2, 5, tokens, draft_s=0.7, verify_s=2.8))
    assert account.rounds.credit > before[0]
    assert account.starts.credit < before[1]
    assert engine.costs.draft_cost("model") == 0.005
    assert engine.prior.promise("model", 0.0) > 0.2


def test_drafting_stops_where_another_token_is_not_worth_its_cost() -> None:
    _, controller = catching_up(prompt_length=20, max_tokens=128)
    assert controller.go_on("model", [0.95])
    assert not controller.go_on("model", [0.15])
    assert not controller.go_on("model", [0.95, 0.1])


def test_a_costly_drafter_is_asked_only_where_it_promises_more_than_a_draft_that_is_there() -> None:
    _, controller = catching_up(prompt_length=20, max_tokens=128, shown=50)
    unsure, sure = Draft((5,), "ngram", (), (0.2,)), Draft((5,) * 4, "ngram", (), (0.95,) * 4)
    assert controller.gain(unsure) < controller.promise("model") < controller.gain(sure)
    assert controller.promise("ngram") > controller.gain(sure)


def test_what_was_drafted_for_a_cloud_that_failed_is_not_charged_to_the_device() -> None:
    """The device's own target drafts for the cloud; on the device that drafter has no account."""
    engine = PolicyEngine(CostModel(CATCH_UP_CURVE), PRESETS[Preset.SERVER], cloud_drafters=("ngram", "model"))
    controller = engine.open(REQUEST)
    controller.decide(state())
    controller._proposed.append(SURE)
    decision = controller.cloud_failed(state())
    event = TokenEvent(len(REQUEST.prompt), 5, Origin.TARGET)
    controller.observe(state(), Round(0, decision, Draft(), 0, 5, (event,), draft_s=0.0, verify_s=0.05))
    assert "model" not in engine.ledger.accounts
