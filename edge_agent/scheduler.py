"""Admission: how many requests run side by side, who is next, and who is sent away."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.errors import OverloadedError, RateLimitedError

FIRST_GUESS_S = 5.0
"""Service time of an answer before any has been measured."""


@dataclass(frozen=True)
class Admission:
    """A request's place among the running ones. queue_s: how long it waited for it."""

    queue_s: float


class Scheduler:
    """At most `max_running` requests at once; at most `max_waiting` wait, first come first served within a tenant and
    in turn between tenants, so that one caller's burst can't starve another's single request."""

    def __init__(self, max_running: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._clock = clock
        self._num_running = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._service_s = FIRST_GUESS_S
        self._draining = False
        self._grace_over = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Requests admitted and not finished."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def draining(self) -> bool:
        """Whether the service is stopping: nobody is admitted any more."""
        return self._draining

    @property
    def retry_after_s(self) -> float:
        """When a place is likely to be free: the queue ahead at the recent service time; 1 to 60 seconds."""
        rounds = (self.num_waiting + 1) / self._max_running
        return min(max(rounds * self._service_s, 1.0), 60.0)

    @asynccontextmanager
    async def admit(self, tenant: str) -> AsyncIterator[Admission]:
        """Wait for a place and hold it.

        Raises:
            OverloadedError: the queue is full, or the service is stopping.
            RateLimitedError: the queue is full and this tenant fills most of it.
        """
        arrived = self._clock()
        await self._take_place(tenant)
        started = self._clock()
        try:
            yield Admission(queue_s=started - arrived)
        finally:
            self._service_s += 0.2 * (self._clock() - started - self._service_s)
            self._give_place()

    def raise_if_grace_over(self) -> None:
        """For a running request, once a round.

        Raises:
            OverloadedError: the service is stopping and the time for running answers is over.
        """
        if self._grace_over:
            raise self._stopping()

    async def drain(self, grace_s: float) -> None:
        """Admit nobody, send the queue away, and give the running requests `grace_s` to finish."""
        self._draining = True
        for queue in self._queues.values():
            for place in queue:
                if not place.done():
                    place.set_exception(self._stopping())
        self._queues.clear()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self._grace_over = True

    async def _take_place(self, tenant: str) -> None:
        if self._draining:
            raise self._stopping()
        if self._num_running < self._max_running:
            self._occupy()
            return
        if self.num_waiting >= self._max_waiting:
            self._make_room(tenant)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give_place()  # The place came in the same moment as the cancellation: pass it on.
            self._forget(tenant, place)
            raise

    def _make_room(self, tenant: str) -> None:
        """Turn away the latest request of the tenant with the most waiting, unless that is the newcomer's own."""
        waiting = {name: len(queue) for name, queue in self._queues.items()}
        greediest = max(waiting, key=lambda name: waiting[name], default=tenant)
        if waiting.get(greediest, 0) <= waiting.get(tenant, 0) + 1:
            if len(waiting) > 1 and greediest == tenant:
                raise self._too_many()
            raise OverloadedError("all places are taken and the queue is full", retry_after_s=self.retry_after_s)
        victim = self._queues[greediest][-1]
        self._forget(greediest, victim)
        victim.set_exception(self._too_many())

    def _give_place(self) -> None:
        self._num_running -= 1
        while self._queues:
            tenant, queue = next(iter(self._queues.items()))
            place = queue.popleft()
            self._queues.move_to_end(tenant)
            if not queue:
                del self._queues[tenant]
            if not place.done():
                self._occupy()
                place.set_result(None)
                return
        if not self._num_running:
            self._idle.set()

    def _occupy(self) -> None:
        self._num_running += 1
        self._idle.clear()

    def _forget(self, tenant: str, place: asyncio.Future[None]) -> None:
        queue = self._queues.get(tenant)
        if queue is not None and place in queue:
            queue.remove(place)
            if not queue:
                del self._queues[tenant]

    def _stopping(self) -> OverloadedError:
        return OverloadedError("the service is stopping", retry_after_s=self.retry_after_s)

    def _too_many(self) -> RateLimitedError:
        return RateLimitedError("the queue is full and most of it is yours", retry_after_s=self.retry_after_s)
