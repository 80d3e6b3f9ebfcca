"""The one thread that inference runs on, so that the event loop never waits for a model.

Jobs run in the order they were submitted. A session submits one job a round, so sessions that run side by side take
turns round by round, and none starves.

A hop onto the thread and back stands in every round, so it is one queue and one call back to the loop: through the
library's executor and its two futures it costs three times as much.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from shared.errors import EngineStoppedError

P = ParamSpec("P")
R = TypeVar("R")


class InferenceThread:
    """Owns the thread; `run` and `submit` are the only ways onto it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._stopped = False
        self._entrance = threading.Lock()
        """Nothing enters the queue behind what ends the thread."""
        self._thread = threading.Thread(target=self._serve, name="inference", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a job on the thread and wait for it; see `submit` and `Job.result`."""
        return await self.submit(job, *args, **kwargs).result()

    def submit(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Put a job at the end of the queue. Whoever does so waits for its `result` or drops it.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        submitted = Job(partial(job, *args, **kwargs))
        with self._entrance:
            if self._stopped:
                raise _stopped()
            self._jobs.put(submitted)
        return submitted

    def has_waiting(self, besides: Job[Any] | None = None) -> bool:
        """Whether a job waits for the thread. besides: one that doesn't count."""
        return self._jobs.qsize() > (besides is not None and besides.waits)

    async def responds(self, timeout_s: float) -> bool:
        """Whether a job gets through in time: the sign of life behind `/ready`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.run(lambda: True)
        except (TimeoutError, EngineStoppedError):
            return False

    def stop(self) -> None:
        """Drop the jobs that wait, let the running one end, end the thread."""
        with self._entrance:
            self._stopped = True
            with suppress(Empty):
                while True:
                    job = self._jobs.get_nowait()
                    if job is not None and job.claim():
                        job.end(error=_stopped())
            self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """False once there will be no more. Nothing of a job is held after it, while the next one is waited for."""
        job = self._jobs.get()
        if job is None:
            return False
        if job.claim():
            job.run()
        return True


class Job(Generic[R]):
    """Work and the event loop that waits for it. Made on the loop's thread."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._claimed = threading.Lock()
        self._ended = False
        self._outcome: asyncio.Future[R] = self._loop.create_future()

    async def result(self) -> R:
        """What comes of it.

        A caller that is cancelled while the job waits takes it back. One that is cancelled while it runs still waits
        for it to end: a model can't be left to a job nobody watches.
        """
        try:
            return await self._outcome
        except asyncio.CancelledError:
            await self.drop()
            raise

    async def drop(self) -> None:
        """Take it back, or wait for its end. What comes of it is nobody's now."""
        if not self.claim() and not self._ended:
            self._outcome = self._loop.create_future()  # The one before may be cancelled, with its caller.
            await asyncio.wait([self._outcome])
        if self._outcome.done() and not self._outcome.cancelled():
            self._outcome.exception()  # Asking marks it as seen.

    @property
    def waits(self) -> bool:
        """Whether it has neither begun nor been dropped."""
        return not self._claimed.locked()

    def claim(self) -> bool:
        """Whether the job is the caller's, to run or to drop. Only the first one gets it."""
        return self._claimed.acquire(blocking=False)

    def run(self) -> None:
        """On the inference thread: do the work and tell the loop."""
        try:
            result = self._work()
        except BaseException as error:
            self.end(error=error)
        else:
            self.end(result)

    def end(self, result: R | None = None, error: BaseException | None = None) -> None:
        """From any thread. A loop that has been closed waits for nothing."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        self._ended = True
        if self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(result)
        else:
            self._outcome.set_exception(error)


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("the inference thread has stopped; restart the service")
