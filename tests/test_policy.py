"""The policy's ladder, its order of precedence, and what no state may break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.config import Objective
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.device_state import UNKNOWN_DEVICE, DeviceReading, DeviceState, DeviceTracker, ThermalStatus
from edge_agent.link_state import LinkState
from edge_agent.policy import Drafting, PolicyInputs, PolicyMemory, Rung, Wishes, climb, decide
from edge_agent.request import Execution, Privacy, Speculation
from edge_agent.thresholds import PRESETS, Preset, Thresholds, choose_preset, rising
from shared.errors import BadRequestError, ConfigError

PHONE = PRESETS[Preset.PHONE]
LINK = LinkState(True, True, 0.05, (0.03, 0.04, 0.05))
NORMAL = PolicyInputs(
    drafting=Drafting(8, 0, 1.3), cloud_gamma=6, cloud_speed=1.0, num_left=200, expected_left=200, context_left=1000
)
WITH_CLOUD = NORMAL._replace(link=LINK)
SPECULATIVE, DIRECT, VERIFY, GENERATE = (
    Mode.LOCAL_SPECULATIVE,
    Mode.LOCAL_DIRECT,
    Mode.CLOUD_VERIFY,
    Mode.CLOUD_GENERATE,
)


def order(inputs: PolicyInputs, thresholds: Thresholds = PHONE) -> Decision:
    return decide(inputs, thresholds, PolicyMemory(), 0.0)[0]


def at(celsius: float | None = None, **state: Any) -> DeviceState:
    return DeviceState(temperature_c=celsius, age_s=0.0, source="test", **state)


def battery(percent: float, charging: bool | None = False, **state: Any) -> DeviceState:
    return at(battery_percent=percent, charging=charging, **state)


@pytest.mark.parametrize(
    ("device", "alone", "with_cloud", "reason"),
    [
        (UNKNOWN_DEVICE, (SPECULATIVE, 8), (SPECULATIVE, 8), Reason.NOMINAL),
        (at(30.0), (SPECULATIVE, 8), (SPECULATIVE, 8), Reason.NOMINAL),
        (at(37.0), (SPECULATIVE, 4), (SPECULATIVE, 4), Reason.DEVICE_WARM),
        (at(39.5), (DIRECT, 0), (DIRECT, 0), Reason.DEVICE_WARM),
        (at(42.0), (DIRECT, 0), (GENERATE, 0), Reason.DEVICE_HOT),
        (at(45.0), (DIRECT, 0), (GENERATE, 0), Reason.DEVICE_CRITICAL),
        (at(headroom=0.75), (SPECULATIVE, 4), (SPECULATIVE, 4), Reason.DEVICE_WARM),
        (at(headroom=0.95), (DIRECT, 0), (GENERATE, 0), Reason.DEVICE_HOT),
        (at(thermal_status=ThermalStatus.LIGHT), (SPECULATIVE, 4), (SPECULATIVE, 4), Reason.DEVICE_WARM),
        (at(thermal_status=ThermalStatus.MODERATE), (DIRECT, 0), (DIRECT, 0), Reason.DEVICE_WARM),
        (at(thermal_status=ThermalStatus.SEVERE), (DIRECT, 0), (GENERATE, 0), Reason.DEVICE_HOT),
        (at(thermal_status=ThermalStatus.EMERGENCY), (DIRECT, 0), (GENERATE, 0), Reason.DEVICE_CRITICAL),
        (battery(30.0), (SPECULATIVE, 4), (SPECULATIVE, 4), Reason.BATTERY_LOW),
        (battery(20.0), (DIRECT, 0), (VERIFY, 3), Reason.BATTERY_LOW),
        (battery(10.0), (DIRECT, 0), (GENERATE, 0), Reason.BATTERY_CRITICAL),
        (battery(3.0), (DIRECT, 0), (GENERATE, 0), Reason.BATTERY_CRITICAL),
        (battery(3.0, charging=True), (SPECULATIVE, 8), (SPECULATIVE, 8), Reason.NOMINAL),
        (at(power_saver=True), (DIRECT, 0), (VERIFY, 3), Reason.POWER_SAVER),
        (at(power_saver=True, charging=True), (SPECULATIVE, 8), (SPECULATIVE, 8), Reason.NOMINAL),
        (at(42.0, battery_percent=3.0, charging=False), (DIRECT, 0), (GENERATE, 0), Reason.BATTERY_CRITICAL),
        (at(45.0, battery_percent=3.0, charging=False), (DIRECT, 0), (GENERATE, 0), Reason.DEVICE_CRITICAL),
    ],
)
def test_every_rung(device: DeviceState, alone: tuple[Mode, int], with_cloud: tuple[Mode, int], reason: Reason) -> None:
    here = order(NORMAL._replace(device=device))
    assert (here.mode, here.gamma, here.reason) == (*alone, reason)
    there = order(WITH_CLOUD._replace(device=device))
    assert (there.mode, there.gamma, there.reason) == (*with_cloud, reason)


def test_without_a_cloud_the_ladder_ends_in_a_rate_cap() -> None:
    caps = [order(NORMAL._replace(device=at(celsius), direct_s=0.1)).pace_s for celsius in (30, 37, 42, 45)]
    assert caps == pytest.approx([0.0, 0.0, 0.115, 0.15])
    assert order(WITH_CLOUD._replace(device=at(45.0), direct_s=0.1)).pace_s == 0.0


HOT, NEARLY_EMPTY = at(45.0), battery(2.0)


@pytest.mark.parametrize(
    ("wishes", "device", "link", "expected"),
    [
        # Privacy wins over heat, battery and the wish for the cloud.
        (Wishes(privacy=Privacy.ON_DEVICE), HOT, LINK, (DIRECT, Reason.PRIVACY)),
        (Wishes(privacy=Privacy.ON_DEVICE), NEARLY_EMPTY, LINK, (DIRECT, Reason.PRIVACY)),
        (Wishes(Execution.ONLY_CLOUD, privacy=Privacy.ON_DEVICE), at(30.0), LINK, (SPECULATIVE, Reason.NOMINAL)),
        (Wishes(Execution.PREFER_CLOUD, privacy=Privacy.ON_DEVICE), at(30.0), LINK, (SPECULATIVE, Reason.PRIVACY)),
        (Wishes(Execution.ONLY_DEVICE), HOT, LINK, (DIRECT, Reason.REQUESTED)),
        # Only the cloud, even where it is down: its failure is told to the caller.
        (Wishes(Execution.ONLY_CLOUD), at(30.0), LINK, (VERIFY, Reason.REQUESTED)),
        (Wishes(Execution.ONLY_CLOUD), HOT, LINK, (GENERATE, Reason.DEVICE_CRITICAL)),
        (Wishes(Execution.ONLY_CLOUD), at(30.0), LINK._replace(healthy=False), (VERIFY, Reason.REQUESTED)),
        # Heat wins over the preference for the device, but only at the last rung.
        (Wishes(Execution.PREFER_DEVICE), at(42.0), LINK, (DIRECT, Reason.DEVICE_HOT)),
        (Wishes(Execution.PREFER_DEVICE), HOT, LINK, (GENERATE, Reason.DEVICE_CRITICAL)),
        (Wishes(Execution.PREFER_DEVICE), battery(20.0), LINK, (DIRECT, Reason.BATTERY_LOW)),
        (Wishes(Execution.PREFER_CLOUD), at(30.0), LINK, (VERIFY, Reason.REQUESTED)),
        (
            Wishes(Execution.PREFER_CLOUD),
            at(30.0),
            LINK._replace(healthy=False),
            (SPECULATIVE, Reason.CLOUD_UNAVAILABLE),
        ),
        (Wishes(Execution.PREFER_CLOUD), at(30.0), LINK._replace(gamma_hint=0), (SPECULATIVE, Reason.CLOUD_SATURATED)),
        # Heat wins over the wish for speculation.
        (Wishes(speculation=Speculation.ON), at(39.5), LINK, (DIRECT, Reason.DEVICE_WARM)),
        (Wishes(speculation=Speculation.ON), at(30.0), LINK, (SPECULATIVE, Reason.REQUESTED)),
        (Wishes(speculation=Speculation.OFF), at(30.0), LINK, (DIRECT, Reason.REQUESTED)),
        (Wishes(max_gamma=0), at(30.0), LINK, (DIRECT, Reason.REQUESTED)),
    ],
)
def test_order_of_precedence(
    wishes: Wishes, device: DeviceState, link: LinkState, expected: tuple[Mode, Reason]
) -> None:
    decision = order(NORMAL._replace(wishes=wishes, device=device, link=link))
    assert (decision.mode, decision.reason) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"drafting": Drafting(0, 0)}, (DIRECT, 0, Reason.ACCEPTANCE_LOW)),
        ({"drafting": Drafting(0, 2)}, (SPECULATIVE, 2, Reason.PROBE)),
        ({"drafting": Drafting(0, 2), "waiting": 8}, (DIRECT, 0, Reason.ACCEPTANCE_LOW)),
        (
            {"drafting": Drafting(0, 0), "wishes": Wishes(speculation=Speculation.ON)},
            (SPECULATIVE, 1, Reason.REQUESTED),
        ),
        ({"context_left": 1}, (DIRECT, 0, Reason.CONTEXT_FULL)),
        ({"context_left": 4}, (SPECULATIVE, 3, Reason.NOMINAL)),
        ({"num_left": 1}, (DIRECT, 0, Reason.BENEFIT_SMALL)),
        ({"wishes": Wishes(max_gamma=3)}, (SPECULATIVE, 3, Reason.NOMINAL)),
    ],
)
def test_gain(changes: dict[str, Any], expected: tuple[Mode, int, Reason]) -> None:
    decision = order(NORMAL._replace(**changes))
    assert (decision.mode, decision.gamma, decision.reason) == expected


@pytest.mark.parametrize(
    ("changes", "goes_on"),
    [
        ({"wishes": Wishes(speculation=Speculation.OFF)}, True),
        ({"drafting": Drafting(0, 0, rests=True)}, True),
        ({"drafting": Drafting(0, 0)}, False),
        ({"drafting": Drafting(0, 2)}, False),
        ({}, False),
        ({"wishes": Wishes(speculation=Speculation.OFF), "device": at(44.0)}, False),
    ],
)
def test_a_pass_may_begin_behind_another_where_no_draft_is_to_come_and_no_pause(
    changes: dict[str, Any], goes_on: bool
) -> None:
    decision = order(NORMAL._replace(**changes))
    assert decision.goes_on is goes_on
    assert not (decision.goes_on and decision.pace_s)


def test_benefit_gate_weighs_what_the_answer_still_needs() -> None:
    """20 tokens of 30 ms with a speed-up of 1.3 save 138 ms; 24 save 166 ms. Drafts that cost nothing pass anyway."""
    costly = NORMAL._replace(direct_s=0.03, drafting=Drafting(4, 0, 1.3, free=False))
    assert order(costly._replace(expected_left=20)).reason is Reason.BENEFIT_SMALL
    assert order(costly._replace(expected_left=24)).reason is Reason.NOMINAL
    free = costly._replace(expected_left=20, drafting=Drafting(4, 0, 1.3, free=True))
    assert order(free).reason is Reason.NOMINAL
    assert order(free, PHONE.updated({"gate_free_drafts": True})).reason is Reason.BENEFIT_SMALL


def test_a_long_queue_sends_new_requests_away_and_keeps_them_away_until_it_has_halved() -> None:
    crowded = WITH_CLOUD._replace(waiting=8)
    assert order(crowded).mode is GENERATE
    assert order(crowded).reason is Reason.QUEUE_PRESSURE
    assert order(crowded._replace(num_generated=5, previous=SPECULATIVE)).mode is SPECULATIVE
    assert order(crowded._replace(num_generated=5, waiting=5, previous=GENERATE)).mode is GENERATE
    assert order(crowded._replace(num_generated=5, waiting=4, previous=GENERATE)).mode is SPECULATIVE


def test_a_slow_link_gets_the_whole_answer_rather_than_every_draft() -> None:
    low = WITH_CLOUD._replace(device=battery(20.0))
    assert order(low).mode is VERIFY
    assert order(low._replace(cloud_speed=0.3)).mode is GENERATE
    assert order(low._replace(link_failed=True)).mode is DIRECT


def test_energy_objective_on_battery_drafts_for_the_cloud() -> None:
    frugal = PHONE.updated({"objective": Objective.ENERGY})
    assert order(WITH_CLOUD._replace(device=battery(90.0)), frugal).reason is Reason.ENERGY
    assert order(WITH_CLOUD._replace(device=battery(90.0, charging=True)), frugal).reason is Reason.NOMINAL
    assert order(WITH_CLOUD._replace(device=battery(90.0))).reason is Reason.NOMINAL


def transitions(temperatures: list[float], interval_s: float = 1.0) -> list[Rung]:
    """The rungs stood on, one a change."""
    tracker, memory, rungs = DeviceTracker(), PolicyMemory(), [Rung.NOMINAL]
    for index, celsius in enumerate(temperatures):
        now = index * interval_s
        tracker.add(DeviceReading(now, "test", temperature_c=celsius))
        _, memory = decide(NORMAL._replace(device=tracker.state(now)), PHONE, memory, now)
        if memory.heat is not rungs[-1]:
            rungs.append(memory.heat)
    return rungs


@pytest.mark.parametrize("threshold", [37.0, 39.5, 42.0, 45.0])
def test_600_polls_around_a_threshold_make_one_transition(threshold: float) -> None:
    polls = [threshold + (0.2 if index % 2 else -0.2) for index in range(600)]
    start = Rung.NOMINAL if threshold == 37.0 else None
    rungs = transitions(polls)
    settled = [rung for rung in rungs if start is None or rung is not start]
    # The climb to the rung under the threshold comes at the first poll; what alternates makes one more.
    assert len(settled) <= (1 if start is not None else 3)
    assert rungs == sorted(rungs)


def test_one_outlier_changes_nothing() -> None:
    assert transitions([30.0] * 20 + [120.0] + [30.0] * 20) == [Rung.NOMINAL]
    assert transitions([30.0] * 20 + [-20.0] + [30.0] * 20) == [Rung.NOMINAL]
    assert transitions([90.0] + [30.0] * 20)[1:] in ([], [Rung.CRITICAL, Rung.NOMINAL])


def test_heat_is_answered_at_once_and_left_after_the_dwell() -> None:
    memory = climb(at(46.0), PHONE, PolicyMemory(), 100.0)
    assert memory.heat is Rung.CRITICAL
    assert climb(at(30.0), PHONE, memory, 105.0).heat is Rung.CRITICAL
    cooled = climb(at(30.0), PHONE, memory, 110.0)
    assert cooled.heat is Rung.NOMINAL
    decision, memory = decide(NORMAL._replace(device=at(30.0)), PHONE, cooled, 111.0)
    assert decision.reason is Reason.RECOVERED
    assert decide(NORMAL._replace(device=at(30.0)), PHONE, memory, 125.0)[0].reason is Reason.NOMINAL


def test_a_rising_temperature_is_answered_before_it_arrives() -> None:
    warm = at(36.0, temperature_slope=0.2)
    assert order(NORMAL._replace(device=warm)).reason is Reason.DEVICE_WARM
    assert order(NORMAL._replace(device=replace(warm, temperature_slope=0.0))).reason is Reason.NOMINAL
    # A jump of the die under load is no trend: the look ahead is bounded.
    assert order(NORMAL._replace(device=at(30.0, temperature_slope=5.0))).reason is Reason.NOMINAL


states = st.builds(
    DeviceState,
    temperature_c=st.none() | st.floats(-30, 125),
    temperature_slope=st.floats(-1, 1),
    headroom=st.none() | st.floats(0, 5),
    headroom_slope=st.floats(-0.1, 0.1),
    thermal_status=st.none() | st.sampled_from(ThermalStatus),
    battery_percent=st.none() | st.floats(0, 100),
    charging=st.none() | st.booleans(),
    power_saver=st.none() | st.booleans(),
)
links = st.builds(
    LinkState,
    configured=st.booleans(),
    healthy=st.booleans(),
    rtt_s=st.floats(0, 2),
    queue_s=st.floats(0, 3),
    max_gamma=st.integers(0, 16),
    gamma_hint=st.none() | st.integers(0, 16),
)
all_wishes = st.builds(
    Wishes,
    st.sampled_from(Execution),
    st.sampled_from(Speculation),
    st.sampled_from(Privacy),
    st.integers(0, 16),
)
all_inputs = st.builds(
    PolicyInputs,
    wishes=all_wishes,
    device=states,
    link=links,
    link_failed=st.booleans(),
    drafting=st.builds(Drafting, st.integers(0, 16), st.integers(0, 16), st.floats(0.1, 10), st.booleans()),
    cloud_gamma=st.integers(0, 16),
    cloud_speed=st.floats(0, 10),
    direct_s=st.floats(0.001, 1),
    num_generated=st.integers(0, 1000),
    num_left=st.integers(1, 1000),
    expected_left=st.integers(1, 1000),
    context_left=st.integers(1, 1000),
    waiting=st.integers(0, 100),
    previous=st.none() | st.sampled_from(Mode),
)
memories = st.builds(
    PolicyMemory, st.sampled_from(Rung), st.floats(0, 100), st.sampled_from(Rung), st.floats(0, 100), st.none()
)
presets = st.sampled_from(list(PRESETS.values()))


@settings(max_examples=500)
@given(all_inputs, presets, memories)
def test_no_state_breaks_the_bounds(inputs: PolicyInputs, thresholds: Thresholds, memory: PolicyMemory) -> None:
    decision, after = decide(inputs, thresholds, memory, 200.0)
    assert 0 <= decision.gamma <= min(inputs.wishes.max_gamma, thresholds.max_gamma, 16)
    assert decision.gamma < max(inputs.context_left, 1)
    assert isinstance(decision.reason, Reason)
    if inputs.wishes.device_only:
        assert decision.mode.on_device
    if inputs.wishes.execution is Execution.ONLY_CLOUD and not inputs.wishes.device_only:
        assert not decision.mode.on_device
    if not decision.mode.on_device and inputs.wishes.execution is not Execution.ONLY_CLOUD:
        assert inputs.link.usable
    if decision.mode is Mode.CLOUD_VERIFY:
        assert 0 < decision.gamma <= inputs.link.gamma_limit
    assert decide(inputs, thresholds, memory, 200.0) == (decision, after)


def work(decision: Decision) -> tuple[int, int, float]:
    """What the device has to do, in an order: own target passes, drafting, and how fast."""
    rank = {GENERATE: 0, VERIFY: 1, DIRECT: 2, SPECULATIVE: 3}[decision.mode]
    return rank, decision.gamma, -decision.pace_s


@settings(max_examples=500)
@given(all_inputs, presets, st.floats(-30, 125), st.floats(0, 60))
def test_hotter_never_means_more_work(
    inputs: PolicyInputs, thresholds: Thresholds, celsius: float, rise: float
) -> None:
    cooler = inputs._replace(device=replace(inputs.device, temperature_c=celsius))
    hotter = inputs._replace(device=replace(inputs.device, temperature_c=celsius + rise))
    assert work(order(hotter, thresholds)) <= work(order(cooler, thresholds))


@settings(max_examples=200)
@given(all_inputs, presets)
def test_unknown_sensors_change_nothing(inputs: PolicyInputs, thresholds: Thresholds) -> None:
    decision, memory = decide(inputs._replace(device=UNKNOWN_DEVICE), thresholds, PolicyMemory(), 0.0)
    mains = at(25.0, battery_percent=100.0, charging=True)
    assert decision == decide(inputs._replace(device=mains), thresholds, PolicyMemory(), 0.0)[0]
    assert memory == PolicyMemory()


def test_thresholds_are_checked_and_named() -> None:
    assert PHONE.updated({"max_gamma": 4}).max_gamma == 4
    for changes, name in (
        ({"max_gamma": 17}, "max_gamma"),
        ({"no_such": 1}, "no_such"),
        ({"benefit_gate_s": float("nan")}, "benefit_gate_s"),
        ({"temperature_c": [{"enter": 40, "exit": 41}] * 4}, "temperature_c"),
    ):
        with pytest.raises(BadRequestError, match=name):
            PHONE.updated(changes)
    with pytest.raises(ValueError, match="rise from rung to rung"):
        Thresholds(temperature_c=rising((50, 40), (45, 40), (60, 50), (70, 60)))
    with pytest.raises(ConfigError, match="phone, board, server"):
        choose_preset("toaster")
    assert choose_preset("auto") is Preset.SERVER
    assert choose_preset("auto", is_arm=True, has_battery=True) is Preset.PHONE
