"""Android under Termux: `termux-battery-status`, of the Termux:API app."""

from __future__ import annotations

import json
import shutil
import subprocess

from edge_agent.device_state import DeviceReading

COMMAND = "termux-battery-status"
TIMEOUT_S = 5.0


class TermuxSensors:
    """Runs a command: about half a second a look. The battery's temperature stands in for the skin's."""

    source = "termux"

    def __init__(self, command: str = COMMAND) -> None:
        self._command = command

    @staticmethod
    def is_available(command: str = COMMAND) -> bool:
        """Whether the command exists."""
        return shutil.which(command) is not None

    def read(self, now: float) -> DeviceReading | None:
        """Battery and temperature; None if the command hangs or says something else."""
        try:
            done = subprocess.run([self._command], capture_output=True, timeout=TIMEOUT_S, check=True)
            status = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            return None
        if not isinstance(status, dict):
            return None
        return DeviceReading(
            now,
            self.source,
            temperature_c=_number(status.get("temperature")),
            battery_percent=_number(status.get("percentage")),
            charging=_charging(status.get("status"), status.get("plugged")),
        )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _charging(status: object, plugged: object) -> bool | None:
    if status in ("CHARGING", "FULL"):
        return True
    if status == "DISCHARGING":
        return False
    if isinstance(plugged, str) and plugged:
        return plugged != "UNPLUGGED"
    return None
