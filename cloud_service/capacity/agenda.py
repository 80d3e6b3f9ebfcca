"""Simulated time: what happens when, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Agenda:
    """Events by their time, in milliseconds; those of one time in the order in which they were put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, delay_ms: float, event: Callable[[], None]) -> None:
        """Let it happen so long after now."""
        heapq.heappush(self._events, (self.now + delay_ms, next(self._numbers), event))

    def run(self, until_ms: float) -> None:
        """All that happens until then."""
        while self._events and self._events[0][0] <= until_ms:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until_ms
