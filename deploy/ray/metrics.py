"""The metrics of all replicas in one answer: Serve hands a scrape to one of them, whichever it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class ReplicaMetrics:
    """What one replica counts."""

    replica: str
    families: Sequence[Metric]


class Replicas(Collector):
    """Tells replicas apart as Prometheus tells targets apart: by the label `instance`."""

    def __init__(self, replicas: Iterable[ReplicaMetrics]) -> None:
        self._replicas = sorted(replicas, key=lambda one: one.replica)

    def collect(self) -> Iterable[Metric]:
        """Each family once, with the samples of all replicas."""
        merged: dict[str, Metric] = {}
        for one in self._replicas:
            for family in one.families:
                whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [
                    sample._replace(labels={**sample.labels, "instance": one.replica}) for sample in family.samples
                ]
        return merged.values()
