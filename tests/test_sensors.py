"""Sensors that are absent, wrong, in another unit, or lie once."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from edge_agent.device_state import UNKNOWN_DEVICE, DeviceReading, DeviceTracker, Network, ThermalStatus
from edge_agent.sensors import (
    DevicePush,
    DeviceSampler,
    MergedSensors,
    NullSensors,
    PsutilSensors,
    Recorder,
    ReplaySensors,
    SimulatedSensors,
    SysfsSensors,
    TermuxSensors,
    choose_sensors,
)
from edge_agent.sensors.temperature import celsius, processor_temperature
from shared.errors import ConfigError


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


BATTERY = {
    "power_supply/BAT0/type": "Battery",
    "power_supply/BAT0/capacity": "63",
    "power_supply/BAT0/status": "Discharging",
    "power_supply/BAT0/current_now": "1500000",
    "power_supply/BAT0/voltage_now": "4000000",
}


def entry(current: Any, label: str = "") -> SimpleNamespace:
    return SimpleNamespace(label=label, current=current, high=None, critical=None)


@pytest.mark.parametrize(
    "attribute",
    [
        pytest.param(None, id="absent"),
        pytest.param(lambda: None, id="none"),
        pytest.param(dict, id="empty"),
        pytest.param(lambda: {"coretemp": [entry("")]}, id="empty string"),
        pytest.param(lambda: {"coretemp": [entry(None)]}, id="no value"),
        pytest.param(lambda: (_ for _ in ()).throw(FileNotFoundError("/sys/class/power_supply")), id="no file"),
    ],
)
def test_psutil_without_sensors_is_unknown(attribute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sensors_temperatures", "sensors_battery"):
        if attribute is None:
            monkeypatch.delattr(psutil, name, raising=False)
        else:
            monkeypatch.setattr(psutil, name, attribute, raising=False)
    assert PsutilSensors().read(1.0) is None


def test_psutil_reads_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    chips = {"nvme": [entry(80.0)], "coretemp": [entry(61.0, "Core 0"), entry(58.0, "Package id 0")]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chips, raising=False)
    battery = SimpleNamespace(percent=41.5, power_plugged=None)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    reading = PsutilSensors().read(3.0)
    assert reading == DeviceReading(3.0, "psutil", temperature_c=58.0, battery_percent=41.5, charging=None)


@pytest.mark.parametrize("text", ["65", "65000", "65.0"])
def test_both_units_are_65_degrees(text: str, tmp_path: Path) -> None:
    root = write(tmp_path, {"thermal/thermal_zone0/type": "cpu-thermal", "thermal/thermal_zone0/temp": text})
    reading = SysfsSensors(root).read(0.0)
    assert reading is not None
    assert reading.temperature_c == 65.0


@pytest.mark.parametrize(("raw", "expected"), [(999.0, None), (1000.0, 1.0), (-63000.0, None), (255.0, None)])
def test_implausible_values_are_unknown(raw: float, expected: float | None) -> None:
    assert celsius(raw) == expected


def test_the_processor_is_preferred_to_whatever_is_hottest() -> None:
    """A desktop's set: an unconnected pin at -63, a disk hotter than the CPU, a battery of a peripheral."""
    chips = {
        "nct6779": [("SYSTIN", 31.0), ("CPUTIN", -63.0), ("AUXTIN0", 118.0)],
        "nvme": [("Composite", 71.9)],
        "BAT0": [("", 88.0)],
        "k10temp": [("Tctl", 52.6), ("Tccd1", 49.0)],
    }
    assert processor_temperature(chips) == 52.6
    del chips["k10temp"]
    assert processor_temperature(chips) is None


def test_sysfs_reads_battery_and_chip(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **BATTERY,
            "power_supply/hid-mouse/type": "Battery",
            "power_supply/hid-mouse/scope": "Device",
            "power_supply/hid-mouse/capacity": "5",
            "hwmon/hwmon0/name": "nvme",
            "hwmon/hwmon0/temp1_input": "70000",
            "hwmon/hwmon1/name": "coretemp",
            "hwmon/hwmon1/temp1_input": "55000",
            "hwmon/hwmon1/temp1_label": "Package id 0",
        },
    )
    reading = SysfsSensors(root).read(2.0)
    assert reading == DeviceReading(2.0, "sysfs", temperature_c=55.0, battery_percent=63.0, charging=False, power_w=6.0)


def test_sysfs_of_a_bare_machine_is_unknown(tmp_path: Path) -> None:
    assert SysfsSensors(tmp_path / "nowhere").read(0.0) is None
    mains = write(tmp_path, {"power_supply/AC/type": "Mains", "power_supply/AC/online": "1"})
    assert SysfsSensors(mains).read(0.0) is None


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_termux_battery_status(tmp_path: Path) -> None:
    status = {"percentage": 85, "plugged": "UNPLUGGED", "status": "DISCHARGING", "temperature": 28.4, "current": -23}
    command = script(tmp_path / "status", f"echo '{json.dumps(status)}'")
    reading = TermuxSensors(command).read(1.0)
    assert reading == DeviceReading(1.0, "termux", temperature_c=28.4, battery_percent=85.0, charging=False)
    assert TermuxSensors(script(tmp_path / "broken", "echo no; exit 1")).read(1.0) is None
    assert TermuxSensors(script(tmp_path / "list", "echo '[1]'")).read(1.0) is None
    assert TermuxSensors(str(tmp_path / "missing")).read(1.0) is None


def test_pushes_are_checked() -> None:
    push = DevicePush.model_validate({"temperature_c": 41, "thermal_status": "severe", "network": "cellular"})
    reading = push.reading(7.0)
    assert (reading.thermal_status, reading.network) == (ThermalStatus.SEVERE, Network.CELLULAR)
    assert reading.battery_percent is None
    for body in (
        {"battery_percent": 101},
        {"temperature_c": float("nan")},
        {"temperature_c": "41"},
        {"thermal_status": 7},
        {"thermal_status": "warm"},
        {"thermal_status": True},
        {"charging": 1},
        {"humidity": 3},
    ):
        with pytest.raises(ValidationError):
            DevicePush.model_validate(body)


def test_a_recording_replays_as_it_was(tmp_path: Path) -> None:
    readings = [DevicePush(temperature_c=30.0 + step, battery_percent=80.0, charging=False) for step in range(3)]

    class Scripted:
        source = "scripted"

        def read(self, now: float) -> DeviceReading:
            return readings[int(now - 100)].reading(now)

    path = tmp_path / "trace.jsonl"
    recorder = Recorder(Scripted(), path)
    for now in (100.0, 101.0, 102.0):
        recorder.read(now)
    replay = ReplaySensors.from_file(path)
    seen = [replay.read(now) for now in (500.0, 500.5, 501.2, 502.0, 503.0)]
    assert [None if reading is None else reading.temperature_c for reading in seen] == [30.0, None, 31.0, 32.0, None]
    assert seen[0] == DeviceReading(500.0, "replay", temperature_c=30.0, battery_percent=80.0, charging=False)


def test_csv_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t,temperature_c,charging,network\n0,30.5,false,wifi\n2,,true,\n")
    replay = ReplaySensors.from_file(path)
    first, second = replay.read(10.0), replay.read(12.0)
    assert first is not None
    assert second is not None
    assert (first.temperature_c, first.charging, first.network) == (30.5, False, Network.WIFI)
    assert (second.temperature_c, second.charging) == (None, True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "at least one reading"),
        ("{", "line 1: must be a JSON object"),
        ('{"temperature_c": 3}', "line 1: t must"),
        ('{"t": 0}\n{"t": 0}', "line 2: t must rise"),
        ('{"t": 0, "temperature_c": 900}', "line 1, temperature_c"),
        ('{"t": 0, "colour": 1}', "line 1, colour"),
    ],
)
def test_a_bad_trace_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        ReplaySensors.from_file(path)


@pytest.mark.parametrize("spec", ["", "Auto", "simulated", "simulated:toaster", "replay:", "replay:/no/such", "usb"])
def test_unknown_sensors_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        choose_sensors(spec)


def test_sensors_by_name() -> None:
    assert isinstance(choose_sensors("push"), NullSensors)
    assert isinstance(choose_sensors("auto"), MergedSensors)
    simulated = choose_sensors("simulated:phone")
    assert isinstance(simulated, SimulatedSensors)
    assert simulated.source == "simulated:phone"
    with pytest.raises(ConfigError, match="phone, board, laptop"):
        choose_sensors("simulated:toaster")


def test_merged_sensors_take_each_value_from_the_first_that_knows_it() -> None:
    class Part:
        def __init__(self, source: str, **values: Any) -> None:
            self.source = source
            self.values = values

        def read(self, now: float) -> DeviceReading:
            return DeviceReading(now, self.source, **self.values)

    merged = MergedSensors(
        [Part("a", temperature_c=40.0), Part("b", temperature_c=50.0, battery_percent=9.0), Part("c")]
    )
    assert merged.read(1.0) == DeviceReading(1.0, "a+b", temperature_c=40.0, battery_percent=9.0)
    assert MergedSensors([Part("c")]).read(1.0) is None


def test_this_machine_can_be_read() -> None:
    reading = choose_sensors("auto").read(0.0)
    assert reading is None or reading.at == 0.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_state_ages_and_becomes_unknown() -> None:
    clock = Clock()
    sampler = DeviceSampler(NullSensors(), stale_after_s=60.0, clock=clock)
    assert sampler.state() == UNKNOWN_DEVICE
    sampler.submit(DevicePush(temperature_c=44.0, battery_percent=50.0, charging=False).reading(0.0))
    clock.now = 10.0
    state = sampler.state()
    assert (state.temperature_c, state.age_s, state.source, state.on_battery) == (44.0, 10.0, "push", True)
    clock.now = 61.0
    stale = sampler.state()
    assert (stale.temperature_c, stale.battery_percent, stale.charging, stale.age_s) == (None, None, None, 61.0)
    assert not stale.on_battery


def test_a_sensor_that_fails_says_nothing() -> None:
    class Failing:
        source = "failing"

        def read(self, now: float) -> DeviceReading:
            raise OSError("gone")

    sampler = DeviceSampler(Failing(), clock=Clock())
    sampler.sample()
    assert sampler.last_reading is None


def test_the_sampler_looks_by_itself_until_it_is_cancelled() -> None:
    async def main() -> None:
        looked = asyncio.Event()
        loop = asyncio.get_running_loop()
        looks = 0

        class Counting:
            source = "counting"

            def read(self, now: float) -> None:
                nonlocal looks
                looks += 1
                if looks == 3:
                    loop.call_soon_threadsafe(looked.set)

        task = asyncio.create_task(DeviceSampler(Counting(), interval_s=0.001).run())
        async with asyncio.timeout(30):
            await looked.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())


def tracked(values: list[float | None], interval_s: float = 1.0) -> DeviceTracker:
    tracker = DeviceTracker()
    for index, value in enumerate(values):
        tracker.add(DeviceReading(index * interval_s, "test", temperature_c=value))
    return tracker


def test_one_outlier_is_outvoted() -> None:
    for outlier in (120.0, -20.0, float("nan"), 900.0, None):
        tracker = tracked([30.0] * 5 + [outlier, 30.0, 30.0])
        for now in (5.0, 6.0, 7.0):
            assert tracker.state(now).temperature_c == 30.0


def test_a_jump_is_followed_no_faster_than_a_die_can_heat() -> None:
    tracker = tracked([30.0, 30.0, 30.0, 110.0, 110.0])
    assert tracker.state(4.0).temperature_c == 40.0


def test_slope() -> None:
    rising = tracked([30.0 + 0.1 * step for step in range(40)]).state(39.0)
    assert rising.temperature_slope == pytest.approx(0.1, abs=0.01)
    alternating = tracked([30.0 + (step % 2) for step in range(60)]).state(59.0)
    assert abs(alternating.temperature_slope) < 0.01
    assert tracked([30.0, 35.0, 40.0]).state(2.0).temperature_slope == 0.0
