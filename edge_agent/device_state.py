"""What the device says of itself, and what the policy may believe of it.

A `DeviceReading` is one look at the sensors, as raw as they gave it. A `DeviceTracker` turns a row of readings into a
`DeviceState`: implausible values dropped, a single outlier outvoted, the temperature's slope known, stale values
forgotten. None is "unknown" everywhere; it is never 0 % and never 0 °C.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from enum import IntEnum, StrEnum

PLAUSIBLE_C = (-30.0, 125.0)
"""Silicon that still computes lies in here; boards report -63 or 255 for a pin that nothing is connected to."""

PLAUSIBLE_HEADROOM = (0.0, 5.0)
"""Android never returns a negative headroom; far beyond 1.0 the device would be off."""

MAX_RISE_C_PER_S = 10.0
"""A die can jump by tens of degrees within a second of load, but not by more for several seconds on end."""

MEDIAN_OF = 3
SLOPE_WINDOW_S = 60.0
MIN_SLOPE_SPAN_S = 5.0
MIN_SLOPE_SAMPLES = 5


class ThermalStatus(IntEnum):
    """Android's `PowerManager.getCurrentThermalStatus`."""

    NONE = 0
    LIGHT = 1
    MODERATE = 2
    SEVERE = 3
    CRITICAL = 4
    EMERGENCY = 5
    SHUTDOWN = 6


class Network(StrEnum):
    """What the device is connected by."""

    NONE = "none"
    WIFI = "wifi"
    CELLULAR = "cellular"
    ETHERNET = "ethernet"


@dataclass(frozen=True)
class DeviceReading:
    """One look at the sensors. at: seconds of the monotonic clock. headroom: 1.0 when throttling is about to start."""

    at: float
    source: str
    temperature_c: float | None = None
    battery_percent: float | None = None
    charging: bool | None = None
    power_saver: bool | None = None
    thermal_status: ThermalStatus | None = None
    headroom: float | None = None
    network: Network | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class DeviceState:
    """What is known of the device now. slopes: per second. age_s: since the newest reading, None if there is none."""

    temperature_c: float | None = None
    temperature_slope: float = 0.0
    headroom: float | None = None
    headroom_slope: float = 0.0
    thermal_status: ThermalStatus | None = None
    battery_percent: float | None = None
    charging: bool | None = None
    power_saver: bool | None = None
    network: Network | None = None
    age_s: float | None = None
    source: str = "none"

    @property
    def on_battery(self) -> bool:
        """Whether it runs down a battery; what reports no battery never does."""
        return self.battery_percent is not None and self.charging is not True


UNKNOWN_DEVICE = DeviceState()


class Trend:
    """The last values of one quantity: outliers outvoted, and how fast it changes."""

    def __init__(self, plausible: tuple[float, float], max_rate: float | None = None) -> None:
        self._plausible = plausible
        self._max_rate = max_rate
        self._values: deque[tuple[float, float]] = deque(maxlen=MEDIAN_OF)
        self._filtered: deque[tuple[float, float]] = deque(maxlen=256)

    def add(self, at: float, value: float | None) -> None:
        """Take in a value; one that is unknown, not finite, implausible or older than the last is passed over."""
        if value is None or not self._plausible[0] <= value <= self._plausible[1]:  # NaN fails the comparison
            return
        if self._values and at <= self._values[-1][0]:
            return
        self._values.append((at, value))
        self._filtered.append((at, self._limited(at, self._median())))
        while at - self._filtered[0][0] > SLOPE_WINDOW_S:
            self._filtered.popleft()

    def value(self, now: float, max_age_s: float) -> float | None:
        """The filtered value, or None once the newest is too old."""
        if not self._filtered or now - self._filtered[-1][0] > max_age_s:
            return None
        return self._filtered[-1][1]

    def slope(self) -> float:
        """Least-squares slope per second over the last minute; 0 until there is enough to tell."""
        if len(self._filtered) < MIN_SLOPE_SAMPLES:
            return 0.0
        times = [at for at, _ in self._filtered]
        if times[-1] - times[0] < MIN_SLOPE_SPAN_S:
            return 0.0
        return statistics.linear_regression(times, [value for _, value in self._filtered]).slope

    def _median(self) -> float:
        # Of two values the lower: a first reading that is wrong on the hot side is outvoted too.
        return statistics.median_low(value for _, value in self._values)

    def _limited(self, at: float, value: float) -> float:
        if self._max_rate is None or not self._filtered:
            return value
        last_at, last = self._filtered[-1]
        return min(value, last + self._max_rate * (at - last_at))


class DeviceTracker:
    """Keeps the last readings of one device. Not thread-safe: one task feeds it."""

    def __init__(self, max_age_s: float = 60.0) -> None:
        if not 0 < max_age_s < math.inf:
            raise ValueError(f"max_age_s must be positive, got {max_age_s}")
        self._max_age_s = max_age_s
        self._temperature = Trend(PLAUSIBLE_C, MAX_RISE_C_PER_S)
        self._headroom = Trend(PLAUSIBLE_HEADROOM)
        self._status = Trend((ThermalStatus.NONE, ThermalStatus.SHUTDOWN))
        self._battery = Trend((0.0, 100.0))
        self._flags: dict[str, tuple[float, bool | Network]] = {}
        self._last: DeviceReading | None = None
        self._slopes = (0.0, 0.0)

    @property
    def last_reading(self) -> DeviceReading | None:
        """The newest reading, as it came."""
        return self._last

    def add(self, reading: DeviceReading) -> None:
        """Take in a reading. What it doesn't mention stays as it was, until it is stale."""
        self._temperature.add(reading.at, reading.temperature_c)
        self._headroom.add(reading.at, reading.headroom)
        self._status.add(reading.at, reading.thermal_status)
        self._battery.add(reading.at, reading.battery_percent)
        for name in ("charging", "power_saver", "network"):
            flag = getattr(reading, name)
            if flag is not None:
                self._flags[name] = (reading.at, flag)
        self._last = reading
        self._slopes = (self._temperature.slope(), self._headroom.slope())

    def state(self, now: float) -> DeviceState:
        """What may be believed now."""
        if self._last is None:
            return UNKNOWN_DEVICE
        status = self._status.value(now, self._max_age_s)
        network = self._flag("network", now)
        return DeviceState(
            temperature_c=self._temperature.value(now, self._max_age_s),
            temperature_slope=self._slopes[0],
            headroom=self._headroom.value(now, self._max_age_s),
            headroom_slope=self._slopes[1],
            thermal_status=None if status is None else ThermalStatus(int(status)),
            battery_percent=self._battery.value(now, self._max_age_s),
            charging=_as_bool(self._flag("charging", now)),
            power_saver=_as_bool(self._flag("power_saver", now)),
            network=network if isinstance(network, Network) else None,
            age_s=max(0.0, now - self._last.at),
            source=self._last.source,
        )

    def _flag(self, name: str, now: float) -> bool | Network | None:
        at, flag = self._flags.get(name, (-math.inf, None))
        return flag if now - at <= self._max_age_s else None


def _as_bool(flag: bool | Network | None) -> bool | None:
    return flag if isinstance(flag, bool) else None
