"""Server-sent events over ASGI: pulled by the client's pace, pinged through silence, ended when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared.errors import SouschefError
from shared.http import ClientLeftError, error_body, run_until_disconnect
from shared.sse import PING, frame

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

LOOKS = 4
"""Times that the line to a client is looked at while it may be silent, or a frame may wait: so exact is either."""

Frames = AsyncGenerator[bytes, None]


class ClientStalledError(Exception):
    """The client takes nothing: what it was sent fills every buffer on the way."""


class EventStream(Response):
    """Sends frames as they are made. The first is already here: whatever could go wrong before it has had its status.

    A frame is made only after the one before was taken by the socket, so that a slow client slows its own answer and
    fills no memory; one that takes nothing for `stall_s` is given up.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, frames: Frames, *, ping_s: float, stall_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames
        self._ping_s = ping_s
        self._stall_s = stall_s
        self._changed_at = 0.0
        """When the latest frame was handed over, or taken."""
        self._num_waiting = 0
        """Frames that are handed over and not taken yet: one, and a ping."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; the frames are closed whatever happens."""
        async with aclosing(self._frames):
            try:
                await run_until_disconnect(receive, self._send_all(send))
            except ClientLeftError:
                logger.debug("client left")
            except ClientStalledError:
                logger.warning("client took nothing for %.0f s and was given up", self._stall_s)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        patience = asyncio.timeout(None)
        try:
            async with patience:
                watch = asyncio.create_task(self._watch(send, patience))
                try:
                    await self._send_frames(send)
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except TimeoutError as error:
            raise ClientStalledError from error

    async def _send_frames(self, send: Send) -> None:
        await self._send(send, self._first)
        try:
            async for data in self._frames:
                await self._send(send, data)
        except SouschefError as error:
            logger.warning("answer failed after its start: %s", type(error).__name__)
            await self._send(send, frame(error_body(error)))
        except Exception as error:
            logger.exception("answer failed after its start")
            await self._send(send, frame(error_body(error)))
        await self._send(send, b"", more=False)

    async def _watch(self, send: Send, patience: asyncio.Timeout) -> None:
        """Beside the frames: a ping in each silence, and an end to the patience with a client that takes nothing.

        One task an answer: a task and two timers for each frame took 0.1 ms of a token from the model's cores.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(min(self._ping_s, self._stall_s) / LOOKS)
                passed_s = loop.time() - self._changed_at
                if self._num_waiting:
                    if passed_s >= self._stall_s:
                        raise TimeoutError
                elif passed_s >= self._ping_s:
                    async with asyncio.timeout(self._stall_s):
                        await self._send(send, PING)
        except TimeoutError:
            patience.reschedule(loop.time())

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        now = asyncio.get_running_loop().time
        self._changed_at = now()
        self._num_waiting += 1
        try:
            await send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._changed_at = now()
            self._num_waiting -= 1
