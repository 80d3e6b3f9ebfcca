"""The cloud service on a Ray cluster of two machines, with a real model: killed, cut off, scaled while it answers."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_agent.round import Origin, Round
from tests.ray_cluster import RayCluster
from tests.real_edges import CONTEXT, NUM_SESSIONS, Answer, RealEdges, affinity, counted, mode_of, real_edges
from tests.redis_server import RedisServer

NUM_PATIENT = 2
"""Devices that go on when the others have left: load for one replica."""

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (make setup-ray)"),
]


@pytest.fixture(scope="module")
def edges(smollm2_directory: Path) -> Iterator[RealEdges]:
    with real_edges(smollm2_directory) as edges:
        yield edges


def settings(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "context_length": CONTEXT, "requests_per_minute": 100_000, **more}


def options(min_replicas: int, **autoscaling: Any) -> dict[str, Any]:
    limits = {"min_replicas": min_replicas, "max_replicas": 2, "target_ongoing_requests": 6}
    return {"ray_actor_options": {"num_cpus": 1}, "autoscaling_config": limits | autoscaling}


def test_a_killed_replica_and_a_lost_machine_alter_no_answer(
    edges: RealEdges, smollm2_directory: Path, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as redis:
        args = settings(smollm2_directory, redis_url=redis.url, store_key="a secret for the store")
        with RayCluster(args=args, verifier=options(2)) as cluster:
            assert httpx.get(f"{cluster.worker_url}/ready", timeout=60).json()["ready"]

            before = counted(cluster.url)
            undisturbed = asyncio.run(edges.answers(cluster.url, edges.requests()))
            assert sum(answer.failures for answer in undisturbed) == 0
            assert affinity(before, counted(cluster.url)) >= 0.95

            num_rounds = sum(len(answer.rounds) for answer in undisturbed)
            disasters = {num_rounds // 4: cluster.kill_replica, num_rounds // 2: cluster.kill_machine}
            done: list[Round] = []

            def strike(round: Round) -> None:
                done.append(round)
                disasters.get(len(done), lambda: None)()

            disturbed = asyncio.run(edges.answers(cluster.url, edges.requests(), strike))
            edges.assert_same(disturbed, undisturbed)
            # A device made the round that its replica took along; the next ones went to the cloud again.
            assert any(answer.rounds[-1].tokens[-1].origin is not Origin.TARGET for answer in disturbed)

            cluster.wait_for(lambda: len(cluster.replicas()) == 1)
            recovered = asyncio.run(edges.answers(cluster.url, edges.requests(NUM_PATIENT)))
            edges.assert_same(recovered, undisturbed[:NUM_PATIENT])
            assert sum(answer.failures for answer in recovered) == 0


def test_replicas_come_and_go_under_load_without_an_error(edges: RealEdges, smollm2_directory: Path) -> None:
    quick = {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 3, "metrics_interval_s": 1}
    requests = edges.requests()
    answers: defaultdict[int, list[Answer]] = defaultdict(list)

    async def device(url: str, number: int, leave: asyncio.Event) -> None:
        while not leave.is_set():
            answers[number].append(await edges.answer(url, requests[number], mode_of(number)))

    async def scenario(cluster: RayCluster) -> None:
        many, few = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_SESSIONS):
                tasks.create_task(device(cluster.url, number, few if number < NUM_PATIENT else many))
            await asyncio.to_thread(cluster.wait_for, lambda: len(cluster.replicas()) == 2)
            many.set()
            await asyncio.to_thread(cluster.wait_for, lambda: len(cluster.replicas()) == 1)
            few.set()

    with RayCluster(args=settings(smollm2_directory), verifier=options(1, **quick)) as cluster:
        asyncio.run(scenario(cluster))
    for made in answers.values():
        assert sum(answer.failures for answer in made) == 0
        edges.assert_same(made, made[:1] * len(made))
