"""The demo page at `/` and what it alone needs: a race, a single run, and one stream of the device's state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

from fastapi import APIRouter, Request, Response

from edge_agent.agent import Agent
from edge_agent.demo_schema import DemoRequest
from edge_agent.demo_state import demo_facts, demo_state
from edge_agent.event_stream import DONE, EventStream, Frames
from edge_agent.openai_api import CLIENT_CLOSED_REQUEST, agent_of
from edge_agent.race import Events, race, run
from shared.errors import NotFoundError
from shared.http import ClientLeftError, run_until_disconnect
from shared.sse import frame

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STATE_INTERVAL_S = 0.5
"""The state stream sends at most this often, and only what has changed."""

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The demo page."""
    return _file("index.html")


@router.get("/web/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """A part of the page."""
    return _file(name)


@router.get("/demo/facts", include_in_schema=False)
async def facts(request: Request) -> dict[str, Any]:
    """What doesn't change while the agent runs, and the cost curve as measured so far."""
    return demo_facts(agent_of(request))


@router.get("/demo/state", include_in_schema=False)
async def state(request: Request) -> Response:
    """The device's and the policy's state, as a stream for as long as the page looks."""
    agent = agent_of(request)
    return await _stream(request, agent, _states(agent))


@router.post("/demo/race", include_in_schema=False)
async def start_race(body: DemoRequest, request: Request) -> Response:
    """One prompt, direct and speculative."""
    agent = agent_of(request)
    chat = body.chat_request(execution="only_device")
    generation = await asyncio.to_thread(agent.translator.generation, chat, tenant=request.state.tenant)
    return await _stream(request, agent, race(agent, generation))


@router.post("/demo/answer", include_in_schema=False)
async def start_answer(body: DemoRequest, request: Request) -> Response:
    """One prompt, decoded as the policy sees fit."""
    agent = agent_of(request)
    generation = await asyncio.to_thread(agent.translator.generation, body.chat_request(), tenant=request.state.tenant)
    return await _stream(request, agent, run(agent, generation, "auto", []))


async def _stream(request: Request, agent: Agent, events: Events) -> Response:
    frames = _frames(events)
    try:
        first = await run_until_disconnect(request.receive, _first(frames))
    except ClientLeftError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(first, frames, ping_s=agent.settings.ping_s, stall_s=agent.settings.stall_s)


async def _first(frames: Frames) -> bytes:
    try:
        return await anext(frames)
    except BaseException:
        await frames.aclose()
        raise


async def _frames(events: Events) -> Frames:
    try:
        async for event in events:
            yield frame(event)
        yield DONE
    finally:
        await events.aclose()


async def _states(agent: Agent) -> AsyncGenerator[dict[str, Any], None]:
    last: dict[str, Any] = {}
    while True:
        current = demo_state(agent)
        if current != last:
            last = current
            yield {"type": "state"} | current
        await asyncio.sleep(STATE_INTERVAL_S)


def _file(name: str) -> Response:
    media_type = MEDIA_TYPES.get(PurePosixPath(name).suffix)
    # One flat folder, and names without a slash: nothing beside it can be reached.
    path = resources.files("edge_agent").joinpath("web", name)
    if media_type is None or "\\" in name or not path.is_file():
        raise NotFoundError("no such file", code="not_found")
    return Response(path.read_bytes(), media_type=media_type, headers=PAGE_HEADERS)
