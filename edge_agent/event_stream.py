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
        await self._send(send, self._first)
        try:
            while (data := await self._next(send)) is not None:
                await self._send(send, data)
        except SouschefError as error:
            logger.warning("answer failed after its start: %s", type(error).__name__)
            await self._send(send, frame(error_body(error)))
        except ClientStalledError:
            raise
        except Exception as error:
            logger.exception("answer failed after its start")
            await self._send(send, frame(error_body(error)))
        await self._send(send, b"", more=False)

    async def _next(self, send: Send) -> bytes | None:
        """The next frame, None at the end; pings while it is being made."""
        made = asyncio.ensure_future(anext(self._frames, None))
        try:
            while not (await asyncio.wait({made}, timeout=self._ping_s))[0]:
                await self._send(send, PING)
            return made.result()
        finally:
            if not made.done():
                made.cancel()
                await asyncio.wait({made})

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError as error:
            raise ClientStalledError from error
