"""Writing a device's readings down, for `replay`."""

from __future__ import annotations

import json
from pathlib import Path

from edge_agent.device_state import DeviceReading
from edge_agent.sensors.base import Sensors
from edge_agent.sensors.push import DevicePush
from edge_agent.sensors.replay import TIME_COLUMN

_FIELDS = tuple(DevicePush.model_fields)


class Recorder:
    """Sensors that also write each reading to a file as a JSON line."""

    def __init__(self, sensors: Sensors, path: Path) -> None:
        self._sensors = sensors
        self._path = path
        self._started: float | None = None

    @property
    def source(self) -> str:
        """The recorded sensors'."""
        return self._sensors.source

    def read(self, now: float) -> DeviceReading | None:
        """A reading, written down; raises OSError if the file can't be written."""
        reading = self._sensors.read(now)
        if reading is None:
            return None
        if self._started is None:
            self._started = reading.at
        values = {name: getattr(reading, name) for name in _FIELDS}
        row = {TIME_COLUMN: round(reading.at - self._started, 3)}
        row |= {name: value for name, value in values.items() if value is not None}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return reading
