"""Section E: what the device says of itself."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from edge_agent.acceptance_window import AcceptancePrior, AcceptanceWindow
from edge_agent.controller import RoundState
from edge_agent.cost_model import CostModel
from edge_agent.decision import Mode, Reason
from edge_agent.device_state import UNKNOWN_DEVICE
from edge_agent.policy import Rung, battery_rung, heat_rung
from edge_agent.policy_controller import PolicyEngine
from edge_agent.request import GenerationRequest
from edge_agent.sensors import PsutilSensors, SysfsSensors
from edge_agent.sensors.temperature import processor_temperature
from edge_agent.thresholds import PRESETS, Preset
from shared.acceptance import Draft
from tests.simulated_rounds import Drafts, curve, play

REQUEST = GenerationRequest((1,), 99)


def raising(error: Exception) -> Any:
    def read() -> Any:
        raise error

    return read


@pytest.mark.parametrize(
    "attribute",
    [None, lambda: None, dict, raising(FileNotFoundError("/sys/class/power_supply")), raising(NotImplementedError())],
    ids=["absent", "none", "empty", "no file", "not here"],
)
def test_E1_sensors_that_are_absent(attribute: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without sensors: an exception, or 0 % and 0 °C, and it is throttled (psutil#2426, #1964, #1323).

    Here: unknown is a value of its own and stands on no rung; what reports no battery never runs one down.
    """
    for name in ("sensors_temperatures", "sensors_battery"):
        if attribute is None:
            monkeypatch.delattr(psutil, name, raising=False)
        else:
            monkeypatch.setattr(psutil, name, attribute, raising=False)
    assert PsutilSensors().read(1.0) is None
    assert SysfsSensors(tmp_path).read(1.0) is None
    for preset in Preset:
        thresholds = PRESETS[preset]
        assert heat_rung(UNKNOWN_DEVICE, thresholds, Rung.NOMINAL) is Rung.NOMINAL
        assert battery_rung(UNKNOWN_DEVICE, thresholds, Rung.NOMINAL) is Rung.NOMINAL
        controller = PolicyEngine(CostModel([0.03] * 9), thresholds).open(REQUEST)
        assert controller.decide(RoundState(REQUEST, 0, 0, 500)).reason in (
            Reason.NOMINAL,
            Reason.BENEFIT_SMALL,
            Reason.ACCEPTANCE_LOW,
        )


def test_E1_an_empty_string_is_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = tmp_path / "thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("cpu_thermal\n")
    (zone / "temp").write_text("\n")
    assert SysfsSensors(tmp_path).read(1.0) is None
    entries = {"coretemp": [SimpleNamespace(label="", current="")]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: entries, raising=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert PsutilSensors().read(1.0) is None


@pytest.mark.parametrize("text", ["65", "65000"])
def test_E3_degrees_and_thousandths(text: str, tmp_path: Path) -> None:
    """Some kernels say 65, the documentation says 65000 (build-pine64-image#21).

    Here: only what is 1000 or more is divided.
    """
    zone = tmp_path / "thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("cpu_thermal\n")
    (zone / "temp").write_text(f"{text}\n")
    reading = SysfsSensors(tmp_path).read(1.0)
    assert reading is not None
    assert reading.temperature_c == 65.0


def test_E4_the_processor_not_whatever_is_hottest() -> None:
    """The hottest sensor, or an unconnected pin at -63 °C, is taken for the processor (bpytop#84).

    Here: known chips by name, the package's value before a core's; no maximum over everything.
    """
    chips = {
        "nvme": [("Composite", 71.0)],
        "nct6798": [("CPUTIN", -63.0), ("AUXTIN1", 104.0)],
        "BAT0": [("", 88.0)],
        "coretemp": [("Package id 0", 52.0), ("Core 0", 55.0)],
    }
    assert processor_temperature(chips) == 52.0
    assert processor_temperature({name: chips[name] for name in ("nvme", "nct6798", "BAT0")}) is None


def test_E5_rounds_without_a_draft_are_no_samples() -> None:
    """Rounds without drafts count as 0 %, two rejections switch drafting off, off is for ever (vLLM#34751).

    Here: such rounds add no sample; acting takes samples; after a while a probe; better work switches it on again.
    """
    window = AcceptanceWindow(AcceptancePrior())
    window.add(Draft((1, 2), "ngram"), 2)
    for _ in range(50):
        window.add(Draft(), 0)
    assert window.acceptance_rate == 1.0
    before = window.typical_rates("ngram", 1, 0.7)[0]
    for _ in range(2):
        window.add(Draft((1,), "ngram"), 0)
    assert window.typical_rates("ngram", 1, 0.7)[0] > before / 2


def test_E5_off_then_probed_then_on_again() -> None:
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    costs = curve("small")
    engine = PolicyEngine(CostModel(costs), PRESETS[Preset.SERVER], drafters=("ngram",), clock=lambda: now)
    request = GenerationRequest((1,), 1200)
    result = play(
        engine.open(request),
        request,
        costs,
        [lambda tokens: Drafts(1.0, 0.0 if tokens < 300 else 0.95)],
        random.Random(0),
        0.05,
        advance,
    )
    reasons = [decision.reason for decision in result.decisions]
    assert Reason.ACCEPTANCE_LOW in reasons
    assert Reason.PROBE in reasons
    assert reasons.index(Reason.ACCEPTANCE_LOW) > 2
    assert {decision.mode for decision in result.decisions[-20:-1]} == {Mode.LOCAL_SPECULATIVE}
