"""A recorded trace, played back at the pace it was recorded at. JSON lines or CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edge_agent.device_state import DeviceReading
from edge_agent.sensors.push import DevicePush
from shared.errors import ConfigError

TIME_COLUMN = "t"
"""Seconds since the trace began."""


class ReplaySensors:
    """Says what the trace said at the same time after its start; after its end nothing more."""

    source = "replay"

    def __init__(self, trace: list[DeviceReading]) -> None:
        """trace: readings with `at` in seconds since the trace began, rising."""
        self._trace = trace
        self._started: float | None = None
        self._next = 0

    @classmethod
    def from_file(cls, path: Path) -> ReplaySensors:
        """Read a trace.

        Raises:
            ConfigError: the file can't be read, or a line isn't what it should be; names the line.
        """
        return cls(read_trace(path))

    def read(self, now: float) -> DeviceReading | None:
        """The newest reading that is due and wasn't given yet. The first call starts the trace."""
        if self._started is None:
            self._started = now
        due: DeviceReading | None = None
        while self._next < len(self._trace) and self._trace[self._next].at <= now - self._started:
            due = self._trace[self._next]
            self._next += 1
        return None if due is None else replace(due, at=self._started + due.at, source=self.source)


def read_trace(path: Path) -> list[DeviceReading]:
    """The readings of a file, JSON lines or (by its suffix) CSV."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} can't be read: {error}") from error
    rows = _csv_rows(text) if path.suffix.lower() == ".csv" else _json_rows(text, path)
    trace: list[DeviceReading] = []
    for line, row in rows:
        trace.append(_reading(row, path, line))
        if len(trace) > 1 and trace[-1].at <= trace[-2].at:
            raise ConfigError(f"trace {path}, line {line}: {TIME_COLUMN} must rise from line to line")
    if not trace:
        raise ConfigError(f"trace {path} must hold at least one reading")
    return trace


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError as error:
            raise ConfigError(f"trace {path}, line {line}: must be a JSON object") from error
        if not isinstance(row, dict):
            raise ConfigError(f"trace {path}, line {line}: must be a JSON object")
        yield line, row


def _csv_rows(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in enumerate(csv.DictReader(text.splitlines()), start=2):
        yield line, {str(name): _csv_value(value) for name, value in row.items() if value not in ("", None)}


def _csv_value(text: Any) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _reading(row: dict[str, Any], path: Path, line: int) -> DeviceReading:
    values = dict(row)
    at = values.pop(TIME_COLUMN, None)
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise ConfigError(f"trace {path}, line {line}: {TIME_COLUMN} must be seconds since the beginning, 0 or more")
    try:
        return DevicePush.model_validate(values).reading(float(at))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"trace {path}, line {line}, {name}: {first['msg']}") from None
