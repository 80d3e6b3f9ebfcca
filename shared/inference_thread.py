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
    """Owns the thread; `run` is the only way onto it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._stopped = False
        self._entrance = threading.Lock()
        """Nothing enters the queue behind what ends the thread."""
        self._thread = threading.Thread(target=self._serve, name="inference", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a job on the thread and wait for it.

        A caller that is cancelled while its job waits takes the job with it. One that is cancelled while its job runs
        still waits for it to end: a model can't be left to a job nobody watches.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        submitted = _Job(partial(job, *args, **kwargs))
        with self._entrance:
            if self._stopped:
                raise _stopped()
            self._jobs.put(submitted)
        try:
            return await submitted.outcome
        except asyncio.CancelledError:
            if not submitted.claim():
                await submitted.wait_for_end()
            raise

    @property
    def has_waiting(self) -> bool:
        """Whether a job waits for the thread."""
        return not self._jobs.empty()

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


class _Job(Generic[R]):
    """Work and the event loop that waits for it. Made on the loop's thread."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._claimed = threading.Lock()
        self._ended = False
        self.outcome: asyncio.Future[R] = self._loop.create_future()

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

    async def wait_for_end(self) -> None:
        """For a caller that was cancelled, and `outcome` with it. What comes of the work is nobody's now."""
        if not self._ended:
            self.outcome = self._loop.create_future()
            await asyncio.wait([self.outcome])
            self.outcome.exception()

    def _settle(self, result: Any, error: BaseException | None) -> None:
        self._ended = True
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(result)
        else:
            self.outcome.set_exception(error)


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("the inference thread has stopped; restart the service")
