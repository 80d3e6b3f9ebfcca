"""A device that heats up, slows down and drains its battery, for showing and measuring the policy. A simulation.

Heat: two RC stages, a fast one (die and package) on top of a slow one (case), driven by the power of the measured busy
time. Clock: a step-wise governor as in Linux (drivers/thermal/gov_step_wise.c): at each poll one step down while the
sensor is at the limit, one step up while it is clear of it. Power: base + active * clock^exponent while busy. Where the
numbers come from, and how well they match what was published, is in docs/policy.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from edge_agent.device_state import DeviceReading, Network, ThermalStatus
from shared.errors import ConfigError
from shared.inference_thread import InferenceThread

P = ParamSpec("P")
R = TypeVar("R")

POLL_S = 1.0
CLOCK_STEP = 0.02
HEADROOM_SPAN_C = 30.0
"""Android's scale: 0.0 is 30 °C under the SEVERE threshold, 1.0 is at it."""


@dataclass(frozen=True)
class DeviceProfile:
    """Watts, kelvins a watt, seconds, watt hours. limit_c: where throttling begins; statuses_c: LIGHT to SHUTDOWN."""

    name: str
    ambient_c: float
    limit_c: float
    clear_k: float
    fast_k_per_w: float
    fast_s: float
    slow_k_per_w: float
    slow_s: float
    base_w: float
    active_w: float
    exponent: float
    lowest_clock: float
    battery_wh: float | None
    statuses_c: tuple[float, ...] = ()


PROFILES: Mapping[str, DeviceProfile] = {
    "phone": DeviceProfile(
        name="phone",
        ambient_c=25.0,
        limit_c=43.0,
        clear_k=0.5,
        fast_k_per_w=2.3,
        fast_s=2.8,
        slow_k_per_w=4.5,
        slow_s=285.0,
        base_w=0.4,
        active_w=6.25,
        exponent=1.68,
        lowest_clock=0.3,
        battery_wh=19.0,
        statuses_c=(39.0, 43.0, 45.0, 46.5, 52.0, 55.0),
    ),
    "board": DeviceProfile(
        name="board",
        ambient_c=25.0,
        limit_c=80.0,
        clear_k=1.0,
        fast_k_per_w=2.5,
        fast_s=5.0,
        slow_k_per_w=7.0,
        slow_s=150.0,
        base_w=2.7,
        active_w=5.0,
        exponent=2.0,
        lowest_clock=0.6,
        battery_wh=None,
    ),
    "laptop": DeviceProfile(
        name="laptop",
        ambient_c=25.0,
        limit_c=95.0,
        clear_k=1.0,
        fast_k_per_w=1.0,
        fast_s=10.0,
        slow_k_per_w=1.5,
        slow_s=60.0,
        base_w=5.0,
        active_w=35.0,
        exponent=2.0,
        lowest_clock=0.4,
        battery_wh=55.0,
    ),
}


def find_profile(name: str) -> DeviceProfile:
    """The profile of this name.

    Raises:
        ConfigError: there is none; names those there are.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ConfigError(f"simulated device {name!r} is not one of {', '.join(PROFILES)}") from None


class SimulatedPhone:
    """The device's state over time. Thread-safe: the inference thread reports its work, the sampler asks.

    Time may be scaled: heat, governor and battery then run `time_scale` times as fast as the clock. Joules do not: they
    are watts times the seconds that the work really took, so joules a token mean what they say.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        *,
        time_scale: float = 1.0,
        battery_percent: float = 80.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < time_scale <= 1000:
            raise ConfigError(f"time scale must be over 0 and at most 1000, got {time_scale}")
        self.time_scale = time_scale
        self._clock = clock
        self._lock = threading.Lock()
        self._joules = 0.0
        self._radio_j = 0.0
        self.become(profile, battery_percent)

    def become(self, profile: DeviceProfile, battery_percent: float = 80.0) -> None:
        """Be this device, cool and at full clock. The joules spent so far stay."""
        with self._lock:
            self._reset(profile, battery_percent)

    def _reset(self, profile: DeviceProfile, battery_percent: float) -> None:
        self.profile = profile
        self._at = self._clock()
        self._busy_s = 0.0
        self._fast_k = 0.0
        self._slow_k = profile.base_w * profile.slow_k_per_w
        self._until_poll = POLL_S
        self._share = 1.0
        self._battery_wh = None if profile.battery_wh is None else profile.battery_wh * battery_percent / 100.0
        self._charging = False

    @property
    def clock_share(self) -> float:
        """The clock as a share of the highest; work takes its inverse as long."""
        return self._share

    @property
    def temperature_c(self) -> float:
        """What the governed sensor shows."""
        return self.profile.ambient_c + self._fast_k + self._slow_k

    @property
    def battery_percent(self) -> float | None:
        """Charge; None without a battery."""
        if self._battery_wh is None or self.profile.battery_wh is None:
            return None
        return 100.0 * self._battery_wh / self.profile.battery_wh

    def work(self, busy_s: float) -> None:
        """The processor was busy for so long, until now."""
        with self._lock:
            self._busy_s += busy_s
            self._advance()

    def transmit(self, joules: float) -> None:
        """The radio used energy."""
        with self._lock:
            self._radio_j += joules

    @property
    def radio_j(self) -> float:
        """Joules of the radio so far."""
        return self._radio_j

    def total_j(self) -> float:
        """Joules so far, the radio's included."""
        with self._lock:
            self._advance()
            return self._joules + self._radio_j

    def reading(self, now: float) -> DeviceReading:
        """What its sensors say."""
        with self._lock:
            self._advance()
            temperature = self.temperature_c
            severe = self.profile.statuses_c[2] if self.profile.statuses_c else None
            return DeviceReading(
                now,
                f"simulated:{self.profile.name}",
                temperature_c=temperature,
                battery_percent=self.battery_percent,
                charging=None if self.battery_percent is None else self._charging,
                thermal_status=self._status(temperature),
                headroom=None if severe is None else max(0.0, 1.0 - (severe - temperature) / HEADROOM_SPAN_C),
                network=Network.WIFI,
            )

    def _status(self, temperature: float) -> ThermalStatus | None:
        if not self.profile.statuses_c:
            return None
        return ThermalStatus(sum(temperature >= threshold for threshold in self.profile.statuses_c))

    def _advance(self) -> None:
        """Bring heat, clock and battery up to now, with the work since the last time spread evenly."""
        now = self._clock()
        elapsed = now - self._at
        if elapsed <= 0:
            return
        utilisation = min(1.0, self._busy_s / elapsed)
        left = elapsed * self.time_scale
        while left > 0:
            step = min(left, self._until_poll, self.profile.fast_s / 4)
            power = self._power_w(utilisation)
            self._heat(power, step)
            self._joules += power * step / self.time_scale
            if self._battery_wh is not None:
                self._battery_wh = max(0.0, self._battery_wh - power * step / 3600.0)
            left -= step
            self._until_poll -= step
            if self._until_poll <= 1e-9:
                self._until_poll = POLL_S
                self._govern()
        self._at, self._busy_s = now, 0.0

    def _power_w(self, utilisation: float) -> float:
        active: float = self.profile.active_w * self._share**self.profile.exponent
        return self.profile.base_w + utilisation * active

    def _heat(self, power: float, step: float) -> None:
        profile = self.profile
        self._fast_k += ((power - profile.base_w) * profile.fast_k_per_w - self._fast_k) * step / profile.fast_s
        self._slow_k += (power * profile.slow_k_per_w - self._slow_k) * step / profile.slow_s

    def _govern(self) -> None:
        if self.temperature_c >= self.profile.limit_c:
            self._share = max(self._share - CLOCK_STEP, self.profile.lowest_clock)
        elif self.temperature_c < self.profile.limit_c - self.profile.clear_k:
            self._share = min(self._share + CLOCK_STEP, 1.0)


class SimulatedMeter:
    """The simulated device's joules as an energy meter."""

    source = "simulated"

    def __init__(self, phone: SimulatedPhone) -> None:
        self._phone = phone

    def total_j(self) -> float:
        """Joules so far."""
        return self._phone.total_j()


class ThrottledThread(InferenceThread):
    """An inference thread whose jobs take as much longer as the simulated clock is slower, and heat the device."""

    def __init__(self, phone: SimulatedPhone) -> None:
        super().__init__()
        self._phone = phone

    async def run(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a job at the device's clock."""
        return await super().run(self._slowed(job), *args, **kwargs)

    def _slowed(self, job: Callable[P, R]) -> Callable[P, R]:
        def slowed(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            try:
                return job(*args, **kwargs)
            finally:
                busy = time.perf_counter() - started
                time.sleep(busy * (1.0 / self._phone.clock_share - 1.0))
                self._phone.work(time.perf_counter() - started)

        return slowed
