"""What answering costs in joules, and how that is known.

`source` says how: `rapl` and `battery` are measurements of the package and of the whole device, `cpu_time_model` is an
estimate from busy core seconds, `simulated` comes from a simulated device. An estimate is never shown as a measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from edge_agent.device_state import Network
from edge_agent.sysfs_file import read_number, read_text
from shared.errors import ConfigError

POWERCAP = Path("/sys/class/powercap")
POWER_SUPPLY = Path("/sys/class/power_supply")

WATTS_PER_BUSY_CORE = {"phone": 1.5, "board": 1.2, "server": 4.0}
"""For the CPU-time model. phone: a big core near its top clock; board: a Raspberry Pi 5 draws about 3 W idle and 7 to
8 W with four busy cores; server: package power over cores of current parts at full load is 3 to 6 W."""

RADIO_W = {
    # base, a Mbit/s up, a Mbit/s down, in watts: Huang et al., "A Close Examination of Performance and Power
    # Characteristics of 4G LTE Networks", MobiSys 2012, table 4.
    Network.CELLULAR: (1.288, 0.438, 0.052),
    Network.WIFI: (0.133, 0.283, 0.137),
}


class EnergyMeter(Protocol):
    """Joules spent so far."""

    @property
    def source(self) -> str:
        """How they are known."""

    def total_j(self) -> float:
        """Joules since the meter was made; never falls."""


class CpuTimeMeter:
    """An estimate: this process's busy core seconds times stated watts."""

    source = "cpu_time_model"

    def __init__(self, watts_per_core: float, cpu_time: Callable[[], float] = time.process_time) -> None:
        if not 0 < watts_per_core < math.inf:
            raise ValueError(f"watts_per_core must be positive, got {watts_per_core}")
        self._watts = watts_per_core
        self._cpu_time = cpu_time
        self._start = cpu_time()

    def total_j(self) -> float:
        """Watts times core seconds."""
        return self._watts * (self._cpu_time() - self._start)


class RaplMeter:
    """A measurement of the CPU packages by the kernel's powercap counters, which wrap every few minutes."""

    source = "rapl"

    def __init__(self, zones: list[Path]) -> None:
        """Raises ConfigError if a counter can't be read; on many systems only root may."""
        if not zones:
            raise ConfigError("RAPL needs at least one powercap zone")
        self._zones = [_RaplZone(zone) for zone in zones]

    def total_j(self) -> float:
        """Joules of all packages. Call it more often than once a wrap (minutes at full load)."""
        return sum(zone.update_j() for zone in self._zones)


class _RaplZone:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._range = read_number(path / "max_energy_range_uj") or 0.0
        self._last = self._read()
        self._total_uj = 0.0

    def update_j(self) -> float:
        now = self._read()
        step = now - self._last
        self._total_uj += step if step >= 0 else step + self._range
        self._last = now
        return self._total_uj * 1e-6

    def _read(self) -> float:
        value = read_number(self._path / "energy_uj")
        if value is None:
            raise ConfigError(f"RAPL counter {self._path / 'energy_uj'} can't be read")
        return value


class BatteryMeter:
    """A measurement of the whole device while it runs on its battery: current times voltage, added up over time.

    What it draws from a charger isn't seen, so nothing is added while it charges.
    """

    source = "battery"

    def __init__(self, power_w: Callable[[], float | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._power_w = power_w
        self._clock = clock
        self._last_at = clock()
        self._last_w: float | None = None
        self._total = 0.0

    def total_j(self) -> float:
        """Trapezoids between the times it was asked."""
        now, power = self._clock(), self._power_w()
        if power is not None and self._last_w is not None:
            self._total += (power + self._last_w) / 2 * max(0.0, now - self._last_at)
        self._last_at, self._last_w = now, power
        return self._total


def battery_power_w(root: Path = POWER_SUPPLY) -> float | None:
    """Watts drawn from the first discharging battery: `power_now`, else current_now x voltage_now (micro-units)."""
    for supply in sorted(root.glob("*")) if root.is_dir() else []:
        if read_text(supply / "type") != "Battery" or read_text(supply / "status") != "Discharging":
            continue
        power = read_number(supply / "power_now")
        if power is not None:
            return abs(power) * 1e-6
        current, voltage = read_number(supply / "current_now"), read_number(supply / "voltage_now")
        if current is not None and voltage is not None:
            return abs(current) * voltage * 1e-12
    return None


def rapl_zones(root: Path = POWERCAP) -> list[Path]:
    """The readable package zones; their subzones (cores, memory) are parts of them."""
    zones = sorted(root.glob("intel-rapl:*")) if root.is_dir() else []
    packages = [zone for zone in zones if zone.name.count(":") == 1]
    return [zone for zone in packages if read_number(zone / "energy_uj") is not None]


def choose_meter(kind: str = "server", *, powercap: Path = POWERCAP, power_supply: Path = POWER_SUPPLY) -> EnergyMeter:
    """The best this machine has: RAPL, else its battery, else the CPU-time model with `kind`'s watts per core."""
    zones = rapl_zones(powercap)
    if zones:
        return RaplMeter(zones)
    if battery_power_w(power_supply) is not None:
        return BatteryMeter(lambda: battery_power_w(power_supply))
    return CpuTimeMeter(WATTS_PER_BUSY_CORE[kind])


def radio_j(network: Network | None, up_bytes: int, down_bytes: int, active_s: float) -> float:
    """Modelled joules of the radio for a cloud round. 0 on a cable, and where the network is unknown."""
    if network is None or network not in RADIO_W or active_s <= 0:
        return 0.0
    base, up, down = RADIO_W[network]
    return base * active_s + (up * up_bytes + down * down_bytes) * 8e-6


@dataclass(slots=True)
class EnergyUse:
    """Joules by component, added to as they are spent."""

    draft: float = 0.0
    verify: float = 0.0
    prefill: float = 0.0
    cloud_radio: float = 0.0

    @property
    def total(self) -> float:
        """All components."""
        return self.draft + self.verify + self.prefill + self.cloud_radio


class EnergyAccount:
    """Shares the process's joules among the rounds that run side by side.

    Rounds take turns on one inference thread, so the joules since the last round ended belong to the round that ends
    now; what is spent while none runs belongs to none. The shares add up to what the meter saw.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        self._mark = meter.total_j()
        self._in_flight: WeakSet[object] = WeakSet()

    @property
    def source(self) -> str:
        """The meter's."""
        return self._meter.source

    def begin(self, owner: object) -> None:
        """A round of `owner` begins. One that is given up, never ended, is forgotten with its owner."""
        if not self._in_flight:
            self._mark = self._meter.total_j()
        self._in_flight.add(owner)

    def end(self, owner: object) -> float:
        """The round ends: its joules."""
        total = self._meter.total_j()
        spent, self._mark = max(0.0, total - self._mark), total
        self._in_flight.discard(owner)
        return spent
