"""What psutil finds: on macOS, Windows and the BSDs the only way, on Linux a second one."""

from __future__ import annotations

import psutil

from edge_agent.device_state import DeviceReading
from edge_agent.sensors.temperature import processor_temperature


class PsutilSensors:
    """Every part of it may be missing: the attribute, its value, a file behind it."""

    source = "psutil"

    def read(self, now: float) -> DeviceReading | None:
        """Temperature and battery as far as psutil knows them here."""
        temperature = _temperature()
        percent, charging = _battery()
        if temperature is None and percent is None:
            return None
        return DeviceReading(now, self.source, temperature_c=temperature, battery_percent=percent, charging=charging)


def _temperature() -> float | None:
    read = getattr(psutil, "sensors_temperatures", None)  # absent on macOS and Windows
    if read is None:
        return None
    try:
        chips = read() or {}
        return processor_temperature(
            {
                name: [(entry.label or "", float(entry.current)) for entry in entries if entry.current is not None]
                for name, entries in chips.items()
            }
        )
    except (
        OSError,
        NotImplementedError,
        AttributeError,
        ValueError,
        TypeError,
    ):  # an empty string or a vanished file is not a value
        return None


def _battery() -> tuple[float | None, bool | None]:
    read = getattr(psutil, "sensors_battery", None)
    if read is None:
        return None, None
    try:
        battery = read()
        if battery is None or battery.percent is None:
            return None, None
        plugged = battery.power_plugged
        return float(battery.percent), None if plugged is None else bool(plugged)
    except (OSError, NotImplementedError, AttributeError, ValueError, TypeError):
        return None, None
