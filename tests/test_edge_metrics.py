"""The agent's metrics: right counts, bounded labels, sensible buckets, nothing that spoils a sum."""

from __future__ import annotations

import math

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_agent.metrics import EdgeMetrics, observe
from tests.servers import CHAT, RunningServer, run_server
from tests.toy_engine import Script, script_engine, toy_settings


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every series with its value; the times of creation are left out."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scrape(server: RunningServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return samples(httpx.get(f"{server.url}/metrics").text)


def total(series: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    """Sum over the series of a metric that carry these labels."""
    wanted = frozenset(labels.items())
    return sum(value for (series_name, has), value in series.items() if series_name == name and wanted <= has)


def test_counts_of_a_request_agree_with_its_response() -> None:
    script = Script("abcabcabcabcabcabc.")
    with run_server(toy_settings(), lambda: script_engine(script)) as server:
        before = scrape(server)
        body = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).json()
        after = scrape(server)
    report = body["souschef"]
    assert report["accepted_tokens"] > 0

    def gained(name: str, **labels: str) -> float:
        return total(after, f"souschef_edge_{name}", **labels) - total(before, f"souschef_edge_{name}", **labels)

    assert gained("requests_total", mode="local_speculative", finish_reason="stop") == 1
    assert gained("tokens_total", origin="draft") == report["tokens_by_origin"]["draft"]
    assert gained("tokens_total", origin="target") == report["tokens_by_origin"]["target"]
    assert gained("draft_tokens_total", drafter="ngram") == report["draft_tokens"]
    assert gained("accepted_tokens_total", drafter="ngram") == report["accepted_tokens"]
    assert gained("accepted_tokens_per_position_total") == report["accepted_tokens"]
    assert gained("decisions_total", mode="local_speculative", reason="nominal") == report["rounds"]
    assert gained("gamma_count") == report["rounds"]
    assert gained("time_to_first_token_seconds_count") == 1
    assert gained("request_latency_seconds_count") == 1
    assert gained("queue_time_seconds_count") == 1
    assert gained("inter_token_latency_seconds_count") == body["usage"]["completion_tokens"] - 1
    assert gained("inter_token_latency_seconds_sum") < gained("request_latency_seconds_sum")


def test_scanners_and_odd_models_make_no_series() -> None:
    with (
        run_server(toy_settings(), lambda: script_engine(Script())) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        client.post("/v1/chat/completions", json=CHAT)
        before = set(scrape(server))
        for n in range(300):
            assert client.get(f"/scan/{n}.php").status_code == 404
            assert client.post("/v1/chat/completions", json={**CHAT, "model": f"model-{n}"}).status_code == 404
        assert set(scrape(server)) == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_what_would_spoil_a_sum_is_dropped(value: float) -> None:
    metrics = EdgeMetrics()
    observe(metrics.ttft, 1.0)
    observe(metrics.ttft, value)
    series = samples(metrics.render().decode())
    assert total(series, "souschef_edge_time_to_first_token_seconds_sum") == 1.0
    assert total(series, "souschef_edge_time_to_first_token_seconds_count") == 1.0


def test_long_requests_fall_into_finite_buckets() -> None:
    metrics = EdgeMetrics()
    for histogram in (metrics.request_latency, metrics.ttft, metrics.queue_time):
        observe(histogram, 45.0)
    observe(metrics.token_latency, 2.0)
    series = samples(metrics.render().decode())
    for name in (
        "request_latency_seconds",
        "time_to_first_token_seconds",
        "queue_time_seconds",
        "inter_token_latency_seconds",
    ):
        buckets = {
            float(dict(labels)["le"]): value
            for (series_name, labels), value in series.items()
            if series_name == f"souschef_edge_{name}_bucket"
        }
        assert any(value for bound, value in buckets.items() if math.isfinite(bound)), name
        assert len(buckets) <= 20


def test_what_nobody_has_measured_is_not_zero() -> None:
    series = samples(EdgeMetrics().render().decode())
    for name in ("device_temperature_celsius", "device_battery_percent", "device_headroom", "sensor_age_seconds"):
        assert math.isnan(total(series, f"souschef_edge_{name}"))


def test_two_applications_do_not_meet() -> None:
    with (
        run_server(toy_settings(), lambda: script_engine(Script())) as first,
        run_server(toy_settings(), lambda: script_engine(Script())) as second,
    ):
        httpx.post(f"{first.url}/v1/chat/completions", json=CHAT)
        assert total(scrape(first), "souschef_edge_requests_total") == 1
        assert total(scrape(second), "souschef_edge_requests_total") == 0
