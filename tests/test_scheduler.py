"""Admission: bounds, turns, cancellation at any moment, and a stop that lets running requests finish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from edge_agent.scheduler import Scheduler
from shared.errors import OverloadedError, RateLimitedError


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Guest:
    """A request that stays until it is told to leave."""

    def __init__(self, scheduler: Scheduler, tenant: str = "a") -> None:
        self.leave = asyncio.Event()
        self.inside = False
        self.queue_s = -1.0
        self.task = asyncio.create_task(self._visit(scheduler, tenant))

    async def _visit(self, scheduler: Scheduler, tenant: str) -> None:
        async with scheduler.admit(tenant) as admission:
            self.inside = True
            self.queue_s = admission.queue_s
            await self.leave.wait()
        self.inside = False

    async def go(self) -> None:
        self.leave.set()
        await self.task


async def settle() -> None:
    """Let every task that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def refusal(guest: Guest) -> Exception:
    result = (await asyncio.gather(guest.task, return_exceptions=True))[0]
    assert isinstance(result, Exception)
    return result


def test_no_more_than_max_running_and_in_order_of_arrival() -> None:
    async def scenario() -> None:
        clock = Clock()
        scheduler = Scheduler(2, 8, clock)
        guests = [Guest(scheduler) for _ in range(5)]
        await settle()
        assert [guest.inside for guest in guests] == [True, True, False, False, False]
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)
        clock.now = 3.0
        await guests[1].go()
        await settle()
        assert [guest.inside for guest in guests] == [True, False, True, False, False]
        assert guests[2].queue_s == 3.0
        for guest in guests:
            guest.leave.set()
        await asyncio.gather(*(guest.task for guest in guests))
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)

    run(scenario)


def test_full_queue_is_refused_with_an_estimate_of_the_wait() -> None:
    async def scenario() -> None:
        clock = Clock()
        scheduler = Scheduler(1, 2, clock)
        first = Guest(scheduler)
        await settle()
        clock.now = 10.0
        await first.go()  # Service times are known now: 10 s pull the first guess up.
        guests = [Guest(scheduler) for _ in range(3)]
        await settle()
        late = Guest(scheduler)
        error = await refusal(late)
        assert isinstance(error, OverloadedError)
        assert error.status == 503
        assert error.retry_after_s == pytest.approx(3 * 6.0)
        assert scheduler.num_waiting == 2
        for guest in guests:
            guest.leave.set()
        await asyncio.gather(*(guest.task for guest in guests))

    run(scenario)


def test_no_queue_at_all() -> None:
    async def scenario() -> None:
        scheduler = Scheduler(1, 0)
        inside, late = Guest(scheduler), Guest(scheduler)
        assert isinstance(await refusal(late), OverloadedError)
        await inside.go()
        again = Guest(scheduler)
        await settle()
        assert again.inside
        await again.go()

    run(scenario)


def test_tenants_take_turns() -> None:
    async def scenario() -> None:
        scheduler = Scheduler(1, 16)
        order: list[str] = []

        async def visit(tenant: str) -> None:
            async with scheduler.admit(tenant):
                order.append(tenant)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(visit(tenant)) for tenant in "aaaaabbc"]
        await asyncio.gather(*tasks)
        assert "".join(order) == "aabcabaa"

    run(scenario)


def test_a_burst_of_one_tenant_does_not_keep_another_out() -> None:
    async def scenario() -> None:
        scheduler = Scheduler(1, 3)
        greedy = [Guest(scheduler, "greedy") for _ in range(4)]
        await settle()
        modest = Guest(scheduler, "modest")
        await settle()
        error = await refusal(greedy[3])
        assert isinstance(error, RateLimitedError)
        assert error.status == 429
        assert scheduler.num_waiting == 3
        one_more = await refusal(Guest(scheduler, "greedy"))
        assert isinstance(one_more, RateLimitedError)
        await greedy[0].go()
        await greedy[1].go()
        await settle()
        assert modest.inside
        for guest in (greedy[2], modest):
            guest.leave.set()
        await asyncio.gather(greedy[2].task, modest.task)

    run(scenario)


def test_cancelled_waiter_leaves_no_trace() -> None:
    async def scenario() -> None:
        scheduler = Scheduler(1, 4)
        inside, waiting, behind = Guest(scheduler), Guest(scheduler), Guest(scheduler, "b")
        await settle()
        waiting.task.cancel()
        await settle()
        assert scheduler.num_waiting == 1
        await inside.go()
        await settle()
        assert behind.inside
        await behind.go()
        assert scheduler.num_running == 0

    run(scenario)


def test_cancelled_in_the_moment_of_admission_passes_the_place_on() -> None:
    async def scenario() -> None:
        scheduler = Scheduler(1, 4)
        inside, chosen, behind = Guest(scheduler), Guest(scheduler), Guest(scheduler)
        await settle()
        inside.leave.set()
        while scheduler.num_waiting == 2:  # noqa: ASYNC110 - nobody tells of this moment.
            await asyncio.sleep(0)
        chosen.task.cancel()  # The place is its own already, but it has not run yet.
        await settle()
        assert not chosen.inside
        assert behind.inside
        await behind.go()
        assert scheduler.num_running == 0

    run(scenario)


def test_drain_finishes_the_running_and_sends_the_others_away() -> None:
    async def scenario() -> None:
        scheduler = Scheduler(1, 4)
        inside, waiting = Guest(scheduler), Guest(scheduler)
        await settle()
        drain = asyncio.create_task(scheduler.drain(30.0))
        await settle()
        assert scheduler.draining
        assert isinstance(await refusal(waiting), OverloadedError)
        assert isinstance(await refusal(Guest(scheduler)), OverloadedError)
        assert not drain.done()
        scheduler.raise_if_grace_over()
        await inside.go()
        await drain

    run(scenario)


def test_grace_that_is_over_tells_the_running() -> None:
    async def scenario() -> None:
        scheduler = Scheduler(1, 4)
        inside = Guest(scheduler)
        await settle()
        await scheduler.drain(0.01)
        with pytest.raises(OverloadedError):
            scheduler.raise_if_grace_over()
        await inside.go()

    run(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_places_are_never_lost(seed: int) -> None:
    """A storm of arrivals, cancellations and failures leaves an empty, working scheduler behind."""

    async def scenario() -> None:
        rng = random.Random(seed)
        scheduler = Scheduler(3, 6)
        most = 0

        async def visit() -> None:
            nonlocal most
            async with scheduler.admit(rng.choice("abc")):
                most = max(most, scheduler.num_running)
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if rng.random() < 0.2:
                    raise ValueError("the answer failed")

        tasks = []
        for _ in range(300):
            tasks.append(asyncio.create_task(visit()))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            assert scheduler.num_waiting <= 6
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 3
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        await scheduler.drain(5.0)

    run(scenario)
