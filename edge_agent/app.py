"""The edge agent as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from edge_agent.agent import EngineLoader, open_agent
from edge_agent.auth import KeyCheck
from edge_agent.config import EdgeSettings
from edge_agent.http_errors import install_error_handlers
from edge_agent.openai_api import agent_of
from edge_agent.openai_api import router as openai_router
from edge_agent.policy_api import router as policy_router
from edge_agent.web_api import router as web_router
from shared.http import BodyLimit, HostCheck


def create_app(settings: EdgeSettings, load_engine: EngineLoader) -> FastAPI:
    """An application that shares nothing with another one. Its lifespan loads the engine and closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_agent(settings, load_engine) as app.state.agent:
            yield

    app = FastAPI(title="Souschef edge agent", lifespan=lifespan, redirect_slashes=False)
    install_error_handlers(app)
    app.include_router(openai_router)
    app.include_router(policy_router)
    app.include_router(web_router)
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/ready", ready, methods=["GET"], responses={503: {"description": "Not ready."}})
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=PlainTextResponse)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(KeyCheck, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(HostCheck, own_host=settings.host, hosts=settings.allowed_hosts, origins=settings.cors_origins)
    return app


async def health() -> dict[str, str]:
    """The process is alive."""
    return {"status": "ok"}


async def ready(request: Request) -> Response:
    """The models are loaded, the inference thread is alive, and the service is not stopping."""
    agent = agent_of(request)
    is_ready = await agent.ready()
    body: dict[str, Any] = {
        "ready": is_ready,
        "draining": agent.scheduler.draining,
        "running": agent.scheduler.num_running,
        "waiting": agent.scheduler.num_waiting,
    }
    return JSONResponse(body, status_code=200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    """Counts for Prometheus."""
    return Response(agent_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
