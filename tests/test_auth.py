"""Who may call what, over real sockets: keys, hosts, origins, body sizes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edge_agent.auth import Access, access_of
from tests.servers import RunningServer, exchange, run_server
from tests.toy_engine import Script, script_engine, toy_settings

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def keyed(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    settings = toy_settings(
        api_keys=("first-key", "clé-𝄞"),
        admin_key="admin-key",
        cors_origins=("https://app.example",),
        allowed_hosts=("edge.example",),
        max_body_bytes=4096,
    )
    with run_server(settings, lambda: script_engine(Script())) as running:
        yield running


@pytest.mark.parametrize("key", ["first-key", "clé-𝄞", "admin-key"])
def test_good_keys_pass(server: RunningServer, key: str) -> None:
    headers = {b"Authorization": b"Bearer " + key.encode()}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


BAD_AUTHORIZATIONS = [
    *(None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Bearer \xc3\xa9", b"Bearer \xff\xfe", b"first-key"),
    *(b"Basic first-key", b"Bearer first-key x", b"Bearer first-keyfirst-key", b"Bearer " + b"k" * 5000),
]


@pytest.mark.parametrize("authorization", BAD_AUTHORIZATIONS)
def test_bad_keys_are_401_in_our_shape(server: RunningServer, authorization: bytes | None) -> None:
    # By hand: client libraries refuse to send some of these.
    line = b"" if authorization is None else b"Authorization: " + authorization + b"\r\n"
    response = exchange(
        server.port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + line + b"\r\n"
    )
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"www-authenticate: Bearer" in head
    assert json.loads(body)["error"]["code"] == "invalid_api_key"


def test_every_route_but_the_open_ones_needs_a_key(server: RunningServer) -> None:
    documented = [(method, path) for path, methods in server.app.openapi()["paths"].items() for method in methods]
    others = [("GET", path) for path in ("/openapi.json", "/docs", "/redoc", "/no/such/route")]
    assert ("post", "/v1/chat/completions") in documented
    opened = {path for method, path in documented + others if _status(server, method, path) != 401}
    assert opened <= {"/health", "/"}


def _status(server: RunningServer, method: str, path: str) -> int:
    return httpx.request(method, server.url + path).status_code


@pytest.mark.parametrize(
    ("method", "path", "access"),
    [
        ("GET", "/health", Access.OPEN),
        ("GET", "/", Access.OPEN),
        ("GET", "/web/app.js", Access.OPEN),
        ("GET", "/metrics", Access.KEY),
        ("GET", "/v1/policy", Access.KEY),
        ("GET", "/../health", Access.KEY),
        ("POST", "/health", Access.ADMIN),
        ("POST", "/v1/chat/completions", Access.KEY),
        ("POST", "/v1/device", Access.KEY),
        ("POST", "/v1/device/profile", Access.ADMIN),
        ("PUT", "/v1/policy", Access.ADMIN),
        ("DELETE", "/v1/anything", Access.ADMIN),
    ],
)
def test_access_is_denied_by_default(method: str, path: str, access: Access) -> None:
    assert access_of(method, path) is access


def test_metrics_have_a_switch_of_their_own() -> None:
    assert access_of("GET", "/metrics", metrics_open=True) is Access.OPEN
    assert access_of("POST", "/metrics", metrics_open=True) is Access.ADMIN


def test_callers_key_is_not_enough_for_admin_routes(server: RunningServer) -> None:
    url = f"{server.url}/v1/policy"
    assert httpx.put(url, json={}, headers=keyed("first-key")).status_code == 403
    assert httpx.put(url, json={}, headers=keyed("wrong")).status_code == 401
    assert httpx.put(url, json={}, headers=keyed("admin-key")).status_code not in (401, 403)


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:1234", "[::1]:80", "edge.example", "EDGE.example:1", "10.1.2.3"]
)
def test_our_own_names_are_known(server: RunningServer, host: str) -> None:
    assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "edge.example.evil", "a@localhost.evil", "[::1"]
)
def test_unknown_host_is_refused(server: RunningServer, host: str) -> None:
    response = httpx.get(f"{server.url}/health", headers={"Host": host})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unknown_host"


def test_foreign_origins_get_neither_answer_nor_permission(server: RunningServer) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:1"):
        headers = keyed("first-key") | {"Origin": origin}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


def test_listed_origin_and_our_own_page_may_call(server: RunningServer) -> None:
    url = f"{server.url}/v1/chat/completions"
    preflight = httpx.options(
        url,
        headers={
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in preflight.headers
    listed = httpx.post(url, json=CHAT, headers=keyed("first-key") | {"Origin": "https://app.example"})
    assert listed.headers["access-control-allow-origin"] == "https://app.example"
    own = httpx.post(url, json=CHAT, headers=keyed("first-key") | {"Origin": server.url})
    assert own.status_code == 200


def test_body_over_the_limit_is_413_however_it_comes(server: RunningServer) -> None:
    url = f"{server.url}/v1/chat/completions"
    big = {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert httpx.post(url, json=big, headers=keyed("first-key")).status_code == 413

    def in_chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    headers = keyed("first-key") | {"Content-Type": "application/json"}
    response = httpx.post(url, content=in_chunks(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"


def test_client_that_leaves_in_the_middle_of_its_body_harms_nobody(server: RunningServer) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first-key\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=keyed("first-key")).status_code == 200


def test_canaries_show_neither_in_errors_nor_logs_nor_metrics(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="edge_agent")
    url = f"{server.url}/v1/chat/completions"
    canary = "CANARY-7261"
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": canary}], "max_tokens": 2},
        {"messages": [{"role": canary, "content": canary}]},
        {"messages": canary},
        {**CHAT, "temperature": canary},
        {**CHAT, "stop": {"x": canary}},
        {**CHAT, "logit_bias": {canary: 1}},
        {**CHAT, "souschef": {"speculation": canary}},
        {**CHAT, "model": canary},
        {**CHAT, "n": canary},
        {**CHAT, "user": canary},
    ]
    texts = [httpx.post(url, json=body, headers=keyed("first-key")).text for body in bodies]
    texts += [httpx.post(url, json=CHAT, headers=keyed(canary)).text, httpx.get(f"{server.url}/{canary}").text]
    texts += [httpx.post(url, content=canary, headers=keyed("first-key")).text]
    texts += [httpx.get(f"{server.url}/metrics", headers=keyed("first-key")).text, caplog.text]
    assert all(canary not in text and "first-key" not in text for text in texts)
