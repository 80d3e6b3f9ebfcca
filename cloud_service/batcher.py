"""Decode steps of several sequences as one pass of the model.

A pass over eight sequences costs far less than eight passes: the weights are read once. Whoever needs one more token
asks `decode`; requests that wait at the same time run together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shared.causal_lm import CausalLM, Logits
from shared.errors import EngineError, EngineStoppedError
from shared.inference_thread import InferenceThread

LM = TypeVar("LM", bound=CausalLM)
R = TypeVar("R")

LINGER_SHARE = 0.05
"""Part of a pass's time that a batch waits for steps that were in the last one: a pass without them costs far more."""
LONGEST_LINGER_S = 0.02


def linger_s(last_pass_s: float) -> float:
    """How long a batch waits for the steps that it expects."""
    return min(LINGER_SHARE * last_pass_s, LONGEST_LINGER_S)


class BatchDecoder(Protocol[LM]):
    """A model whose caches can be stepped together."""

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""

    @property
    def context_length(self) -> int:
        """Most tokens a cache can hold."""

    def new_cache(self) -> LM:
        """A new, empty sequence."""

    def decode_batch(self, caches: Sequence[LM], tokens: Sequence[int]) -> Logits:
        """Append one token to each of the caches; logits [len(caches), vocab_size]."""


@dataclass
class _Step(Generic[LM]):
    cache: LM
    token: int
    choose: Callable[[Logits], Any]
    asked_at: float
    done: asyncio.Future[Any] = field(repr=False)


class Batcher(Generic[LM]):
    """Collects waiting decode steps and runs them as one job. `run` has to be running."""

    def __init__(
        self,
        decoder: BatchDecoder[LM],
        thread: InferenceThread,
        max_batch: int,
        on_batch: Callable[[int, float, float], None] = lambda size, queue_s, busy_s: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """on_batch: told each batch's size, its steps' mean wait and the time of its pass, in seconds."""
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self._decoder = decoder
        self._thread = thread
        self._max_batch = max_batch
        self._on_batch = on_batch
        self._clock = clock
        self._waiting: list[_Step[LM]] = []
        self._arrived = asyncio.Event()
        self._last_size = 1
        self._last_pass_s = 0.0

    async def decode(self, cache: LM, token: int, choose: Callable[[Logits], R]) -> R:
        """Append `token` to the cache and return choose(logits [vocab_size]), which runs on the inference thread.

        A caller that is cancelled while its step runs still waits for it: the cache is in use until then.

        Raises:
            EngineError: inference failed; the cache is as it was before.
        """
        step = _Step(cache, token, choose, self._clock(), asyncio.get_running_loop().create_future())
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
                steps, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
                if steps:
                    await self._serve(steps)
        finally:
            for step in self._waiting:
                if not step.done.done():
                    step.done.set_exception(EngineStoppedError("the service is stopping"))
            self._waiting.clear()

    async def _linger(self) -> None:
        """Streams ask for their next step as soon as the last is done; give as many as last time a moment to arrive."""
        expected = min(self._last_size, self._max_batch)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s(self._last_pass_s)):
                while len(self._waiting) < expected:
                    self._arrived.clear()
                    await self._arrived.wait()

    async def _serve(self, steps: list[_Step[LM]]) -> None:
        self._last_size = len(steps)
        try:
            outcomes = await self._thread.run(self._decode, steps)
        except asyncio.CancelledError:
            for step in steps:
                step.done.set_exception(EngineStoppedError("the service is stopping"))
            raise
        except EngineError as error:
            for step in steps:
                step.done.set_exception(error)
            return
        for step, outcome in zip(steps, outcomes, strict=True):
            if isinstance(outcome, Exception):
                step.done.set_exception(outcome)
            else:
                step.done.set_result(outcome)

    def _decode(self, steps: list[_Step[LM]]) -> list[Any]:
        """On the inference thread: one pass, then each step's own choice; one that fails takes no other with it."""
        started = self._clock()
        logits = self._decoder.decode_batch([step.cache for step in steps], [step.token for step in steps])
        waited_s = sum(started - step.asked_at for step in steps) / len(steps)
        self._last_pass_s = self._clock() - started
        self._on_batch(len(steps), waited_s, self._last_pass_s)
        return [_outcome(step.choose, row) for step, row in zip(steps, logits, strict=True)]


def _outcome(choose: Callable[[Logits], Any], row: Logits) -> Any:
    try:
        return choose(row)
    except Exception as error:  # It is raised again where the step was asked for.
        return error
