"""What can be typed after `cloud-service`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from cloud_service.capacity.command import capacity
from cloud_service.config import CloudSettings, Preset, load_settings

app = typer.Typer(
    name="cloud-service",
    help="The cloud verifier: a larger model that checks the drafts of edge agents, or goes on for them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Every option can also stand in the environment (SOUSCHEF_PORT=9000); options win."""


@app.command(epilog="Example: cloud-service serve --preset small --host 0.0.0.0 --api-key SECRET.")
def serve(
    preset: Annotated[Preset | None, typer.Option(help="tiny: SmolLM2 135M. small: Qwen2.5-Coder 1.5B.")] = None,
    model: Annotated[str | None, typer.Option(help="Catalogue name, file:PATH or hf:ORG/REPO/FILE.gguf.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback needs a key.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Bearer key of edge agents; repeat for several.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Most tokens of a session.")] = None,
    threads: Annotated[int | None, typer.Option(help="Inference threads; the usable cores by default.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests that use the model side by side.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where models are kept; the user's cache by default.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Session store that replicas share.")] = None,
    grace_s: Annotated[float | None, typer.Option(help="Seconds that running streams get at a stop.")] = None,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    flags = {name: value for name, value in locals().items() if name != "api_key"}
    _serve(load_settings({**flags, "api_keys": tuple(api_key or ())}))


app.command(epilog="Example: cloud-service capacity --curve 84,106,137,160,177 --acceptance 0.8 --token-p95-ms 250.")(
    capacity
)


def _serve(settings: CloudSettings) -> None:
    from cloud_service.app import create_app
    from cloud_service.loading import fetch_model, load_service
    from shared.server import Server, bind

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    listener = bind(settings.host, settings.port)
    try:
        fetch_model(settings)
        app = create_app(settings, load_service)
        server = Server(
            app,
            lambda: app.state.service.drain(settings.grace_s),
            lambda port: typer.echo(f"Cloud verifier for {settings.model} listens on http://{settings.host}:{port}"),
            date_header=False,
            timeout_keep_alive=75,
        )
        asyncio.run(server.serve([listener]))
    finally:
        listener.close()
