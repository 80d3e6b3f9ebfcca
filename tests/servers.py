"""Real servers on free ports, and clients that misbehave on purpose."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from edge_agent.agent import Agent, EngineLoader
from edge_agent.app import create_app
from edge_agent.config import EdgeSettings
from edge_agent.device import Device
from edge_agent.engine import Engine
from edge_agent.policy_controller import Senses
from shared.server import Server

START_LIMIT_S = 60.0
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@dataclass
class RunningServer:
    """An edge agent that listens."""

    server: Server
    app: FastAPI
    agent: Agent
    thread: threading.Thread

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Begin a graceful stop, as SIGTERM does, without waiting for its end."""
        self.server.should_exit = True


def run_server(settings: EdgeSettings, make_engine: Callable[[], Engine]) -> AbstractContextManager[RunningServer]:
    """A real edge agent whose engine senses nothing."""

    async def load(device: Device, senses: Senses) -> Engine:
        return make_engine()

    return run_agent(settings, load)


@contextmanager
def run_agent(settings: EdgeSettings, load: EngineLoader) -> Iterator[RunningServer]:
    """A real edge agent in a thread of its own; stopped, however the block ends."""
    app = create_app(settings, load)
    listening = threading.Event()
    server = Server(
        app, lambda: app.state.agent.drain(), lambda port: listening.set(), host=settings.host, port=settings.port
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        if not listening.wait(START_LIMIT_S):
            raise RuntimeError("the server did not start")
        yield RunningServer(server, app, app.state.agent, thread)
    finally:
        server.should_exit = True
        thread.join(START_LIMIT_S)
        assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait for what another thread does; fails past a limit that is only there for a hang."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("waited too long")
        time.sleep(0.01)


def settled(url: str) -> None:
    """Wait until the server has seen what happened on its sockets before: it takes turns."""
    for _ in range(3):
        httpx.get(f"{url}/health", timeout=60).raise_for_status()


def post_bytes(path: str, body: dict[str, Any], **headers: str) -> bytes:
    """A raw HTTP/1.1 request with a JSON body."""
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def exchange(port: int, request: bytes) -> bytes:
    """Send raw bytes, and read all that comes until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=START_LIMIT_S) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def events(body: str) -> list[Any]:
    """The JSON of each event of a stream, and `[DONE]` as it is. Fails on anything that isn't an event or a ping."""
    found: list[Any] = []
    for block in body.split("\n\n"):
        if block in ("", ": ping"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chat(server: RunningServer, **fields: Any) -> httpx.Response:
    content = json.dumps({**CHAT, **fields})
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers, timeout=60)


def complete(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"prompt": "Say: ", "temperature": 0, "max_tokens": 8, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def streamed_text(response: httpx.Response) -> str:
    assert response.status_code == 200
    found = events(response.text)
    assert found[-1] == "[DONE]"
    return "".join(choice["delta"].get("content", "") for event in found[:-1] for choice in event["choices"])
