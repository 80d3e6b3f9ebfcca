"""The HTTP face of the cloud service."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.types import Receive, Scope, Send

from cloud_service.admission import Admission
from cloud_service.batcher import Batcher
from cloud_service.config import CloudSettings
from cloud_service.fleet import RETRY_AFTER_S, UNKNOWN_FLEET, Fleet, FleetPage, page, summarise
from cloud_service.generator import AnswerGenerator
from cloud_service.load import LoadMeter
from cloud_service.metrics import CloudMetrics
from cloud_service.pass_costs import BatchDecoder, PassCosts
from cloud_service.session_store import MemoryStore, SessionStore, StoreUnavailableError
from cloud_service.sessions import LiveSessions
from cloud_service.target import Target
from cloud_service.verifier import RoundVerifier
from shared.errors import ConflictError, OverloadedError, RateLimitedError, SouschefError
from shared.http import (
    BodyLimit,
    ClientLeftError,
    HostCheck,
    KeyCheck,
    KeyRing,
    error_body,
    install_error_handlers,
    run_until_disconnect,
)
from shared.inference_thread import InferenceThread
from shared.kv_slots import SlotPool
from shared.protocol import (
    PROTOCOL,
    ContinueRequest,
    DeviceId,
    DeviceReport,
    FinishFrame,
    HandshakeReply,
    HandshakeRequest,
    Message,
    SessionId,
    TokenFrame,
    VerifyRequest,
)
from shared.sse import frame

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
READY_TIMEOUT_S = 5.0
SWEEP_S = 30.0
RATE_WINDOW_S = 60.0
MAX_PAGE = 1000
NO_DEVICE = "0" * 32
"""Before every device's id."""


@dataclass(frozen=True)
class LoadedModel:
    """What a service is built around. num_slots: caches that fit into its memory."""

    name: str
    tokenizer_fingerprint: str
    decoder: BatchDecoder[Any]
    num_slots: int


class Service:
    """Everything between start and stop."""

    def __init__(
        self,
        settings: CloudSettings,
        model: LoadedModel,
        thread: InferenceThread,
        store: SessionStore,
        fleet: Fleet,
    ) -> None:
        # Streams keep their caches for a whole answer; rounds have some of their own, so that none waits for an answer.
        num_slots = max(2, model.num_slots)
        max_running = min(settings.max_running, num_slots // 2)
        self.settings = settings
        self.store = store
        self.fleet = fleet
        self.thread = thread
        self.local_limits = MemoryStore(settings.session_ttl_s)
        self.sessions = LiveSessions(settings.session_ttl_s, settings.max_sessions)
        self.metrics = CloudMetrics(lambda: len(self.sessions))
        self.meter = LoadMeter(PassCosts([1.0]), settings.max_gamma)
        self.batcher = Batcher(
            model.decoder,
            thread,
            max_running,
            lambda rows: self.meter.costs.num_together(rows),
            self._pass_ran,
        )
        self.target = Target(
            model.name,
            model.tokenizer_fingerprint,
            model.decoder,
            thread,
            self.batcher,
            SlotPool(model.decoder.new_cache, num_slots),
            self.meter,
            self.metrics.busy_seconds.inc,
        )
        self.stream_admission = self._admission(max_running)
        self.round_admission = self._admission(max_running)
        self.verifier = RoundVerifier(
            self.target, self.sessions, store, self.round_admission, self.metrics, secrets.token_hex(8)
        )
        self.generator = AnswerGenerator(self.target, self.stream_admission, self.metrics, self.sessions.num_active)

    @property
    def draining(self) -> bool:
        """Whether the service is stopping."""
        return self.stream_admission.draining

    async def drain(self, grace_s: float) -> None:
        """Admit nobody; return when what runs has ended or the time is over."""
        await asyncio.gather(self.stream_admission.drain(grace_s), self.round_admission.drain(grace_s))

    def _admission(self, max_running: int) -> Admission:
        return Admission(
            max_running,
            self.settings.max_waiting,
            self.meter,
            lambda reason: self.metrics.admission_rejected.labels(reason=reason).inc(),
        )

    async def measure(self) -> None:
        """Learn what passes cost here."""
        self.meter.costs = await self.target.measure()

    def _pass_ran(self, size: int, queue_s: float, busy_s: float) -> None:
        self.metrics.batch_ran(size, queue_s, busy_s)
        self.meter.queued(queue_s * 1e3)

    async def allow(self, tenant: str) -> None:
        """Count a request; raises `RateLimitedError` past the limit. Without the store each replica counts alone."""
        limit = self.settings.requests_per_minute
        try:
            wait_s = await self.store.allow(tenant, limit, RATE_WINDOW_S)
        except StoreUnavailableError:
            self.metrics.store_errors.inc()
            wait_s = await self.local_limits.allow(tenant, limit, RATE_WINDOW_S)
        if wait_s > 0:
            self.metrics.admission_rejected.labels(reason="rate").inc()
            raise RateLimitedError("too many requests", retry_after_s=wait_s)

    async def look_at_fleet(self, tenants: Iterable[str]) -> None:
        """Bring the fleet's metrics up to date."""
        try:
            sightings = [seen for tenant in tenants for seen in await self.fleet.sightings(tenant)]
        except StoreUnavailableError:
            self.metrics.store_errors.inc()
            self.metrics.fleet_is(UNKNOWN_FLEET)
        else:
            self.metrics.fleet_is(summarise(sightings))

    async def sweep(self) -> None:
        """Drop idle sessions now and then, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sessions.expire()


Start = Callable[[CloudSettings], Awaitable[Service]]


def create_app(settings: CloudSettings, start: Start) -> FastAPI:
    """The application; `start` loads the model when the application starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = await start(settings)
        await service.measure()
        app.state.service = service
        tasks = [asyncio.create_task(service.batcher.run()), asyncio.create_task(service.sweep())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.store.close()
            await service.fleet.close()
            service.thread.stop()

    # Every message is JSON: neither side spends a header a round on saying so.
    app = FastAPI(title="Souschef cloud verifier", lifespan=lifespan, openapi_url=None, strict_content_type=False)
    install_error_handlers(app)
    _add_routes(app)
    open_paths = OPEN_PATHS | {"/metrics"} if settings.metrics_open else OPEN_PATHS
    keys = KeyRing(key.get_secret_value() for key in settings.api_keys)
    app.state.tenants = keys.tenants
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(KeyCheck, keys=keys, open_paths=open_paths)
    if not settings.api_keys:
        # Without keys it listens on loopback alone, where any web page could call it by a name of its own.
        app.add_middleware(HostCheck, own_host=settings.host)
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _tenant(request: Request) -> str:
    tenant: str = request.state.tenant
    await _service(request).allow(tenant)
    return tenant


Tenant = Annotated[str, Depends(_tenant)]


def _add_routes(app: FastAPI) -> None:
    app.add_api_route("/v1/handshake", _handshake, methods=["POST"])
    app.add_api_route("/v1/verify", _verify, methods=["POST"])
    app.add_api_route("/v1/continue", _continue, methods=["POST"])
    app.add_api_route("/v1/sessions/{session_id}", _end_session, methods=["DELETE"], status_code=204)
    app.add_api_route("/v1/fleet", _note_device, methods=["POST"], status_code=204)
    app.add_api_route("/v1/fleet", _list_devices, methods=["GET"])
    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/ready", _ready, methods=["GET"])
    app.add_api_route("/metrics", _metrics, methods=["GET"])


async def _handshake(request: Request, tenant: Tenant, message: HandshakeRequest) -> Response:
    _require_protocol(message)
    service = _service(request)
    target = service.target
    if message.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise ConflictError(
            f"the tokenizers differ: {target.name} has {target.tokenizer_fingerprint[:12]} here, "
            f"the edge has {message.tokenizer_fingerprint[:12]}",
            param="tokenizer_fingerprint",
            code="tokenizer_mismatch",
        )
    return _reply(
        HandshakeReply(
            model=target.name,
            context=target.context_length,
            verify_cost_ms=tuple(service.meter.costs.alone_ms),
            max_gamma=service.settings.max_gamma,
        )
    )


async def _verify(request: Request, tenant: Tenant, message: VerifyRequest) -> Response:
    _require_protocol(message)
    try:
        verdict = _service(request).verifier.verify(tenant, message)
        return _reply(await run_until_disconnect(request.receive, verdict))
    except ClientLeftError:
        return Response(status_code=499)  # Nobody reads it.


async def _continue(request: Request, tenant: Tenant, message: ContinueRequest) -> Response:
    _require_protocol(message)
    frames = _service(request).generator.generate(message)
    encoded = _encode(frames)
    try:
        first = await run_until_disconnect(request.receive, anext(encoded))
    except ClientLeftError:
        await encoded.aclose()
        return Response(status_code=499)
    return TokenStream(first, encoded)


async def _end_session(request: Request, tenant: Tenant, session_id: Annotated[SessionId, Path()]) -> None:
    await _service(request).verifier.end(tenant, session_id)


async def _note_device(request: Request, tenant: Tenant, report: DeviceReport) -> None:
    _require_protocol(report)
    try:
        await _service(request).fleet.note(tenant, report)
    except StoreUnavailableError as error:
        raise _unreachable(request) from error


async def _list_devices(
    request: Request,
    tenant: Tenant,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    after: Annotated[DeviceId, Query()] = NO_DEVICE,
) -> FleetPage:
    try:
        return page(await _service(request).fleet.sightings(tenant), after, limit)
    except StoreUnavailableError as error:
        raise _unreachable(request) from error


def _unreachable(request: Request) -> OverloadedError:
    _service(request).metrics.store_errors.inc()
    return OverloadedError("the fleet can't be reached", retry_after_s=RETRY_AFTER_S)


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _ready(request: Request) -> JSONResponse:
    service = _service(request)
    alive = await service.thread.responds(READY_TIMEOUT_S)
    ready = alive and not service.draining
    content = {
        "ready": ready,
        "model": service.target.name,
        "inference_thread": alive,
        "draining": service.draining,
        "store": service.store.name,
    }
    return JSONResponse(content, status_code=200 if ready else 503)


async def _metrics(request: Request) -> Response:
    return Response(generate_latest(await collect_metrics(request.app)), media_type=CONTENT_TYPE_LATEST)


async def collect_metrics(app: FastAPI) -> CollectorRegistry:
    """What this process counts, and the fleet as it is now."""
    service: Service = app.state.service
    await service.look_at_fleet(app.state.tenants)
    return service.metrics.registry


def _require_protocol(message: Message) -> None:
    if message.protocol != PROTOCOL:
        raise ConflictError(
            f"this service speaks protocol {PROTOCOL}, not {message.protocol}",
            param="protocol",
            code="protocol_mismatch",
        )


def _reply(message: Message) -> Response:
    return Response(message.encode())


async def _encode(frames: AsyncGenerator[TokenFrame | FinishFrame, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(frames):
        async for item in frames:
            yield frame(item.model_dump(exclude_none=True))


class TokenStream(Response):
    """Sends frames as they are made; a client that leaves ends the making, a failure becomes the last frame."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; the frames are closed whatever happens."""
        async with aclosing(self._frames):
            try:
                await run_until_disconnect(receive, self._send_all(send))
            except ClientLeftError:
                logger.debug("client left")

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for data in self._frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except SouschefError as error:
            logger.warning("a stream failed after its start: %s", type(error).__name__)
            await send({"type": "http.response.body", "body": frame(error_body(error)), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
