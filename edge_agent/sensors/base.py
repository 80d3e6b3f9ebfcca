"""What sensors are, and the task that looks at them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Protocol

from edge_agent.device_state import DeviceReading, DeviceState, DeviceTracker

logger = logging.getLogger(__name__)

_VALUES = tuple(field.name for field in fields(DeviceReading) if field.name not in ("at", "source"))


class Sensors(Protocol):
    """One way to read the device. May block for a moment: it is never called in a request's path."""

    @property
    def source(self) -> str:
        """Its name in readings."""

    def read(self, now: float) -> DeviceReading | None:
        """A look at the device; None if there is nothing to say. What isn't known stays None.

        now: seconds of the monotonic clock, for the reading's `at`.
        """


class NullSensors:
    """A device that tells nothing: everything stays unknown."""

    source = "none"

    def read(self, now: float) -> DeviceReading | None:
        """Nothing."""
        return None


class MergedSensors:
    """Several sensors as one: each value from the first that knows it."""

    def __init__(self, parts: Sequence[Sensors]) -> None:
        self._parts = tuple(parts)

    @property
    def source(self) -> str:
        """The names of all parts."""
        return "+".join(part.source for part in self._parts) or "none"

    def read(self, now: float) -> DeviceReading | None:
        """One reading, named after the parts that contributed to it."""
        merged, sources = DeviceReading(now, "none"), []
        for part in self._parts:
            reading = part.read(now)
            if reading is None:
                continue
            news = {
                name: getattr(reading, name)
                for name in _VALUES
                if getattr(merged, name) is None and getattr(reading, name) is not None
            }
            if news:
                merged = replace(merged, **news)
                sources.append(reading.source)
        return replace(merged, source="+".join(sources)) if sources else None


class DeviceSampler:
    """Looks at the sensors every `interval_s` and keeps what the policy may believe.

    `run` is a task of the service's lifespan; `state` is cheap and may be asked in every round.
    """

    def __init__(
        self,
        sensors: Sensors,
        *,
        interval_s: float = 1.0,
        stale_after_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sensors = sensors
        self._interval_s = interval_s
        self._clock = clock
        self._stale_after_s = stale_after_s
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was read before is of another device."""
        self._tracker = DeviceTracker(self._stale_after_s)
        self._state = self._tracker.state(self._clock())
        self._state_at = -1.0

    @property
    def last_reading(self) -> DeviceReading | None:
        """The newest reading, as it came."""
        return self._tracker.last_reading

    def state(self) -> DeviceState:
        """What is known of the device now."""
        now = self._clock()
        if now - self._state_at >= 0.05:
            self._state, self._state_at = self._tracker.state(now), now
        return self._state

    def submit(self, reading: DeviceReading) -> None:
        """Take in a reading that came by another way than `read`: an app's push."""
        self._tracker.add(reading)
        self._state_at = -1.0

    def sample(self) -> None:
        """One look. A sensor that fails says nothing this time."""
        try:
            reading = self.sensors.read(self._clock())
        except (OSError, ValueError) as error:
            logger.warning("sensor %s could not be read: %s", self.sensors.source, error)
            return
        if reading is not None:
            self.submit(reading)

    async def run(self) -> None:
        """Look for ever, off the event loop's thread; cancel it to stop."""
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(self._interval_s)
