"""Proxies that misbehave on purpose: some for any TCP stream, one that knows where an HTTP exchange begins and ends."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Fault(StrEnum):
    """What happens to one HTTP exchange."""

    NONE = "none"
    LOSE_REQUEST = "lose_request"
    LOSE_REPLY = "lose_reply"
    DUPLICATE = "duplicate"
    REPEAT_LATE = "repeat_late"
    OLD_REPLY = "old_reply"
    CUT_REPLY = "cut_reply"
    DELAY = "delay"


@asynccontextmanager
async def _listening(handle: Callable[..., Awaitable[None]]) -> AsyncIterator[int]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await handle(reader, writer)
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        # What was accepted a moment ago is still on its way to `serve`; a loop that ended now would leave it open.
        for _ in range(5):
            await asyncio.sleep(0)
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TcpProxy:
    """Passes bytes on, `delay_s` late; `cut` breaks every connection."""

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.bytes_passed = 0
        self.num_connections = 0
        self._upstream_port = port
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Listens on the port it yields."""
        async with _listening(self._handle) as port:
            yield port

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        self._writers |= {writer, up_writer}
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer)),
            asyncio.create_task(self._answer(up_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Before anything is waited for: who cancels this task may do so a second time.
            up_writer.transport.abort()
            self._writers -= {writer, up_writer}
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.bytes_passed += len(data)
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._pump(reader, writer)


class TokenGate(TcpProxy):
    """Lets so many of the cloud's messages with tokens through, then holds all that it says back."""

    _TOKENS = re.compile(rb'"position":|"next_token":')

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.reached = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._left = 0

    def close_after(self, num_messages: int) -> None:
        """`reached` is set when the next one is held."""
        self._left = num_messages
        self._open.clear()
        self.reached.clear()

    def open(self) -> None:
        self._open.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            found = [match.start() for match in self._TOKENS.finditer(data)]
            passed = len(data)
            if not self._open.is_set() and len(found) > self._left:
                passed, self._left = found[self._left], 0
            else:
                self._left -= len(found)
            writer.write(data[:passed])
            await writer.drain()
            if passed < len(data):
                self.reached.set()
                await self._open.wait()
                writer.write(data[passed:])
                await writer.drain()


class LossyLink(TcpProxy):
    """A slow link that loses segments, as a program behind TCP sees it: what was lost comes a retransmission timeout
    later (twice that if it is lost again), and all that was sent after it waits.

    An emulation: no packet is dropped, and neither connecting nor the congestion window suffers.
    """

    _SEGMENT_BYTES = 1448
    _TIMEOUT_S = (0.2, 0.4)

    def __init__(self, port: int, delay_s: float, loss: float, seed: int = 0) -> None:
        """delay_s: one way. loss: share of the segments, each way."""
        super().__init__(port, delay_s)
        self.num_lost = 0
        self._loss = loss
        self._random = random.Random(seed)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        sent: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = asyncio.create_task(self._deliver(sent, writer))
        try:
            while data := await reader.read(65536):
                for start in range(0, len(data), self._SEGMENT_BYTES):
                    due = loop.time() + self.delay_s + self._held_up_s()
                    sent.put_nowait((due, data[start : start + self._SEGMENT_BYTES]))
            sent.put_nowait((loop.time() + self.delay_s, b""))
            await delivering
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    async def _deliver(self, sent: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await sent.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                return
            writer.write(data)
            await writer.drain()

    def _held_up_s(self) -> float:
        held_up_s, timeout_s = 0.0, self._random.uniform(*self._TIMEOUT_S)
        while self._random.random() < self._loss:
            self.num_lost += 1
            held_up_s += timeout_s
            timeout_s *= 2
        return held_up_s


class HttpProxy:
    """Passes HTTP/1.1 exchanges on, each with the fault that `choose(path, number)` says."""

    def __init__(self, port: int, choose: Callable[[str, int], Fault], delay_s: float = 0.05) -> None:
        self._upstream_port = port
        self._choose = choose
        self._delay_s = delay_s
        self._num_exchanges = 0
        self._old_reply: bytes | None = None
        self._late: list[bytes] = []
        self.faults: list[Fault] = []
        self.late_statuses: list[int] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Listens on the port it yields."""
        async with _listening(self._handle) as port:
            yield port

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await _message(reader)
            path = request.split(b" ", 2)[1].decode()
            fault = self._choose(path, self._num_exchanges)
            self._num_exchanges += 1
            self.faults.append(fault)
            if fault is Fault.LOSE_REQUEST:
                return
            if fault is Fault.DELAY:
                await asyncio.sleep(self._delay_s)
            if path == "/v1/continue":
                await self._stream(request, writer, cut_after=200 if fault is Fault.CUT_REPLY else None)
                continue
            reply = await self._exchange(request)
            if fault is Fault.DUPLICATE:
                assert await self._exchange(request) == reply, "a repeated request was answered differently"
            await self._send_late()
            if fault is Fault.REPEAT_LATE:
                self._late.append(request)
            if fault is Fault.LOSE_REPLY:
                return
            if fault is Fault.CUT_REPLY:
                writer.write(reply[: len(reply) // 2])
                await writer.drain()
                return
            shown = self._old_reply if fault is Fault.OLD_REPLY and self._old_reply else reply
            if path == "/v1/verify":
                self._old_reply = reply
            writer.write(shown)
            await writer.drain()

    async def _send_late(self) -> None:
        """Requests that come a second time, after later ones."""
        late, self._late = self._late, []
        for request in late:
            self.late_statuses.append(int((await self._exchange(request)).split(b" ", 2)[1]))

    async def _exchange(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            writer.write(request)
            return await _message(reader)
        finally:
            writer.transport.abort()

    async def _stream(self, request: bytes, writer: asyncio.StreamWriter, cut_after: int | None) -> None:
        reader, upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            upstream.write(request)
            passed = 0
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = await reader.read(4096)
                if not data:
                    return
                writer.write(data if cut_after is None else data[: max(0, cut_after - passed)])
                await writer.drain()
                passed += len(data)
                tail = (tail + data)[-8:]
                if cut_after is not None and passed >= cut_after:
                    raise ConnectionResetError
        finally:
            upstream.transport.abort()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)
