"""Joules: where they come from, counters that wrap, and who they belong to."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from edge_agent.device_state import Network
from edge_agent.energy import (
    BatteryMeter,
    CpuTimeMeter,
    EnergyAccount,
    EnergyUse,
    RaplMeter,
    battery_power_w,
    choose_meter,
    radio_j,
    rapl_zones,
)
from shared.errors import ConfigError


def zone(root: Path, name: str, microjoules: int, most: int = 1_000_000) -> Path:
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    return path


def battery(root: Path, **files: str) -> Path:
    path = root / "BAT0"
    path.mkdir(parents=True, exist_ok=True)
    for name, text in {"type": "Battery", "status": "Discharging", **files}.items():
        (path / name).write_text(text + "\n")
    return root


def test_rapl_counts_packages_through_a_wrap(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", 900_000)
    zone(tmp_path, "intel-rapl:0:0", 5_000_000)
    assert rapl_zones(tmp_path) == [package]
    meter = RaplMeter(rapl_zones(tmp_path))
    zone(tmp_path, "intel-rapl:0", 950_000)
    assert meter.total_j() == pytest.approx(0.05)
    zone(tmp_path, "intel-rapl:0", 100_000)
    assert meter.total_j() == pytest.approx(0.2)


def test_rapl_that_vanishes_is_an_error(tmp_path: Path) -> None:
    meter = RaplMeter([zone(tmp_path, "intel-rapl:0", 0)])
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    with pytest.raises(ConfigError, match="energy_uj"):
        meter.total_j()


def test_battery_power_in_micro_units(tmp_path: Path) -> None:
    assert battery_power_w(battery(tmp_path / "a", power_now="5500000")) == pytest.approx(5.5)
    pair = battery(tmp_path / "b", current_now="-1500000", voltage_now="4000000")
    assert battery_power_w(pair) == pytest.approx(6.0)
    assert battery_power_w(battery(tmp_path / "c", power_now="5500000", status="Charging")) is None
    assert battery_power_w(tmp_path / "nowhere") is None
    assert battery_power_w(battery(tmp_path / "d", current_now="x", voltage_now="")) is None


def test_battery_meter_adds_up_power_over_time() -> None:
    now, power = 0.0, 4.0
    meter = BatteryMeter(lambda: power, clock=lambda: now)
    assert meter.total_j() == 0.0
    now = 2.0
    power = 6.0
    assert meter.total_j() == pytest.approx(10.0)
    power = None  # type: ignore[assignment]
    now = 5.0
    assert meter.total_j() == pytest.approx(10.0)


def test_the_best_meter_is_chosen_and_named(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    estimate = choose_meter("phone", powercap=nothing, power_supply=nothing)
    assert estimate.source == "cpu_time_model"
    supply = battery(tmp_path / "supply", power_now="1000000")
    assert choose_meter("phone", powercap=nothing, power_supply=supply).source == "battery"
    zone(tmp_path / "cap", "intel-rapl:0", 1)
    assert choose_meter("phone", powercap=tmp_path / "cap", power_supply=supply).source == "rapl"


def test_cpu_time_model_is_watts_times_busy_seconds() -> None:
    busy = 10.0
    meter = CpuTimeMeter(1.5, cpu_time=lambda: busy)
    busy = 12.0
    assert meter.total_j() == pytest.approx(3.0)
    with pytest.raises(ValueError):
        CpuTimeMeter(0.0)


def test_radio_is_modelled_by_network() -> None:
    assert radio_j(Network.ETHERNET, 1000, 1000, 1.0) == 0.0
    assert radio_j(None, 1000, 1000, 1.0) == 0.0
    assert radio_j(Network.WIFI, 125_000, 0, 1.0) == pytest.approx(0.133 + 0.283)
    assert radio_j(Network.CELLULAR, 0, 0, 1.0) > radio_j(Network.WIFI, 0, 0, 1.0)


class Owner:
    pass


def test_shares_of_rounds_side_by_side_add_up() -> None:
    spent = 0.0

    class Meter:
        source = "test"

        def total_j(self) -> float:
            return spent

    account = EnergyAccount(Meter())
    a, b = Owner(), Owner()
    spent = 5.0  # idle: nobody's
    account.begin(a)
    spent = 7.0
    account.begin(b)
    spent = 8.0
    first = account.end(a)
    spent = 12.0
    second = account.end(b)
    assert (first, second) == (3.0, 4.0)
    # A round that was given up is forgotten with its owner, and idle time is nobody's again.
    account.begin(Owner())
    gc.collect()
    spent = 20.0
    account.begin(a)
    spent = 21.0
    assert account.end(a) == 1.0


def test_energy_by_component() -> None:
    use = EnergyUse(draft=1.0, verify=2.0, prefill=3.0, cloud_radio=0.5)
    assert use.total == 6.5
