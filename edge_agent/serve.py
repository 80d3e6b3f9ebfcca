"""From settings to a server that listens: models first, then the address, then requests until a stop."""

from __future__ import annotations

import asyncio
import logging

import typer

from edge_agent.agent import EngineLoader
from edge_agent.app import create_app
from edge_agent.config import EdgeSettings
from edge_agent.device import Device
from edge_agent.engine import Engine
from edge_agent.loading import load_engine
from edge_agent.policy_controller import Senses
from shared.models.cache import ModelCache
from shared.models.progress import RichProgress
from shared.models.pull import pull
from shared.server import Server, bind


def serve_until_stopped(settings: EdgeSettings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the address can't be had.
        ModelError: a model can't be had.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    listener = bind(settings.host, settings.port)
    try:
        fetch_models(settings)
        app = create_app(settings, engine_loader(settings))
        server = Server(app, lambda: app.state.agent.drain(), lambda port: typer.echo(welcome(settings, port)))
        asyncio.run(server.serve([listener]))
    finally:
        listener.close()


def fetch_models(settings: EdgeSettings) -> None:
    """Fetch and build what is missing, in the calling thread, where Ctrl-C reaches it.

    Raises:
        ModelError: a model can't be had.
    """
    cache = ModelCache(settings.cache_dir)
    with RichProgress() as progress:
        pull(settings.target, cache, role="target", progress=progress)
        if settings.has_draft:
            pull(settings.draft, cache, role="draft", progress=progress)


def engine_loader(settings: EdgeSettings) -> EngineLoader:
    """Loads the engine with bars on the terminal for what takes long."""

    async def load(device: Device, senses: Senses) -> Engine:
        with RichProgress() as progress:
            return await load_engine(settings, device, senses, progress)

    return load


def welcome(settings: EdgeSettings, port: int) -> str:
    """Where it listens, and a line to try it with."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # nosec B104 (it is compared with)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_keys else ""
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    return (
        f"Souschef listens on {url} (Ctrl-C stops it). Try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
    )
