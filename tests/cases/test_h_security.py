"""Section H: security."""

from __future__ import annotations

import asyncio
import http.server
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from pydantic import SecretStr

from cloud_service.config import load_settings as load_cloud_settings
from edge_agent.auth import Keys
from edge_agent.cloud_client import CloudClient
from edge_agent.config import load_settings
from edge_agent.decision import Mode
from edge_agent.request import GenerationRequest
from shared.errors import CloudError, ConfigError
from shared.sampling import SamplingParams
from tests.cloud_edge import PROMPT, PlannedController, always, rounds_of
from tests.cloud_toy import FINGERPRINT, VOCAB, running_cloud
from tests.redis_server import RedisServer
from tests.servers import CHAT, RunningServer, exchange, run_server
from tests.toy_engine import Script, script_engine, toy_settings

KEY, ADMIN, CANARY = "first-key-CANARY-8124", "admin-key-CANARY-8124", "CANARY-8124"
MODEL_OF_EVIL = "http://evil.example/v1"


def keyed(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    settings = toy_settings(api_keys=(KEY,), admin_key=ADMIN)
    with run_server(settings, lambda: script_engine(Script())) as running:
        yield running


def status_line(port: int, method: str, path: str, *lines: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n".encode()
    return exchange(port, head + b"".join(line + b"\r\n" for line in lines) + b"\r\n").split(b"\r\n")[0]


BAD_KEYS = [b"", b"Bearer", b"Bearer ", b"Bearer wrong", "Bearer é".encode(), "Bearer é".encode("latin-1"), b"\xff"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_H1_keys_are_compared_as_bytes(server: RunningServer, key: bytes) -> None:
    """Comparing text in constant time raises on letters beyond ASCII: 500 instead of 401 (home-assistant#14118).

    Here: digests of bytes are compared, all of them, and the key itself is not kept.
    """
    assert b" 401 " in status_line(server.port, "GET", "/v1/models", b"Authorization: " + key)
    with running_cloud(api_keys=(KEY,)) as cloud:
        port = int(cloud.url.rsplit(":", 1)[1])
        assert b" 401 " in status_line(port, "POST", "/v1/handshake", b"Authorization: " + key)


def test_H1_keys_are_kept_as_digests(server: RunningServer) -> None:
    keys = Keys(toy_settings(api_keys=(KEY,), admin_key=ADMIN))
    assert CANARY not in repr(vars(keys)) + repr(vars(keys._callers)) + repr(server.agent.settings)


OPEN = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/"), ("GET", "/web/{name}")}


def routes(app: Any) -> set[tuple[str, str]]:
    """(method, path) of everything that an application serves, what is not documented too."""
    found: set[tuple[str, str]] = set()
    pending = list(app.routes)
    while pending:
        route = pending.pop()
        original = getattr(route, "original_router", None)
        if original is not None:
            pending += original.routes
        elif getattr(route, "methods", None):
            found |= {(method, route.path) for method in route.methods}
        else:
            pending += getattr(route, "routes", None) or []
    return found


def test_H1_every_route_needs_a_key_but_those_listed(server: RunningServer) -> None:
    """Deny by default: a route that is added tomorrow needs a key unless this list changes."""
    edge = routes(server.app)
    assert {("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("PUT", "/v1/policy")} <= edge
    assert {("POST", "/demo/race"), ("GET", "/openapi.json")} <= edge
    for method, path in sorted(edge - OPEN):
        line = status_line(server.port, method, path.replace("{name}", "x").replace("{model:path}", "x"))
        assert b" 401 " in line, (method, path, line)
    with running_cloud(api_keys=(KEY,)) as cloud:
        served = routes(cloud.app)
        assert {("POST", "/v1/verify"), ("DELETE", "/v1/sessions/{session_id}"), ("GET", "/metrics")} <= served
        port = int(cloud.url.rsplit(":", 1)[1])
        for method, path in sorted(served - {("GET", "/health"), ("HEAD", "/health")}):
            line = status_line(port, method, path.replace("{session_id}", "session-0001"))
            assert b" 401 " in line, (method, path, line)


def test_H3_other_origins_and_other_hosts(server: RunningServer) -> None:
    """Any page may call a service on loopback: by CORS that allows all, or by a name that is bound anew (klangk#388).

    Here: no origin is allowed unless it is listed, never with credentials, and a Host that isn't ours is a 400.
    """
    url = f"{server.url}/v1/chat/completions"
    foreign = httpx.post(url, json=CHAT, headers=keyed() | {"Origin": "https://evil.example"})
    assert foreign.status_code == 403
    preflight = httpx.options(url, headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
    for response in (foreign, preflight):
        assert response.status_code >= 400
        assert not [name for name in response.headers if name.startswith("access-control-")]
    rebound = httpx.post(url, json=CHAT, headers=keyed() | {"Host": "evil"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (400, "unknown_host")
    with running_cloud() as cloud:
        for headers, status in (({"Host": "evil"}, 400), ({"Origin": "https://evil.example"}, 403), ({}, 200)):
            assert httpx.get(f"{cloud.url}/health", headers=headers).status_code == status
    with pytest.raises(ConfigError, match="origins look like"):
        load_settings({"cors_origins": ("*",)})


BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2},
    {"messages": [{"role": "user", "content": CANARY * 99}]},
    {"messages": [{"role": CANARY, "content": CANARY}]},
    {"messages": CANARY},
    {**CHAT, "temperature": CANARY},
    {**CHAT, "stop": {"x": CANARY}},
    {**CHAT, "logit_bias": {CANARY: 1}},
    {**CHAT, "souschef": {"speculation": CANARY}},
    {**CHAT, "model": CANARY},
    {**CHAT, "n": CANARY},
    {**CHAT, "user": CANARY, "stream": True},
    {**CHAT, "tools": [{"type": "function", "function": {"name": f"{CANARY} x"}}]},
    {**CHAT, "tools": [{"type": CANARY}]},
    {**CHAT, "tool_choice": {"type": "function", "function": {"name": CANARY}}},
    {**CHAT, "response_format": {"type": CANARY}},
    {**CHAT, "messages": [{"role": "tool", "content": CANARY, "tool_call_id": CANARY}]},
]


def our_logs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All but what the test's own client says."""
    return [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]


def test_H5_canaries_show_nowhere(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts and keys stand in logs, and errors repeat what was sent (litellm#20240, vLLM#1240).

    Here: logs hold ids and counts, errors say what is allowed and not what came, metrics have closed labels, and what
    Redis holds is sealed and under hashed names.
    """
    caplog.set_level(logging.DEBUG)
    url = f"{server.url}/v1/chat/completions"
    texts = [httpx.post(url, json=body, headers=keyed()).text for body in BODIES]
    texts += [
        httpx.post(url, content=CANARY, headers=keyed()).text,
        httpx.post(url, json=CHAT, headers=keyed(CANARY)).text,
    ]
    texts += [httpx.get(f"{server.url}/{CANARY}", headers=keyed()).text]
    texts += [httpx.get(f"{server.url}/metrics", headers=keyed()).text]
    assert not [text for text in texts + our_logs(caplog) if CANARY in text]


def test_H5_redis_holds_nothing_in_the_clear(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "store-secret-CANARY-8124"
    prompt = (*PROMPT, 4, 4, 4, 7, 7, 7)
    request = GenerationRequest(prompt, 30, SamplingParams(seed=1))

    async def run_rounds(url: str) -> None:
        client = CloudClient(url, FINGERPRINT, VOCAB, api_key=SecretStr(KEY))
        try:
            await rounds_of(client, request, PlannedController(always(Mode.CLOUD_VERIFY)))
        finally:
            await client.close()

    with RedisServer(tmp_path) as store:
        with running_cloud(api_keys=(KEY,), redis_url=store.url, store_key=secret) as cloud:
            monitor_texts: list[str] = []
            asyncio.run(run_rounds(cloud.url))
            monitor_texts.append(httpx.get(f"{cloud.url}/metrics", headers=keyed()).text)
        with store.client() as client:
            keys = client.keys("*")
            assert keys
            content = b" ".join([*keys, *(_value(client, key) for key in keys)])
            assert all(client.ttl(key) > 0 for key in keys)
    assert CANARY.encode() not in content
    assert json.dumps(list(prompt), separators=(",", ":"))[1:-1].encode() not in content
    assert not [text for text in monitor_texts + our_logs(caplog) if CANARY in text]


def _value(client: redis.Redis, key: bytes) -> bytes:
    if client.type(key) == b"hash":
        return b" ".join(part for pair in client.hgetall(key).items() for part in pair)
    return bytes(client.get(key) or b"")


@contextmanager
def trap() -> Iterator[tuple[str, list[str]]]:
    """A server that notes who calls it, and redirects."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            seen.append(f"{self.command} {self.path} {self.headers.get('Authorization')}")
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/stolen")  # type: ignore[attr-defined]
            self.end_headers()

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}", seen
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def test_H6_no_address_comes_from_a_request(server: RunningServer) -> None:
    """A field or header names where to send the request, key and all (litellm#24952, #37053).

    Here: the cloud's address comes from the settings alone, redirects are not followed, TLS is verified, and a schema's
    references are never fetched.
    """
    with trap() as (url, seen):
        chat_url = f"{server.url}/v1/chat/completions"
        for field in ("base_url", "api_base", "cloud_url", "endpoint"):
            response = httpx.post(chat_url, json={**CHAT, field: url}, headers=keyed())
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        headers = keyed() | {"X-Base-Url": url, "X-Forwarded-Host": url, "Forwarded": f"host={url}"}
        assert httpx.post(chat_url, json={**CHAT, "max_tokens": 1}, headers=headers).status_code == 200
        schema = {"name": "x", "schema": {"$ref": f"{url}/schema.json"}}
        body = {**CHAT, "response_format": {"type": "json_schema", "json_schema": schema}}
        assert httpx.post(chat_url, json=body, headers=keyed()).status_code == 400
        image = [{"type": "image_url", "image_url": {"url": f"{url}/x.png"}}]
        body = {"messages": [{"role": "user", "content": image}]}
        assert httpx.post(chat_url, json=body, headers=keyed()).status_code == 400
        assert seen == []


def test_H6_redirects_are_not_followed_and_tls_is_verified() -> None:
    async def greet(url: str) -> None:
        client = CloudClient(url, FINGERPRINT, VOCAB, api_key=SecretStr(KEY))
        try:
            assert client._http.follow_redirects is False
            assert client._http.trust_env is False
            with pytest.raises(CloudError, match="redirects"):
                await client.handshake()
        finally:
            await client.close()

    with trap() as (url, seen):
        asyncio.run(greet(url))
        assert [line.split()[1] for line in seen] == ["/v1/handshake"]
    with pytest.raises(ConfigError, match="cloud_url"):
        CloudClient("ftp://evil.example", FINGERPRINT, VOCAB)


def test_H6_beyond_loopback_a_key_is_demanded() -> None:
    for load, flags in ((load_cloud_settings, {}), (load_cloud_settings, {"api_keys": ("",)})):
        with pytest.raises(ConfigError, match=r"(?i)key"):
            load({"host": "0.0.0.0", **flags})
