"""Everything a request meets on its way, built once at the start and handed to the routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from edge_agent.cloud_client import CloudClient
from edge_agent.cloud_link import CloudLink, CloudService, NoCloud
from edge_agent.config import EdgeSettings
from edge_agent.device import Device
from edge_agent.engine import Engine
from edge_agent.fleet import Fleet, FleetReporter, NoFleet, kept_device_id
from edge_agent.metrics import EdgeMetrics
from edge_agent.policy_controller import EngineLoad, PolicyEngine, Senses
from edge_agent.scheduler import Scheduler
from edge_agent.thresholds import Thresholds
from edge_agent.translate import Translator
from shared.inference_thread import InferenceThread
from shared.models.cache import ModelCache

EngineLoader = Callable[[Device, Senses], Awaitable[Engine]]

PROBE_WAIT_S = 0.5
"""How long `/ready` waits for the inference thread before it judges by the thread's last sign of life."""
SILENCE_S = 60.0
"""A thread that takes longer for one job is taken for stuck; the slowest prefill chunk takes some seconds."""


class Heartbeat:
    """Whether the inference thread is alive, told without a long wait while it is busy."""

    def __init__(self, thread: InferenceThread, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = thread
        self._clock = clock
        self._probe: asyncio.Task[bool] | None = None
        self._probe_started = 0.0

    async def beats(self) -> bool:
        """True when a job gets through now, or the latest to be sent is still young."""
        if self._probe is None or self._probe.done():
            self._probe_started = self._clock()
            self._probe = asyncio.create_task(self._thread.responds(SILENCE_S))
        await asyncio.wait({self._probe}, timeout=PROBE_WAIT_S)
        return self._probe.result() if self._probe.done() else self._clock() - self._probe_started < SILENCE_S

    async def stop(self) -> None:
        """Leave no probe behind."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe})


@dataclass(frozen=True)
class Agent:
    """The parts of a running edge agent."""

    settings: EdgeSettings
    device: Device
    engine: Engine
    scheduler: Scheduler
    metrics: EdgeMetrics
    translator: Translator
    heartbeat: Heartbeat
    fleet: Fleet
    clock: Callable[[], float] = field(default=time.perf_counter)

    async def drain(self) -> None:
        """Admit nothing more; returns once what runs has ended, or its grace time has."""
        await self.scheduler.drain(self.settings.grace_s)

    async def ready(self) -> bool:
        """Whether a request sent now would be answered."""
        return not self.scheduler.draining and await self.heartbeat.beats()


@asynccontextmanager
async def open_agent(settings: EdgeSettings, load_engine: EngineLoader) -> AsyncIterator[Agent]:
    """An agent with its engine loaded; the engine is closed at the end.

    Raises:
        SouschefError: whatever the loader raises.
    """
    scheduler = Scheduler(settings.max_running, settings.max_waiting)
    device = Device(settings.sensors)
    cloud: CloudLink = NoCloud()
    senses = Senses(
        device=device.sampler.state,
        link=lambda: cloud.state,
        load=lambda: EngineLoad(scheduler.num_running, scheduler.num_waiting),
    )
    engine = await load_engine(device, senses)
    heartbeat = Heartbeat(engine.thread)
    fleet: Fleet = NoFleet()
    tasks = {asyncio.create_task(device.sampler.run())}
    try:
        metrics = EdgeMetrics()
        metrics.watch(scheduler, device.sampler, engine)
        if settings.cloud_url is not None:
            cloud = engine.cloud = service = open_cloud(settings, settings.cloud_url, engine, metrics)
            if settings.fleet:
                fleet = open_fleet(settings, service.client, engine, device)
                tasks.add(asyncio.create_task(fleet.run()))
        metrics.model_info.info(
            {"target": engine.model_name, "draft": settings.draft, "fingerprint": engine.system_fingerprint}
        )
        translator = Translator(engine, settings.acceptance_rule, settings.max_gamma)
        yield Agent(settings, device, engine, scheduler, metrics, translator, heartbeat, fleet)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await heartbeat.stop()
        await engine.close()


def open_cloud(settings: EdgeSettings, url: str, engine: Engine, metrics: EdgeMetrics) -> CloudService:
    """The way to the cloud verifier that the settings name.

    Raises:
        ConfigError: the URL or the CA file can't be used.
    """
    client = CloudClient(
        url,
        engine.tokenizer.fingerprint,
        engine.tokenizer.vocab_size,
        api_key=settings.cloud_api_key,
        ca_file=settings.cloud_ca_file,
    )
    metrics.watch_cloud(client)
    return CloudService(client)


def open_fleet(settings: EdgeSettings, client: CloudClient, engine: Engine, device: Device) -> FleetReporter:
    """The reports that the settings ask for."""
    policy = engine.policy
    return FleetReporter(
        client,
        kept_device_id(ModelCache(settings.cache_dir).root / "device-id"),
        engine.model_name,
        device.sampler.state,
        lambda: policy.thresholds if isinstance(policy, PolicyEngine) else Thresholds(),
        settings.fleet_every_s,
    )
