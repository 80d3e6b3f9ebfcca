"""This device as the agent meets it: its sensors, the thread its models run on, and its energy meter."""

from __future__ import annotations

import time
from collections.abc import Callable

from edge_agent.device_state import DeviceReading
from edge_agent.energy import EnergyMeter, choose_meter
from edge_agent.sensors import DevicePush, DeviceSampler, MergedSensors, NullSensors, Sensors, choose_sensors
from edge_agent.sensors.push import HeldPush
from edge_agent.simulated_phone import PROFILES, SimulatedMeter, SimulatedPhone, ThrottledThread, find_profile
from edge_agent.thresholds import Preset
from shared.errors import BadRequestError, ConfigError, NotFoundError
from shared.inference_thread import InferenceThread

STALE_AFTER_S = 60.0
"""A reading that is older isn't believed any more."""
DEMO_HOLD_S = 300.0
"""How long a simulated device stays as the sliders were set."""


class Device:
    """A real device, or a simulated one whose clock really slows the models."""

    def __init__(self, sensors: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """sensors: the setting of that name. Raises `ConfigError` for one that doesn't exist."""
        self._clock = clock
        self.phone: SimulatedPhone | None = None
        chosen: Sensors = choose_sensors(sensors, self._open_phone)
        self._held = HeldPush(DEMO_HOLD_S if self.is_simulated else STALE_AFTER_S)
        if not isinstance(chosen, NullSensors):
            # What an app or the demo's sliders say goes over what the machine's sensors or the simulation say.
            chosen = MergedSensors([self._held, chosen])
        self.sampler = DeviceSampler(chosen, stale_after_s=STALE_AFTER_S, clock=clock)

    @property
    def is_simulated(self) -> bool:
        """Whether this is the demo mode."""
        return self.phone is not None

    def new_thread(self) -> InferenceThread:
        """The thread for this device's models: at the simulated clock where the device is simulated."""
        return InferenceThread() if self.phone is None else ThrottledThread(self.phone)

    def new_meter(self, preset: Preset) -> EnergyMeter:
        """How energy is known here."""
        return choose_meter(preset) if self.phone is None else SimulatedMeter(self.phone)

    def push(self, push: DevicePush) -> None:
        """Take in what an app says of the device."""
        now = self._clock()
        self._held.hold(push, now)
        self.sampler.submit(push.reading(now))

    def profiles(self) -> list[str]:
        """The simulated devices to choose from.

        Raises:
            NotFoundError: this is a real device.
        """
        self._require_phone()
        return list(PROFILES)

    def become(self, profile: str) -> None:
        """Be another simulated device, cool and charged; what was pushed is forgotten.

        Raises:
            BadRequestError: no such profile. NotFoundError: this is a real device.
        """
        phone = self._require_phone()
        try:
            phone.become(find_profile(profile))
        except ConfigError as error:
            raise BadRequestError(str(error), param="profile", code="invalid_value") from None
        self._held.release()
        self.sampler.forget()

    def _open_phone(self, profile: str) -> SimulatedPhone:
        self.phone = SimulatedPhone(find_profile(profile), clock=self._clock)
        return self.phone

    def _require_phone(self) -> SimulatedPhone:
        if self.phone is None:
            raise NotFoundError(
                "there are no profiles here: start the agent with --sensors simulated:PROFILE", code="not_simulated"
            )
        return self.phone


def reading_values(reading: DeviceReading) -> dict[str, object]:
    """What a reading knows, for JSON; what it doesn't know is null."""
    status = reading.thermal_status
    return {
        "temperature_c": reading.temperature_c,
        "battery_percent": reading.battery_percent,
        "charging": reading.charging,
        "power_saver": reading.power_saver,
        "thermal_status": status.name.lower() if status is not None else None,
        "headroom": reading.headroom,
        "network": reading.network,
        "power_w": reading.power_w,
    }
