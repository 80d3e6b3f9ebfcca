"""What the service counts. Ratios are made in PromQL."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class CloudMetrics:
    """One registry an application."""

    def __init__(self, num_sessions: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"souschef_cloud_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"souschef_cloud_{name}", text, buckets=buckets, registry=self.registry)

        self.verify_requests = counter("verify_requests", "Verify requests by outcome", "outcome")
        self.verified_tokens = counter("verified_tokens", "Draft tokens judged, by result", "result")
        self.generated_tokens = counter("generated_tokens", "Tokens made by the target itself")
        self.session_rebuilds = counter("session_rebuilds", "Sessions taken up without a live copy, by cause", "cause")
        self.replays = counter("replays", "Rounds that were asked for again and answered as before")
        self.store_errors = counter("store_errors", "Times that the session store did not answer")
        self.admission_rejected = counter("admission_rejected", "Requests sent away", "reason")
        self.busy_seconds = counter("busy_seconds", "Time that the model was computing")
        self.verify_latency = histogram("verify_latency_seconds", "Time of a verify request in the service", SECONDS)
        self.queue_time = histogram("queue_time_seconds", "Time that decode steps waited for the model", SECONDS)
        self.batch_size = histogram("batch_size", "Decode steps run as one pass", (1, 2, 3, 4, 6, 8, 12, 16, 32))
        sessions = Gauge("souschef_cloud_sessions", "Sessions held", registry=self.registry)
        sessions.set_function(num_sessions)

    def batch_ran(self, size: int, queue_s: float, busy_s: float) -> None:
        """One batch of decode steps."""
        self.busy_seconds.inc(busy_s)
        self.batch_size.observe(size)
        self.queue_time.observe(queue_s)
