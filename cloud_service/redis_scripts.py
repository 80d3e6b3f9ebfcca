"""Scripts on a Redis server, each within a deadline.

A Redis that is slow, frozen or gone costs one short timeout; after that it is left alone for a moment and asked again
by the next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cloud_service.session_store import StoreUnavailableError

REST_S = 1.0
"""How long a server that did not answer is left alone."""


class RedisScripts:
    """One server's connections, and what runs on it."""

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._rests_until = float("-inf")
        self._client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
        )

    def register(self, script: str) -> Any:
        """A script in Lua, for `run`."""
        return self._client.register_script(script)

    async def run(self, script: Any, name: str, *args: str | int | bytes) -> Any:
        """Run a registered script on the entry of this name; its reply.

        Raises:
            StoreUnavailableError: no answer in time, or none a moment ago.
        """
        if self._clock() < self._rests_until:
            raise StoreUnavailableError("Redis did not answer a moment ago")
        try:
            # One deadline for connecting, sending and waiting; redis-py's own are for each of them.
            async with asyncio.timeout(self._timeout_s):
                return await script(keys=[name], args=list(args))
        except (RedisError, OSError, TimeoutError) as error:
            self._rests_until = self._clock() + REST_S
            raise StoreUnavailableError(f"Redis did not answer: {type(error).__name__}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
