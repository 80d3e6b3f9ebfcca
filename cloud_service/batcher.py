"""Rounds and decode steps of several sequences as one pass of the model.

A pass over eight sequences costs far less than eight passes: the weights are read once. Whoever needs logits asks
`forward`; requests that wait at the same time run together, as far as that costs less than passes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cloud_service.pass_costs import BatchDecoder
from shared.causal_lm import CausalLM, Logits
from shared.errors import EngineStoppedError
from shared.inference_thread import InferenceThread

LM = TypeVar("LM", bound=CausalLM)
R = TypeVar("R")
T = TypeVar("T")

LINGER_SHARE = 0.05
"""Part of a pass's time that a batch waits for the streams of the last one: a pass without them costs far more."""
LONGEST_LINGER_S = 0.02


def linger_s(last_pass_s: float) -> float:
    """How long a batch waits for the steps that it expects."""
    return min(LINGER_SHARE * last_pass_s, LONGEST_LINGER_S)


@dataclass
class _Step(Generic[LM]):
    cache: LM
    tokens: Sequence[int]
    num_logits: int
    choose: Callable[[Logits], Any]
    comes_again: bool
    asked_at: float
    done: asyncio.Future[Any] = field(repr=False)


class Batcher(Generic[LM]):
    """Collects waiting requests and runs them as one job. `run` has to be running."""

    def __init__(
        self,
        decoder: BatchDecoder[LM],
        thread: InferenceThread,
        max_batch: int,
        num_together: Callable[[Sequence[int]], int] = len,
        on_batch: Callable[[int, float, float], None] = lambda size, queue_s, busy_s: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """num_together: of those that wait, with so many rows each, how many of the first ones a pass had better take.

        on_batch: told each batch's size, its steps' mean wait and the time of its pass, in seconds.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self._decoder = decoder
        self._thread = thread
        self.max_batch = min(max_batch, decoder.max_batch)
        self._num_together = num_together
        self._on_batch = on_batch
        self._clock = clock
        self._waiting: list[_Step[LM]] = []
        self._arrived = asyncio.Event()
        self._expected = 1
        self._last_pass_s = 0.0

    async def forward(
        self,
        cache: LM,
        tokens: Sequence[int],
        num_logits: int,
        choose: Callable[[Logits], R],
        *,
        comes_again: bool = False,
    ) -> R:
        """Append `tokens` to the cache and return choose(logits [num_logits, vocab_size] of the last ones).

        `choose` runs on the inference thread; the logits are overwritten by the next pass. comes_again: the caller asks
        for its next step as soon as it has this one.

        A caller that is cancelled while its step runs still waits for it: the cache is in use until then.

        Raises:
            EngineError: inference failed; the cache is as it was before.
        """
        done = asyncio.get_running_loop().create_future()
        step = _Step(cache, tokens, num_logits, choose, comes_again, self._clock(), done)
        self._waiting.append(step)
        self._arrived.set()
        try:
            result: R = await asyncio.shield(step.done)
            return result
        except asyncio.CancelledError:
            if step in self._waiting:
                self._waiting.remove(step)
            elif not step.done.done():
                await asyncio.wait([step.done])
            if step.done.done() and not step.done.cancelled():
                step.done.exception()  # Its outcome is nobody's now; asking marks it as seen.
            raise

    async def run(self) -> None:
        """Serve steps until cancelled; those that wait then fail with `EngineStoppedError`."""
        try:
            while True:
                while not self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                await self._linger()
                if self._waiting:
                    await self._serve(self._take())
        finally:
            for step in self._waiting:
                if not step.done.done():
                    step.done.set_exception(EngineStoppedError("the service is stopping"))
            self._waiting.clear()

    def _take(self) -> list[_Step[LM]]:
        size = self._num_together([len(step.tokens) for step in self._waiting[: self.max_batch]])
        steps, self._waiting = self._waiting[:size], self._waiting[size:]
        return steps

    async def _linger(self) -> None:
        """Streams ask for their next step as soon as the last is done; give them a moment to arrive."""
        expected = min(self._expected, self.max_batch)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s(self._last_pass_s)):
                while len(self._waiting) < expected:
                    self._arrived.clear()
                    await self._arrived.wait()

    async def _serve(self, steps: list[_Step[LM]]) -> None:
        try:
            outcomes = await self._thread.run(self._run, steps)
        except asyncio.CancelledError:
            for step in steps:
                step.done.set_exception(EngineStoppedError("the service is stopping"))
            raise
        except Exception as error:  # Whatever it is belongs to those who wait for it; the others' batches go on.
            for step in steps:
                step.done.set_exception(error)
            self._expected = 1
            return
        for step, outcome in zip(steps, outcomes, strict=True):
            if isinstance(outcome, Exception):
                step.done.set_exception(outcome)
            else:
                step.done.set_result(outcome)
        self._expected = len(self._waiting) + sum(step.comes_again for step in steps)

    def _run(self, steps: list[_Step[LM]]) -> list[Any]:
        """On the inference thread: one pass, then each step's own choice; one that fails takes no other with it."""
        started = self._clock()
        try:
            logits = self._decoder.forward_batch(
                [step.cache for step in steps],
                [step.tokens for step in steps],
                [step.num_logits for step in steps],
            )
        except Exception:
            if len(steps) == 1:
                raise
            return [_outcome(self._run_alone, step) for step in steps]
        waited_s = sum(started - step.asked_at for step in steps) / len(steps)
        self._last_pass_s = self._clock() - started
        self._on_batch(len(steps), waited_s, self._last_pass_s)
        return [_outcome(step.choose, rows) for step, rows in zip(steps, logits, strict=True)]

    def _run_alone(self, step: _Step[LM]) -> Any:
        [outcome] = self._run([step])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _outcome(make: Callable[[T], Any], of: T) -> Any:
    try:
        return make(of)
    except Exception as error:  # It is raised again where the step was asked for.
        return error
