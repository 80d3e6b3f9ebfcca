"""Section F: metrics."""

from __future__ import annotations

import math

import httpx
import pytest

from edge_agent.metrics import EdgeMetrics, observe
from tests.cloud_toy import running_cloud
from tests.servers import CHAT, run_server
from tests.test_edge_metrics import samples, scrape, total
from tests.toy_engine import Script, script_engine, toy_settings

NUM_PROBES = 1000


def test_F2_scanners_and_odd_models_make_no_series() -> None:
    """Each scanned path and each made-up model name is a series for ever (sglang#31193, litellm#35666).

    Here: labels come from closed sets; paths and names of callers are in none.
    """
    with (
        run_server(toy_settings(), lambda: script_engine(Script())) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        client.post("/v1/chat/completions", json=CHAT)
        client.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        before = set(scrape(server))
        for number in range(NUM_PROBES):
            assert client.get(f"/scan/{number}.php").status_code == 404
            assert client.post("/v1/chat/completions", json={**CHAT, "model": f"m{number}"}).status_code == 404
        assert set(scrape(server)) == before


def test_F2_the_clouds_metrics_neither() -> None:
    with running_cloud() as cloud, httpx.Client(base_url=cloud.url) as client:
        client.get("/x")
        before = set(samples(client.get("/metrics").text))
        for number in range(100):
            assert client.get(f"/scan/{number}").status_code == 404
            assert client.post("/v1/verify", json={"session_id": f"s{number}"}).status_code in (400, 422)
        assert set(samples(client.get("/metrics").text)) == before


def test_F4_a_long_request_falls_into_a_finite_bucket() -> None:
    """Buckets end at 10 s: every slow answer is +Inf, and quantiles lie (bifrost#3828, vLLM#15167).

    Here: to 600 s for requests; first token and token have buckets of their own.
    """
    metrics = EdgeMetrics()
    observe(metrics.request_latency, 45.0)
    observe(metrics.ttft, 0.7)
    observe(metrics.token_latency, 0.012)
    bounds: dict[str, set[float]] = {}
    for (name, labels), value in samples(metrics.render().decode()).items():
        if name.endswith("_bucket") and value:
            bounds.setdefault(name, set()).add(float(dict(labels)["le"]))
    latency = bounds["souschef_edge_request_latency_seconds_bucket"]
    first = bounds["souschef_edge_time_to_first_token_seconds_bucket"]
    token = bounds["souschef_edge_inter_token_latency_seconds_bucket"]
    assert min(latency) == 60.0
    assert min(first) == 0.8
    assert min(token) == 0.015


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_F5_what_would_spoil_a_sum_is_dropped(value: float) -> None:
    """One NaN makes `_sum` NaN for ever; a clock that is set back gives negative times (client_golang#1275).

    Here: only finite values that aren't negative are taken, from monotonic clocks.
    """
    metrics = EdgeMetrics()
    observe(metrics.ttft, 1.0)
    observe(metrics.ttft, value)
    assert total(samples(metrics.render().decode()), "souschef_edge_time_to_first_token_seconds_sum") == 1.0


def test_F6_the_application_can_be_made_twice() -> None:
    """The second application meets the first one's metrics in a global registry (fastapi-instrumentator#183).

    Here: a registry an application.
    """
    with (
        run_server(toy_settings(), lambda: script_engine(Script())) as first,
        run_server(toy_settings(), lambda: script_engine(Script())) as second,
        running_cloud() as third,
        running_cloud() as fourth,
    ):
        httpx.post(f"{first.url}/v1/chat/completions", json=CHAT)
        assert total(scrape(first), "souschef_edge_requests_total") == 1
        assert total(scrape(second), "souschef_edge_requests_total") == 0
        assert httpx.get(f"{third.url}/metrics").status_code == httpx.get(f"{fourth.url}/metrics").status_code == 200
