"""The way to the cloud verifier: connections, timeouts, retries, the circuit breaker, and what is measured on it."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, SecretStr, ValidationError

from edge_agent.circuit_breaker import CircuitBreaker, CircuitState
from edge_agent.link_state import LinkState
from shared.errors import (
    CloudError,
    CloudProtocolError,
    CloudRejectedError,
    CloudSessionLostError,
    CloudUnavailableError,
    ConfigError,
    TokenizerMismatchError,
)
from shared.protocol import (
    SESSION_HEADER,
    ContinueRequest,
    DeviceReport,
    FinishFrame,
    HandshakeReply,
    HandshakeRequest,
    TokenFrame,
    VerifyReply,
    VerifyRequest,
)
from shared.sse import SseOverflowError, SseParser

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=BaseModel)
Result = TypeVar("Result")

SMOOTHING = 0.2
"""Weight of a new round-trip time in the running mean."""
MAX_REPLY_BYTES = 1 << 20


@dataclass(frozen=True)
class CloudTimeouts:
    """Seconds. read_s: without a byte of a reply; per_token_s is added for every token that has to be taken in anew."""

    connect_s: float = 2.0
    write_s: float = 5.0
    read_s: float = 10.0
    per_token_s: float = 0.1
    pool_s: float = 2.0
    forget_s: float = 2.0


@dataclass
class Traffic:
    """Bytes of HTTP that went each way: heads and bodies, without TLS and TCP."""

    sent: int = 0
    received: int = 0


class CloudClient:
    """One a process; every request shares its connections. `run` keeps it informed; `close` ends it."""

    def __init__(
        self,
        url: str,
        tokenizer_fingerprint: str,
        vocab_size: int,
        *,
        api_key: SecretStr | None = None,
        ca_file: Path | None = None,
        timeouts: CloudTimeouts | None = None,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises `ConfigError` when the URL or the CA file can't be used."""
        self.traffic = Traffic()
        self.on_rtt: Callable[[float], None] = lambda rtt_s: None
        self.timeouts = timeouts or CloudTimeouts()
        self.service: HandshakeReply | None = None
        self._hello = HandshakeRequest(tokenizer_fingerprint=tokenizer_fingerprint, vocab_size=vocab_size)
        self._breaker = breaker or CircuitBreaker()
        self._clock = clock
        self._rtt_s: float | None = None
        self._queue_s = 0.0
        self._gamma_hint: int | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._http = _http_client(url, api_key, ca_file, self.timeouts)

    @property
    def circuit_state(self) -> CircuitState:
        """The breaker's state."""
        return self._breaker.state

    @property
    def link_state(self) -> LinkState:
        """What is known of the way and the service now."""
        service = self.service
        return LinkState(
            configured=True,
            healthy=service is not None and self._breaker.state is CircuitState.CLOSED,
            rtt_s=self._rtt_s,
            verify_cost_s=tuple(cost / 1e3 for cost in service.verify_cost_ms) if service else (),
            queue_s=self._queue_s,
            max_gamma=service.max_gamma if service else 0,
            gamma_hint=self._gamma_hint,
        )

    async def run(self, healthy_every_s: float = 30.0, broken_every_s: float = 2.0) -> None:
        """Greet the service now and then, until cancelled: the probe that finds it again after a failure."""
        last_problem = ""
        while True:
            problem = ""
            try:
                await self.handshake()
            except (CloudError, TokenizerMismatchError) as error:
                problem = str(error)
            if problem != last_problem:
                logger.warning("cloud verifier: %s", problem) if problem else logger.info("cloud verifier: ready")
            last_problem = problem
            await asyncio.sleep(broken_every_s if problem else healthy_every_s)

    async def handshake(self) -> HandshakeReply:
        """Learn what the service is, and that it counts in our tokens.

        Raises:
            TokenizerMismatchError: it doesn't; it stays unused.
            CloudError: it did not answer as it should.
        """
        started = self._clock()
        try:
            with self._breaker.call():
                status, content = await self._send("POST", "/v1/handshake", self._hello.encode(), self.timeouts.read_s)
                if status == 409:
                    raise TokenizerMismatchError(f"{_error_message(content)}; requests stay on this device")
                _raise_for_status(status, content)
                # Until now the link counted as it was: a greeting in mid-answer must not look like a failure.
                self.service = _parse(content, HandshakeReply)
        except (CloudError, TokenizerMismatchError):
            self.service = None
            raise
        if self._rtt_s is None:
            self._measured(self._clock() - started)
        return self.service

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """Have a draft judged. A repetition is safe (the service answers the same), so a lost reply is asked for again.

        Raises:
            CloudSessionLostError: the session has to be opened anew.
            CloudRejectedError, CloudUnavailableError, CloudProtocolError: as their names say.
        """
        taken_in = len(request.opening.tokens) if request.opening else len(request.new_tokens)
        read_s = self.timeouts.read_s + taken_in * self.timeouts.per_token_s
        started = self._clock()
        reply = await self._verify(request, read_s)
        if reply.round != request.round:
            raise CloudProtocolError(f"a reply for round {reply.round} instead of {request.round}")
        self._measured(self._clock() - started - reply.timing_ms / 1e3)
        self._queue_s = reply.load.queue_ms / 1e3
        self._gamma_hint = reply.load.gamma_hint
        return reply

    @asynccontextmanager
    async def continuation(self, request: ContinueRequest) -> AsyncIterator[AsyncGenerator[TokenFrame, None]]:
        """The tokens that the service makes, for as long as the block lasts. The stream ends with its `finish`.

        Raises:
            CloudError: at the start, or while iterating.
        """
        read_s = self.timeouts.read_s + len(request.opening.tokens) * self.timeouts.per_token_s
        async with aclosing(self._frames(request, read_s)) as frames:
            yield frames

    async def report(self, report: DeviceReport) -> None:
        """Say how this device fares. Apart from the breaker: whether this gets through decides nothing about requests.

        Raises:
            CloudError: it was not taken.
        """
        status, content = await self._send("POST", "/v1/fleet", report.encode(), self.timeouts.read_s)
        _raise_for_status(status, content)

    def forget(self, session_id: str) -> None:
        """End a session without waiting for it; if that fails, the service's own expiry does it."""
        task = asyncio.get_running_loop().create_task(self._forget(session_id))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Let the last farewells leave, then close the connections."""
        if self._background:
            await asyncio.wait(self._background, timeout=self.timeouts.forget_s)
        await self._http.aclose()

    async def _forget(self, session_id: str) -> None:
        async def attempt() -> None:
            with self._breaker.call():
                await self._send("DELETE", f"/v1/sessions/{session_id}", b"", self.timeouts.forget_s, session_id)

        try:
            await retried(attempt)
        except CloudError:
            logger.debug("a session could not be ended")

    async def _verify(self, request: VerifyRequest, read_s: float) -> VerifyReply:
        body = request.encode()

        async def attempt() -> VerifyReply:
            with self._breaker.call():
                status, content = await self._send("POST", "/v1/verify", body, read_s, request.session_id)
                _raise_for_status(status, content)
                return _parse(content, VerifyReply)

        return await retried(attempt)

    async def _send(
        self, method: str, path: str, body: bytes, read_s: float, session_id: str | None = None
    ) -> tuple[int, bytes]:
        """One exchange, (status, content). A service that can't be reached is a `CloudUnavailableError`."""
        request = self._request(method, path, body, read_s, session_id)
        with _translated():
            # httpx's read timeout starts anew with each byte; the whole reply gets no more time than that.
            async with asyncio.timeout(read_s + self.timeouts.connect_s):
                response = await self._http.send(request, stream=True)
                async with aclosing(response):
                    content = await _read_limited(response)
        self._count(request, response, len(content))
        return response.status_code, content

    async def _frames(self, request: ContinueRequest, read_s: float) -> AsyncGenerator[TokenFrame, None]:
        message = self._request("POST", "/v1/continue", request.encode(), read_s, request.session_id)
        parser = SseParser()
        with self._breaker.call(), _translated():
            response = await self._http.send(message, stream=True)
        async with aclosing(response):
            self._count(message, response, 0)
            with self._breaker.call(), _translated():
                if response.status_code != 200:
                    _raise_for_status(response.status_code, await _read_limited(response))
                async for chunk in response.aiter_raw():
                    self.traffic.received += len(chunk)
                    for data in parser.feed(chunk):
                        frame = _parse_frame(data)
                        if isinstance(frame, FinishFrame):
                            self._gamma_hint = frame.load.gamma_hint
                            return
                        yield frame
                raise httpx.RemoteProtocolError("the stream ended without a finish")

    def _request(self, method: str, path: str, body: bytes, read_s: float, session_id: str | None) -> httpx.Request:
        headers = {} if session_id is None else {SESSION_HEADER: session_id}
        limits = self.timeouts
        timeout = httpx.Timeout(connect=limits.connect_s, read=read_s, write=limits.write_s, pool=limits.pool_s)
        return self._http.build_request(method, path, content=body, headers=headers, timeout=timeout)

    def _measured(self, rtt_s: float) -> None:
        rtt_s = max(rtt_s, 0.0)
        self.on_rtt(rtt_s)
        self._rtt_s = rtt_s if self._rtt_s is None else self._rtt_s + SMOOTHING * (rtt_s - self._rtt_s)

    def _count(self, request: httpx.Request, response: httpx.Response, body: int) -> None:
        line = len(f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n")
        self.traffic.sent += line + _head_bytes(request.headers) + int(request.headers.get("content-length", 0))
        self.traffic.received += len("HTTP/1.1 200 OK\r\n") + _head_bytes(response.headers) + body


def _http_client(
    url: str, api_key: SecretStr | None, ca_file: Path | None, timeouts: CloudTimeouts
) -> httpx.AsyncClient:
    try:
        base_url = httpx.URL(url)
        context = ssl.create_default_context(cafile=ca_file) if base_url.scheme == "https" else False
    except (httpx.InvalidURL, OSError) as error:
        raise ConfigError(f"cloud_url or its CA file can't be used: {error}") from error
    if base_url.scheme not in ("http", "https") or not base_url.host:
        raise ConfigError("cloud_url must look like https://verifier.example:8090")
    client = httpx.AsyncClient(
        base_url=base_url,
        verify=context,
        follow_redirects=False,
        trust_env=False,  # A proxy from the environment would see what the user sends to their own cloud.
        limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=60),
    )
    # Every round pays for every header: none but those that say something.
    for name in ("accept", "accept-encoding", "connection", "user-agent"):
        del client.headers[name]
    if api_key is not None:
        client.headers["Authorization"] = f"Bearer {api_key.get_secret_value()}"
    return client


@contextmanager
def _translated() -> Iterator[None]:
    """Errors of the transport as ours."""
    try:
        yield
    except (httpx.HTTPError, TimeoutError, OSError) as error:
        raise CloudUnavailableError(f"the cloud can't be reached: {type(error).__name__}") from error
    except SseOverflowError as error:
        raise CloudProtocolError(str(error)) from error


async def _read_limited(response: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise CloudProtocolError(f"a reply of over {MAX_REPLY_BYTES} bytes")
    return bytes(content)


async def retried(work: Callable[[], Awaitable[Result]], attempts: int = 2, first_wait_s: float = 0.1) -> Result:
    """Do work that may be repeated; a connection that broke is tried again after a wait that doubles, with jitter."""
    for attempt in range(attempts - 1):
        try:
            return await work()
        except CloudUnavailableError as error:
            if not _is_broken_connection(error):
                raise
        await asyncio.sleep(first_wait_s * 2**attempt * random.uniform(0.5, 1.5))
    return await work()


def _is_broken_connection(error: Exception) -> bool:
    """Worth another try at once: a service that is slow or says that it is busy is not."""
    return isinstance(error.__cause__, httpx.NetworkError | httpx.RemoteProtocolError)


def _raise_for_status(status: int, content: bytes) -> None:
    if status in (200, 204):
        return
    if status == 410:
        raise CloudSessionLostError(_error_message(content))
    if status == 429 or status >= 500:
        raise CloudUnavailableError(f"the cloud answered {status}")
    if 300 <= status < 400:
        raise CloudRejectedError(f"the cloud redirects ({status}): put the final address into cloud_url")
    raise CloudRejectedError(f"the cloud refused: {_error_message(content)}")


class _ErrorDetail(BaseModel):
    message: str = "no reason given"


class _ErrorBody(BaseModel):
    error: _ErrorDetail = _ErrorDetail()


def _error_message(content: bytes) -> str:
    try:
        return _ErrorBody.model_validate_json(content).error.message
    except ValidationError:
        return _ErrorDetail().message


def _parse(content: bytes, reply: type[Reply]) -> Reply:
    try:
        return reply.model_validate_json(content)
    except ValidationError as error:
        raise CloudProtocolError(f"not a {reply.__name__}: {error.error_count()} fields are wrong") from error


def _parse_frame(data: str) -> TokenFrame | FinishFrame:
    content = data.encode()
    if content.startswith(b'{"error"'):
        raise CloudUnavailableError(f"the cloud's stream failed: {_error_message(content)}")
    if content.startswith(b'{"finish"'):
        return _parse(content, FinishFrame)
    return _parse(content, TokenFrame)


def _head_bytes(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers.raw) + len("\r\n")
