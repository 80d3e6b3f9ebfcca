"""The one thread that inference runs on, so that the event loop never waits for a model.

Jobs run in the order they were submitted. A session submits one job a round, so sessions that run side by side take
turns round by round, and none starves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from shared.errors import EngineStoppedError

P = ParamSpec("P")
R = TypeVar("R")


class InferenceThread:
    """Owns the thread; `run` is the only way onto it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inference")
        self._stopped = False

    async def run(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a job on the thread and wait for it.

        A caller that is cancelled while its job waits takes the job with it. One that is cancelled while its job runs
        still waits for it to end: a model can't be left to a job nobody watches.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        if self._stopped:
            raise EngineStoppedError("the inference thread has stopped; restart the service")
        try:
            future = self._executor.submit(job, *args, **kwargs)
        except RuntimeError as error:
            raise EngineStoppedError("the inference thread has stopped; restart the service") from error
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not future.cancel():
                await asyncio.wait([waiter])
                if not waiter.cancelled():
                    waiter.exception()  # Its outcome is nobody's now; asking marks it as seen.
            raise

    async def responds(self, timeout_s: float) -> bool:
        """Whether a job gets through in time: the sign of life behind `/ready`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.run(lambda: True)
        except (TimeoutError, EngineStoppedError):
            return False

    def stop(self) -> None:
        """Drop the jobs that wait, let the running one end, end the thread."""
        self._stopped = True
        self._executor.shutdown(wait=True, cancel_futures=True)
