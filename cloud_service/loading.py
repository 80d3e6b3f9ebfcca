"""From settings to a service: fetch, build and load the model, connect the store."""

from __future__ import annotations

from pathlib import Path

from cloud_service.app import LoadedModel, Service
from cloud_service.config import CloudSettings
from cloud_service.fleet import Fleet, MemoryFleet
from cloud_service.redis_fleet import RedisFleet
from cloud_service.redis_scripts import RedisScripts
from cloud_service.redis_store import RedisStore
from cloud_service.sealer import Sealer
from cloud_service.session_store import MemoryStore, SessionStore
from shared.inference_thread import InferenceThread
from shared.models.cache import ModelCache
from shared.models.progress import RichProgress
from shared.models.pull import pull
from shared.onnx_batch import OnnxBatchModel
from shared.tokenizer import Tokenizer

MAX_SLOTS = 64


async def load_service(settings: CloudSettings) -> Service:
    """The service with its model in memory.

    Raises:
        ModelError: the model can't be fetched, built or loaded.
        ConfigError: a setting names something that doesn't exist.
    """
    thread = InferenceThread()
    try:
        model = await thread.run(load_model, settings)
        return Service(settings, model, thread, open_store(settings), open_fleet(settings))
    except BaseException:
        thread.stop()
        raise


def fetch_model(settings: CloudSettings) -> Path:
    """Fetch and build the model if it isn't there; raises `ModelError` if it can't be had."""
    with RichProgress() as progress:
        return pull(settings.model, ModelCache(settings.cache_dir), role="target", progress=progress)


def open_store(settings: CloudSettings) -> SessionStore:
    """Redis where a URL is set, else this process's memory."""
    if settings.redis_url is None:
        return MemoryStore(settings.session_ttl_s, settings.max_sessions)
    return RedisStore(
        settings.redis_url.get_secret_value(),
        _sealer(settings),
        ttl_s=settings.session_ttl_s,
        timeout_s=settings.redis_timeout_s,
    )


def open_fleet(settings: CloudSettings) -> Fleet:
    """Redis where a URL is set, else this process's memory."""
    if settings.redis_url is None:
        return MemoryFleet(settings.fleet_ttl_s, settings.max_devices)
    scripts = RedisScripts(settings.redis_url.get_secret_value(), settings.redis_timeout_s)
    return RedisFleet(scripts, _sealer(settings), settings.fleet_ttl_s, settings.max_devices)


def _sealer(settings: CloudSettings) -> Sealer:
    return Sealer(settings.store_key.get_secret_value() if settings.store_key else None)


def load_model(settings: CloudSettings) -> LoadedModel:
    """The model in memory, with as many caches as fit; raises `ModelError` if it can't be had."""
    path = fetch_model(settings)
    model = OnnxBatchModel(
        path,
        context_length=settings.context_length,
        max_batch=min(settings.max_running, MAX_SLOTS // 2),
        num_threads=settings.threads,
    )
    fitting = settings.kv_memory_bytes // (model.cache_bytes_per_token * model.context_length)
    num_slots = max(2, min(MAX_SLOTS, fitting))
    name = Path(settings.model.rsplit("/", 1)[-1].removeprefix("file:").removeprefix("hf:")).name.removesuffix(".gguf")
    fingerprint = Tokenizer.from_directory(path).fingerprint
    return LoadedModel(name, fingerprint, model, num_slots)
