"""The edge agent's metrics: counts and histograms with bounded labels, in a registry of their own."""

from __future__ import annotations

import math
from dataclasses import asdict
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import generate_latest

from edge_agent.circuit_breaker import CircuitState
from edge_agent.cloud_client import CloudClient, Traffic
from edge_agent.decision import Decision, Reason
from edge_agent.energy import EnergyUse
from edge_agent.engine import Engine
from edge_agent.piece import Piece
from edge_agent.policy_controller import PolicyEngine
from edge_agent.report import Tally
from edge_agent.round import Origin
from edge_agent.scheduler import Scheduler
from edge_agent.sensors import DeviceSampler

PREFIX = "souschef_edge"

DRAFTERS = ("prediction", "ngram", "pool", "head", "model")
OTHER = "other"
"""Label of what isn't in a known set: the number of series stays bounded whatever comes."""
NO_MODE = "none"
"""Mode of a request that ended before its first round."""
MAX_POSITION = 16

CIRCUIT_CODES = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}

LATENCY_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TTFT_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
QUEUE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
RTT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 10.0)
GAMMA_BUCKETS = tuple(float(gamma) for gamma in range(MAX_POSITION + 1))


class Outcome(StrEnum):
    """How a request ended, as the metrics and the log call it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    ERROR = "error"


class EdgeMetrics:
    """Every metric of the edge agent. Ratios are made in PromQL, never here.

    The gauges of device, cloud and policy hold NaN until someone knows better: unknown is not 0.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by the mode of their last round.", "mode", "finish_reason")
        self.tokens = self._counter("tokens", "Tokens of answers by who produced them.", "origin")
        self.draft_rounds = self._counter("draft_rounds", "Rounds with a draft.", "drafter")
        self.draft_tokens = self._counter("draft_tokens", "Tokens drafted.", "drafter")
        self.accepted_tokens = self._counter("accepted_tokens", "Draft tokens in answers.", "drafter")
        self.accepted_per_position = self._counter(
            "accepted_tokens_per_position", "Draft tokens in answers by their place in the draft.", "position"
        )
        self.decisions = self._counter("decisions", "Rounds by what was decided.", "mode", "reason")
        self.handoffs = self._counter("handoffs", "Switches of who produces the next tokens.", "to", "reason")
        self.gamma = self._histogram("gamma", "Draft tokens asked for in a round.", GAMMA_BUCKETS)
        self.ttft = self._histogram("time_to_first_token_seconds", "From request to first token.", TTFT_BUCKETS_S)
        self.token_latency = self._histogram(
            "inter_token_latency_seconds", "Time per token after the first.", TOKEN_BUCKETS_S
        )
        self.request_latency = self._histogram(
            "request_latency_seconds", "From request to last byte.", LATENCY_BUCKETS_S
        )
        self.queue_time = self._histogram("queue_time_seconds", "Wait for a place.", QUEUE_BUCKETS_S)
        self.requests_running = self._gauge("requests_running", "Requests being answered.")
        self.requests_waiting = self._gauge("requests_waiting", "Requests in the queue.")
        self.temperature = self._unknown("device_temperature_celsius", "The device's temperature.")
        self.battery = self._unknown("device_battery_percent", "The device's battery.")
        self.charging = self._unknown("device_charging", "1 while the battery is charged.")
        self.headroom = self._unknown("device_headroom", "Thermal headroom; at 1.0 throttling begins.")
        self.sensor_age = self._unknown("sensor_age_seconds", "Age of the latest reading.")
        self.energy = self._counter("energy_joules", "Energy spent on inference.", "component", "source")
        self.cloud_rtt = self._histogram("cloud_rtt_seconds", "Round trips to the cloud.", RTT_BUCKETS_S)
        self.cloud_bytes = self._counter("cloud_bytes", "Bytes exchanged with the cloud.", "direction")
        self.circuit_state = self._unknown("circuit_state", "Circuit to the cloud: 0 closed, 1 half open, 2 open.")
        self.speedup = self._unknown("speculation_speedup_estimate", "Expected direct time over speculative time.")
        self.kv_cache_tokens = self._unknown("kv_cache_tokens", "Tokens held in the caches.")
        self.model_info = Info(f"{PREFIX}_model", "The models that are loaded.", registry=self.registry)
        for origin in Origin:
            self.tokens.labels(origin)
        self._traffic = Traffic()
        self._counted = {"sent": 0, "received": 0}

    def watch(self, scheduler: Scheduler, sampler: DeviceSampler, engine: Engine) -> None:
        """Read the gauges where they are known, at each scrape."""
        self.requests_running.set_function(lambda: scheduler.num_running)
        self.requests_waiting.set_function(lambda: scheduler.num_waiting)
        self.temperature.set_function(lambda: _known(sampler.state().temperature_c))
        self.battery.set_function(lambda: _known(sampler.state().battery_percent))
        self.charging.set_function(lambda: _known(sampler.state().charging))
        self.headroom.set_function(lambda: _known(sampler.state().headroom))
        self.sensor_age.set_function(lambda: _known(sampler.state().age_s))
        self.kv_cache_tokens.set_function(lambda: engine.num_cached_tokens)
        policy = engine.policy
        if isinstance(policy, PolicyEngine):
            self.speedup.set_function(lambda: policy.speedup)

    def watch_cloud(self, client: CloudClient) -> None:
        """Read the link's gauges at each scrape, and take in its round trips as they come."""
        self._traffic = client.traffic
        self.circuit_state.set_function(lambda: CIRCUIT_CODES[client.circuit_state])
        client.on_rtt = lambda rtt_s: observe(self.cloud_rtt, rtt_s)

    def count_round(self, piece: Piece, previous: Decision | None) -> None:
        """Count one round and what it added to the answer."""
        decision, draft = piece.round.decision, piece.round.draft
        self.decisions.labels(decision.mode, decision.reason).inc()
        observe(self.gamma, decision.gamma)
        if previous is not None and previous.mode.on_device != decision.mode.on_device:
            self.count_handoff("device" if decision.mode.on_device else "cloud", decision.reason)
        for event in piece.tokens:
            self.tokens.labels(event.origin).inc()
        if draft.tokens:
            drafter = draft.drafter if draft.drafter in DRAFTERS else OTHER
            self.draft_rounds.labels(drafter).inc()
            self.draft_tokens.labels(drafter).inc(len(draft))
            self.accepted_tokens.labels(drafter).inc(piece.num_accepted)
            for position in range(1, min(piece.num_accepted, MAX_POSITION) + 1):
                self.accepted_per_position.labels(str(position)).inc()
        if previous is not None:
            for _ in piece.tokens:
                observe(self.token_latency, piece.wait_s / len(piece.tokens))

    def count_handoff(self, to: str, reason: Reason) -> None:
        """Count a switch of who produces the next tokens."""
        self.handoffs.labels(to, reason).inc()

    def count_energy(self, use: EnergyUse, source: str) -> None:
        """Count what an answer has cost, by component."""
        for component, joules in asdict(use).items():
            if joules > 0:
                self.energy.labels(component, source).inc(joules)

    def count_request(self, tally: Tally | None, outcome: Outcome, latency_s: float) -> None:
        """Count a request that has ended, however it did."""
        decision = tally.last_decision if tally else None
        self.requests.labels(decision.mode if decision else NO_MODE, outcome).inc()
        observe(self.request_latency, latency_s)
        if tally is not None and tally.ttft_s is not None:
            observe(self.ttft, tally.ttft_s)

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        for direction, total in (("sent", self._traffic.sent), ("received", self._traffic.received)):
            self.cloud_bytes.labels(direction).inc(total - self._counted[direction])
            self._counted[direction] = total
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", help, registry=self.registry)

    def _unknown(self, name: str, help: str) -> Gauge:
        gauge = self._gauge(name, help)
        gauge.set(math.nan)
        return gauge

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", help, buckets=buckets, registry=self.registry)


def _known(value: float | None) -> float:
    """The value, or NaN while it is unknown."""
    return math.nan if value is None else float(value)


def observe(histogram: Histogram, value: float) -> None:
    """Take a value into a histogram, unless it would spoil the sum for good."""
    if math.isfinite(value) and value >= 0:
        histogram.observe(value)
