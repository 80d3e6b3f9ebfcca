"""uvicorn with a stop that keeps its promises: not ready at once, running answers finish within the grace time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from shared.errors import ConfigError

LAST_BYTES_S = 5
"""After the grace time: how long the error frames of unfinished streams may take to leave."""


class Server(uvicorn.Server):
    """Serves one application until SIGINT or SIGTERM; a second SIGINT ends it at once."""

    def __init__(
        self,
        app: FastAPI,
        drain: Callable[[], Awaitable[None]],
        on_ready: Callable[[int], None] = lambda port: None,
        **options: Any,
    ) -> None:
        """drain: refuses what is new and returns once what runs has ended or the grace time is over. on_ready is called
        once with the port, when requests can be answered. options: uvicorn's.
        """
        config = uvicorn.Config(
            app,
            http="h11",  # Not whatever else happens to be installed.
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=LAST_BYTES_S,
            **options,
        )
        super().__init__(config)
        self._app = app
        self._drain = drain
        self._on_ready = on_ready

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Load, listen, serve, stop. The lifespan is run here and not by uvicorn, so that a failed start raises.

        Raises:
            SouschefError: the application can't start.
        """
        async with self._app.router.lifespan_context(self._app):
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell."""
        await super().startup(sockets)
        if self.started:
            self._on_ready(self.port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Keep listening while running answers finish, so that `/ready` can say no; then close."""
        drain = asyncio.ensure_future(self._drain())
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        drain.cancel()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a stop that was asked for is a clean end of the process: the signal is not raised again."""
        loop = asyncio.get_running_loop()
        captured = []
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # Not in the main thread.
                loop.add_signal_handler(number, self.handle_exit, number, None)
                captured.append(number)
        try:
            yield
        finally:
            for number in captured:
                loop.remove_signal_handler(number)


def bind(host: str, port: int) -> socket.socket:
    """The socket to listen on, taken before the model is loaded: a busy port is told at once.

    Raises:
        ConfigError: it can't be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host} port {port}: {error.strerror}; choose another --port") from error
    return listener
