"""Which requests share a pass, and what one of them that fails or leaves means to the others. On exact arithmetic."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from cloud_service.batcher import Batcher
from cloud_service.pass_costs import PassCosts, measure
from shared.causal_lm import Logits
from shared.errors import EngineError, EngineStoppedError
from shared.inference_thread import InferenceThread
from tests.cloud_toy import SEED, VOCAB, SlowTable, TableDecoder
from tests.fakes import TableLM

STARTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
REQUESTS: list[tuple[list[int], int]] = [([3, 1, 4], 3), ([1], 1), ([5, 9], 1), ([2, 6, 5, 3], 0)]
"""Tokens to append, and of how many the logits are wanted."""


class FailingDecoder(TableDecoder):
    """A pass with `bad` among its sequences fails; `entered` and `released` hold the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: SlowTable | None = None
        self.error: Exception = EngineError("a pass failed")
        self.entered, self.released = threading.Event(), threading.Event()

    def forward_batch(
        self, sequences: Sequence[SlowTable], tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Logits]:
        self.entered.set()
        assert self.released.wait(60)
        if self.bad in sequences:
            raise self.error
        return super().forward_batch(sequences, tokens, num_logits)


def expected(start: list[int], tokens: list[int], num_logits: int) -> np.ndarray:
    return TableLM(VOCAB, SEED).forward([*start, *tokens], len(start) + len(tokens))[
        len(start) + len(tokens) - num_logits :
    ]


def copied(rows: Logits) -> np.ndarray:
    return rows.copy()


def filled(decoder: TableDecoder) -> list[SlowTable]:
    caches = [decoder.new_cache() for _ in STARTS]
    for cache, start in zip(caches, STARTS, strict=True):
        cache.forward(start, 0)
    return caches


@asynccontextmanager
async def batching(
    decoder: TableDecoder, num_together: Callable[[Sequence[int]], int] = len
) -> AsyncIterator[Batcher[SlowTable]]:
    thread = InferenceThread()
    batcher: Batcher[SlowTable] = Batcher(decoder, thread, 8, num_together)
    running = asyncio.create_task(batcher.run())
    try:
        yield batcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        thread.stop()


async def ask(
    batcher: Batcher[SlowTable], caches: list[SlowTable], numbers: Sequence[int] = range(len(REQUESTS))
) -> list[asyncio.Task[np.ndarray]]:
    """These of the requests, all in the queue."""
    tasks = [asyncio.create_task(batcher.forward(caches[number], *REQUESTS[number], copied)) for number in numbers]
    await asyncio.sleep(0)
    return tasks


def assert_right(caches: list[SlowTable], outcomes: Sequence[object], without: Sequence[int] = ()) -> None:
    for number, (cache, outcome) in enumerate(zip(caches, outcomes, strict=True)):
        if number not in without:
            assert isinstance(outcome, np.ndarray)
            assert np.array_equal(outcome, expected(STARTS[number], *REQUESTS[number]))
            assert cache.tokens == [*STARTS[number], *REQUESTS[number][0]]


def test_requests_of_different_lengths_share_a_pass() -> None:
    async def scenario() -> None:
        decoder = TableDecoder()
        caches = filled(decoder)
        async with batching(decoder) as batcher:
            assert_right(caches, await asyncio.gather(*await ask(batcher, caches)))
        assert decoder.batch_sizes == [len(REQUESTS)]

    asyncio.run(scenario())


def test_no_more_share_a_pass_than_is_worth_while() -> None:
    async def scenario() -> None:
        decoder = TableDecoder()
        caches = filled(decoder)
        costs = PassCosts([10.0, 12.0, 14.0, 16.0], [10.0, 12.0, 14.0, 16.0, 100.0])
        async with batching(decoder, costs.num_together) as batcher:
            assert_right(caches, await asyncio.gather(*await ask(batcher, caches)))
        assert decoder.batch_sizes == [2, 1, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [EngineError("a pass failed"), RuntimeError("nobody foresaw it")], ids=repr)
def test_a_sequence_that_fails_fails_no_other(error: Exception) -> None:
    """Neither one of its batch nor those that ask later."""

    async def scenario() -> None:
        decoder = FailingDecoder()
        caches = filled(decoder)
        decoder.bad, decoder.error = caches[2], error
        decoder.released.set()
        async with batching(decoder) as batcher:
            outcomes = await asyncio.gather(*await ask(batcher, caches), return_exceptions=True)
            assert outcomes[2] is error
            assert caches[2].tokens == STARTS[2]
            assert_right(caches, outcomes, without=[2])
            async with asyncio.timeout(60):
                with pytest.raises(type(error)):
                    await batcher.forward(caches[2], [1], 1, copied)
                decoder.bad = None
                found = await batcher.forward(caches[2], *REQUESTS[2], copied)
            np.testing.assert_allclose(found, expected(STARTS[2], *REQUESTS[2]))

    asyncio.run(scenario())


def test_a_choice_that_fails_fails_no_other() -> None:
    def fail(rows: Logits) -> np.ndarray:
        raise ValueError("no choice")

    async def scenario() -> None:
        decoder = TableDecoder()
        caches = filled(decoder)
        async with batching(decoder) as batcher:
            choices: list[Callable[[Logits], np.ndarray]] = [copied, fail, copied, copied]
            asked = [
                batcher.forward(cache, *request, choose)
                for cache, request, choose in zip(caches, REQUESTS, choices, strict=True)
            ]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(outcomes[1], ValueError)
            assert_right(caches, outcomes, without=[1])
        assert decoder.batch_sizes == [len(REQUESTS)]

    asyncio.run(scenario())


def test_one_that_leaves_in_the_middle_of_a_pass_waits_for_its_cache_and_stops_no_other() -> None:
    async def scenario() -> None:
        decoder = FailingDecoder()
        caches = filled(decoder)
        async with batching(decoder) as batcher:
            tasks = await ask(batcher, caches)
            await asyncio.to_thread(decoder.entered.wait)
            tasks[1].cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not tasks[1].done(), "the cache was given back while a pass used it"
            decoder.released.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(outcomes[1], asyncio.CancelledError)
            assert_right(caches, outcomes, without=[1])

    asyncio.run(scenario())


def test_one_that_leaves_before_its_pass_takes_its_tokens_along() -> None:
    async def scenario() -> None:
        decoder = FailingDecoder()
        caches = filled(decoder)
        async with batching(decoder) as batcher:
            [first] = await ask(batcher, caches, [0])
            await asyncio.to_thread(decoder.entered.wait)
            others = await ask(batcher, caches, [1, 2, 3])
            others[0].cancel()
            await asyncio.gather(others[0], return_exceptions=True)
            decoder.released.set()
            assert_right(caches, await asyncio.gather(first, *others, return_exceptions=True), without=[1])
            assert caches[1].tokens == STARTS[1]
        assert decoder.batch_sizes == [1, 2]

    asyncio.run(scenario())


def test_a_stop_ends_those_that_wait_with_an_error() -> None:
    async def scenario() -> None:
        decoder = FailingDecoder()
        caches = filled(decoder)
        async with batching(decoder) as batcher:
            [first] = await ask(batcher, caches, [0])
            await asyncio.to_thread(decoder.entered.wait)
            [second] = await ask(batcher, caches, [1])
            decoder.released.set()
            stopping = asyncio.gather(first, second, return_exceptions=True)
        assert [type(outcome) for outcome in await stopping] == [EngineStoppedError] * 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("together", "positions", "num"),
    [
        ([10.0] * 8, [1, 1, 1, 1], 4),  # One pass for the price of one.
        ([10.0, 25.0, 40.0, 55.0], [1, 1, 1, 1], 1),  # Each costs more than a pass of its own.
        ([10.0, 25.0, 28.0, 31.0], [1, 1, 1, 1], 4),  # Two don't pay, four do.
        ([10.0, 12.0, 30.0, 60.0], [1, 1, 1, 1], 2),
        ([10.0, 12.0, 30.0, 60.0], [1], 1),
    ],
)
def test_as_many_share_a_pass_as_save_most(together: list[float], positions: list[int], num: int) -> None:
    assert PassCosts([10.0], together).num_together(positions) == num


def test_costs_are_measured_alone_and_together() -> None:
    decoder, ticks = TableDecoder(), iter(range(10_000))
    caches = filled(decoder)
    costs = measure(decoder, caches, 5, lambda: next(ticks) / 1e3)
    assert costs.alone_ms == [1.0] * 5
    assert costs.together_ms == [1.0] * 16  # Four sessions with 1, 2 and 4 rows each.
    assert [cache.tokens for cache in caches] == STARTS
    assert set(decoder.batch_sizes) == {1, 2, 4}
    assert measure(decoder, caches[:1], 2).together_ms[1:] == []
