"""What the service counts. Ratios are made in PromQL."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cloud_service.fleet import UNKNOWN_FLEET, FleetSummary

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
        self.queue_time = histogram("queue_time_seconds", "Time that sequences waited for the model", SECONDS)
        self.batch_size = histogram("batch_size", "Sequences run as one pass", (1, 2, 3, 4, 6, 8, 12, 16, 32))

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"souschef_cloud_{name}", text, labels, registry=self.registry)

        self.fleet_devices = gauge("fleet_devices", "Devices that report, by the mode of their latest round", "mode")
        self.fleet_hot = gauge("fleet_hot_devices", "Devices too hot to work as they are")
        self.fleet_undrafted = gauge("fleet_undrafted_devices", "Devices that decode without drafts")
        self.fleet_acceptance = gauge("fleet_acceptance", "Mean acceptance rate of the devices that draft")
        sessions = gauge("sessions", "Sessions held")
        sessions.set_function(num_sessions)
        self.fleet_is(UNKNOWN_FLEET)

    def fleet_is(self, summary: FleetSummary) -> None:
        """The fleet as it is now."""
        for mode, count in summary.by_mode.items():
            self.fleet_devices.labels(mode=mode).set(count)
        self.fleet_hot.set(summary.hot)
        self.fleet_undrafted.set(summary.undrafted)
        self.fleet_acceptance.set(summary.acceptance)

    def batch_ran(self, size: int, queue_s: float, busy_s: float) -> None:
        """One pass over so many sequences."""
        self.busy_seconds.inc(busy_s)
        self.batch_size.observe(size)
        self.queue_time.observe(queue_s)
