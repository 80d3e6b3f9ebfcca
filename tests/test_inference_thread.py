"""The inference thread: order, errors, cancellation, the end."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.errors import EngineStoppedError
from shared.inference_thread import InferenceThread
from tests.fakes import inference


class Gate:
    """A job that says when it runs and ends when it is told to."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.passed = False

    def pass_through(self) -> str:
        self.entered.set()
        assert self.opened.wait(60)
        self.passed = True
        return "passed"

    async def is_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 60)


@asynccontextmanager
async def occupied(thread: InferenceThread) -> AsyncIterator[tuple[Gate, asyncio.Task[str]]]:
    """A job that runs until the gate is opened, by the block or by its end."""
    gate = Gate()
    running = asyncio.create_task(thread.run(gate.pass_through))
    await gate.is_entered()
    try:
        yield gate, running
    finally:
        gate.opened.set()
        await asyncio.wait([running])


def test_jobs_run_in_order_on_one_thread_and_return_what_they_did() -> None:
    async def run() -> None:
        async with inference() as thread:
            order: list[int] = []

            def job(number: int, *, factor: int) -> tuple[int, int]:
                order.append(number)
                return number * factor, threading.get_ident()

            outcomes = await asyncio.gather(*(thread.run(job, number, factor=2) for number in range(20)))
        assert order == list(range(20))
        assert [product for product, _ in outcomes] == [2 * number for number in range(20)]
        assert len({ident for _, ident in outcomes} | {threading.get_ident()}) == 2

    asyncio.run(run())


def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    async def run() -> None:
        async with inference() as thread:
            with pytest.raises(ZeroDivisionError):
                await thread.run(lambda: 1 // 0)
            with pytest.raises(SystemExit):
                await thread.run(sys.exit)
            assert await thread.run(lambda: "alive") == "alive"

    asyncio.run(run())


def test_cancelled_while_it_waits_a_job_never_runs() -> None:
    async def run() -> None:
        async with inference() as thread:
            ran: list[str] = []
            async with occupied(thread) as (gate, running):
                waiting = asyncio.create_task(thread.run(ran.append, "waiting"))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                gate.opened.set()
                assert await running == "passed"
            await thread.run(ran.append, "later")
        assert ran == ["later"]

    asyncio.run(run())


def test_cancelled_while_its_job_runs_a_caller_waits_for_the_end() -> None:
    async def run() -> None:
        async with inference() as thread, occupied(thread) as (gate, running):
            running.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not running.done()
            gate.opened.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert gate.passed

    asyncio.run(run())


def test_cancelled_as_its_job_ends_a_caller_does_not_wait_for_ever() -> None:
    async def run() -> None:
        async with inference() as thread, occupied(thread) as (gate, running):
            gate.opened.set()
            while not gate.passed:
                pass  # The loop learns of the end and of the cancellation in the same turn.
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await thread.run(lambda: "alive") == "alive"

    asyncio.run(run())


def test_stopping_lets_the_running_job_end_and_fails_those_that_wait() -> None:
    async def run() -> None:
        thread = InferenceThread()
        async with occupied(thread) as (gate, running):
            waiting = asyncio.create_task(thread.run(lambda: "never"))
            await asyncio.sleep(0)
            stopping = asyncio.create_task(asyncio.to_thread(thread.stop))
            with pytest.raises(EngineStoppedError):
                await waiting
            assert not stopping.done()
            gate.opened.set()
            assert await running == "passed"
            await stopping
        with pytest.raises(EngineStoppedError):
            await thread.run(lambda: "never")
        assert not await thread.responds(60)
        thread.stop()

    asyncio.run(run())
