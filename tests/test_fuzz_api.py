"""Whatever fits the OpenAPI documents, and what doesn't: never a 5xx, errors always in our shape, health afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.cloud_toy import running_cloud
from tests.fuzzing import examples
from tests.servers import run_server
from tests.toy_engine import Script, script_engine, toy_settings

EDGE_OPERATIONS = [
    ("POST", "/v1/chat/completions", 60),
    ("POST", "/v1/completions", 40),
    ("GET", "/v1/models", 3),
    ("GET", "/v1/models/{model}", 3),
    ("GET", "/v1/policy", 3),
    ("PUT", "/v1/policy", 40),
    ("GET", "/v1/device", 3),
    ("POST", "/v1/device", 40),
    ("GET", "/v1/device/profiles", 3),
    ("POST", "/v1/device/profile", 15),
    ("GET", "/health", 3),
    ("GET", "/ready", 3),
    ("GET", "/metrics", 3),
]
CLOUD_OPERATIONS = [
    ("POST", "/v1/handshake", 30),
    ("POST", "/v1/verify", 60),
    ("POST", "/v1/continue", 40),
    ("DELETE", "/v1/sessions/{session_id}", 20),
    ("POST", "/v1/fleet", 30),
    ("GET", "/v1/fleet", 10),
    ("GET", "/health", 3),
    ("GET", "/ready", 3),
    ("GET", "/metrics", 3),
]
MODES = {"valid": GenerationMode.POSITIVE, "invalid": GenerationMode.NEGATIVE}


@pytest.fixture(scope="module")
def edge() -> Iterator[tuple[dict[str, Any], str]]:
    """(document, address)."""
    with run_server(toy_settings(), lambda: script_engine(Script("Hello, hello!"))) as server:
        yield server.app.openapi(), server.url


@pytest.fixture(scope="module")
def cloud() -> Iterator[tuple[dict[str, Any], str]]:
    """(document, address)."""
    with running_cloud(requests_per_minute=1_000_000) as running:
        yield running.app.openapi(), running.url


def fuzz(document: dict[str, Any], url: str, method: str, path: str, mode: str, count: int) -> None:
    operation = schemathesis.openapi.from_dict(document)[path][method]

    @settings(**examples(count), suppress_health_check=list(HealthCheck))  # type: ignore[arg-type]
    @given(case=operation.as_strategy(generation_mode=MODES[mode]))
    def sends(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, timeout=60)
        assert response.status_code < 500, (response.status_code, response.text)
        if response.status_code >= 400:
            assert set(response.json()) == {"error"}
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    sends()
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200


def modes(operations: list[tuple[str, str, int]]) -> Callable[..., Any]:
    """What takes nothing can't be asked wrongly."""
    return pytest.mark.parametrize(
        ("method", "path", "count", "mode"),
        [(*operation, mode) for operation in operations for mode in MODES if mode == "valid" or operation[2] > 3],
    )


@modes(EDGE_OPERATIONS)
def test_the_edge_takes_anything(
    edge: tuple[dict[str, Any], str], method: str, path: str, count: int, mode: str
) -> None:
    fuzz(*edge, method, path, mode, count)


@modes(CLOUD_OPERATIONS)
def test_the_cloud_takes_anything(
    cloud: tuple[dict[str, Any], str], method: str, path: str, count: int, mode: str
) -> None:
    fuzz(*cloud, method, path, mode, count)


def test_every_documented_route_is_fuzzed(edge: tuple[dict[str, Any], str], cloud: tuple[dict[str, Any], str]) -> None:
    for (document, _), operations in ((edge, EDGE_OPERATIONS), (cloud, CLOUD_OPERATIONS)):
        documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        assert documented == {(method, path) for method, path, _ in operations}
