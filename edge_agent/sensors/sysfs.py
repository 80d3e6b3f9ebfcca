"""Linux's own files under /sys/class: thermal zones, hwmon chips, power supplies."""

from __future__ import annotations

from pathlib import Path

from edge_agent.device_state import DeviceReading
from edge_agent.energy import battery_power_w
from edge_agent.sensors.temperature import processor_temperature
from edge_agent.sysfs_file import read_number, read_text

SYS_CLASS = Path("/sys/class")

CHARGING = {"Charging": True, "Full": True, "Not charging": True, "Discharging": False}
"""`Not charging` is a battery at its limit on the charger; `Unknown` is unknown."""


class SysfsSensors:
    """Reads a few small files each time."""

    source = "sysfs"

    def __init__(self, root: Path = SYS_CLASS) -> None:
        self._root = root

    def read(self, now: float) -> DeviceReading | None:
        """Temperature and battery as far as the machine has them."""
        supplies = self._root / "power_supply"
        percent, charging = _battery(supplies)
        reading = DeviceReading(
            now,
            self.source,
            temperature_c=processor_temperature(self._chips()),
            battery_percent=percent,
            charging=charging,
            power_w=battery_power_w(supplies),
        )
        known = (reading.temperature_c, reading.battery_percent, reading.charging)
        return reading if any(value is not None for value in known) else None

    def _chips(self) -> dict[str, list[tuple[str, float]]]:
        chips: dict[str, list[tuple[str, float]]] = {}
        for zone in _folders(self._root / "thermal", "thermal_zone*"):
            value = read_number(zone / "temp")
            if value is not None:
                chips.setdefault(read_text(zone / "type") or "", []).append(("", value))
        for chip in _folders(self._root / "hwmon", "hwmon*"):
            name = read_text(chip / "name") or ""
            for file in sorted(chip.glob("temp*_input")):
                value = read_number(file)
                if value is not None:
                    label = read_text(file.with_name(file.name.replace("_input", "_label"))) or ""
                    chips.setdefault(name, []).append((label, value))
        return chips


def _battery(root: Path) -> tuple[float | None, bool | None]:
    """(percent, charging) of the device's own battery; a mouse's battery has the scope `Device`."""
    percent: float | None = None
    charging: bool | None = None
    mains: bool | None = None
    for supply in _folders(root, "*"):
        kind = read_text(supply / "type")
        if kind in ("Mains", "USB"):
            online = read_number(supply / "online")
            mains = mains or (None if online is None else online > 0)
        elif kind == "Battery" and read_text(supply / "scope") != "Device" and percent is None:
            percent = read_number(supply / "capacity")
            charging = CHARGING.get(read_text(supply / "status") or "")
    if percent is None:
        return None, None
    return percent, mains if charging is None else charging


def _folders(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern)) if root.is_dir() else []
