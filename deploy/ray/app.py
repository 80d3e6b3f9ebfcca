"""The cloud service as a Ray Serve application: a replica is the service itself, with a model and a thread of its own.

A session goes to the replica that holds its cache, by Serve's own consistent hash over the header `X-Session`, as nginx
does it for plain processes: serve.yaml names router and header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from ray import serve

from cloud_service.app import Service, collect_metrics, create_app
from cloud_service.config import CloudSettings, load_settings
from cloud_service.loading import load_service
from deploy.ray.metrics import ReplicaMetrics, Replicas

ANSWER_LIMIT_S = 5.0
"""For the inference thread to show that it is alive, and for the other replicas to tell their metrics."""


@serve.ingress()
class Verifier:
    """One replica."""

    def __init__(self, settings: CloudSettings) -> None:
        """The model gets a thread for each core that the replica holds, unless the settings say how many."""
        cores = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
        self._settings = settings.model_copy(update={"threads": settings.threads or cores or None})

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for it once the replica has its process."""
        self._app = create_app(self._settings, load_service)
        # Before the service's own, which would tell of one replica, and every time of another one.
        self._app.router.routes.insert(0, APIRoute("/metrics", self._metrics_of_all))
        return self._app

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        service: Service = self._app.state.service
        if not await service.thread.responds(ANSWER_LIMIT_S):
            raise RuntimeError("the inference thread does not respond")

    async def metrics(self) -> ReplicaMetrics:
        """What this replica counts."""
        registry = await collect_metrics(self._app)
        return ReplicaMetrics(serve.get_replica_context().replica_tag, list(registry.collect()))

    async def _metrics_of_all(self) -> Response:
        context = serve.get_replica_context()
        replicas = serve.get_deployment_handle(context.deployment, context.app_name)
        told = await replicas.broadcast("metrics").results_async(timeout_s=ANSWER_LIMIT_S, return_exceptions=True)
        alive = Replicas(one for one in told if isinstance(one, ReplicaMetrics))
        return Response(generate_latest(alive), media_type=CONTENT_TYPE_LATEST)


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application. args: settings of the cloud service; they win over the environment of whoever starts it.

    Raises:
        ConfigError: a setting is wrong.
    """
    return serve.deployment(Verifier).bind(load_settings(args))
