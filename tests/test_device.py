"""The device: what an app says of it stands over what its sensors say, for as long as it was told lately."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.device import DEMO_HOLD_S, STALE_AFTER_S, Device
from edge_agent.sensors import DevicePush


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def device(tmp_path: Path, time: Time) -> Device:
    """Sensors that say 30 °C and 80 % for ten minutes, a reading a second."""
    trace = tmp_path / "trace.csv"
    rows = [f"{second},30.0,80.0" for second in range(600)]
    trace.write_text("\n".join(["t,temperature_c,battery_percent", *rows]))
    return Device(f"replay:{trace}", clock=time)


def pass_by(device: Device, time: Time, seconds: int) -> None:
    for _ in range(seconds):
        time.now += 1.0
        device.sampler.sample()


def temperature(device: Device) -> float | None:
    return device.sampler.state().temperature_c


def test_a_push_holds_against_the_sensors_until_it_is_old(device: Device, time: Time) -> None:
    pass_by(device, time, 5)
    assert temperature(device) == 30.0
    device.push(DevicePush(temperature_c=36.0))
    pass_by(device, time, 5)
    assert (temperature(device), device.sampler.state().battery_percent) == (36.0, 80.0)
    assert device.sampler.state().source == "push+replay"
    pass_by(device, time, int(STALE_AFTER_S) - 10)
    assert temperature(device) == 36.0
    pass_by(device, time, 15)
    assert (temperature(device), device.sampler.state().source) == (30.0, "replay")


def test_pushes_of_different_values_stand_beside_each_other(device: Device, time: Time) -> None:
    device.push(DevicePush(temperature_c=36.0))
    device.push(DevicePush(battery_percent=15.0))
    pass_by(device, time, 5)
    assert (temperature(device), device.sampler.state().battery_percent) == (36.0, 15.0)


def test_null_gives_a_value_back_to_the_sensors(device: Device, time: Time) -> None:
    device.push(DevicePush(temperature_c=36.0, battery_percent=15.0))
    pass_by(device, time, 5)
    device.push(DevicePush(temperature_c=None))
    pass_by(device, time, 5)
    assert (temperature(device), device.sampler.state().battery_percent) == (30.0, 15.0)


def test_a_simulated_device_stays_as_it_was_set_for_longer(time: Time) -> None:
    device = Device("simulated:phone", clock=time)
    device.push(DevicePush(temperature_c=36.0))
    pass_by(device, time, int(DEMO_HOLD_S) - 5)
    assert temperature(device) == 36.0
    device.become("phone")
    pass_by(device, time, 5)
    assert temperature(device) == pytest.approx(26.8, abs=0.5)


def test_without_sensors_what_was_pushed_ages(time: Time) -> None:
    device = Device("push", clock=time)
    device.push(DevicePush(temperature_c=36.0))
    pass_by(device, time, 40)
    state = device.sampler.state()
    assert (state.temperature_c, state.age_s, state.source) == (36.0, 40.0, "push")
    pass_by(device, time, 30)
    assert temperature(device) is None
