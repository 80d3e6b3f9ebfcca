"""How many requests use the model side by side, and how many may wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cloud_service.load import LoadMeter
from shared.errors import OverloadedError


class Admission:
    """`max_running` places, first come first served; `max_waiting` may queue, the next is sent away at once."""

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        meter: LoadMeter,
        on_rejected: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._places = asyncio.Semaphore(max_running)
        self._num_running = 0
        self._num_waiting = 0
        self._max_waiting = max_waiting
        self._meter = meter
        self._on_rejected = on_rejected
        self._clock = clock
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for as long as the block lasts.

        Raises:
            OverloadedError: the queue is full, or the service is stopping.
        """
        if self.draining:
            self._on_rejected("draining")
            raise OverloadedError("the service is stopping", retry_after_s=5)
        if self._places.locked() and self._num_waiting >= self._max_waiting:
            self._on_rejected("queue_full")
            raise OverloadedError("the queue is full", retry_after_s=1)
        asked_at = self._clock()
        self._count_waiting(1)
        try:
            await self._places.acquire()
        finally:
            self._count_waiting(-1)
        self._meter.queued((self._clock() - asked_at) * 1e3)
        self._count_running(1)
        try:
            yield
        finally:
            self._count_running(-1)
            self._places.release()

    async def drain(self, grace_s: float) -> None:
        """Admit nobody; return when the running requests have ended or the time is over."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return

    def _count_waiting(self, change: int) -> None:
        self._num_waiting += change
        self._meter.waiting += change

    def _count_running(self, change: int) -> None:
        self._num_running += change
        self._meter.running += change
        if self._num_running:
            self._idle.clear()
        else:
            self._idle.set()
