"""Plain replicas of the cloud service with a real model: behind nginx, and with one session forced onto both."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest

from shared.protocol import tokens_crc
from tests.nginx_gateway import PROGRAM, gateway
from tests.processes import serving_process
from tests.real_edges import CONTEXT, RealEdges, affinity, counted, real_edges, when_rounds
from tests.redis_server import RedisServer
from tests.test_cloud_models import assert_the_models_own

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_CONTESTED = 12
Replica = tuple[str, subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def edges(smollm2_directory: Path) -> Iterator[RealEdges]:
    with real_edges(smollm2_directory) as edges:
        yield edges


@contextmanager
def two_replicas(model: Path, redis: RedisServer) -> Iterator[tuple[Replica, Replica]]:
    flags = ["serve", "--model", str(model), "--port", "0", "--context-length", str(CONTEXT), "--threads", "1"]
    settings = {
        "SOUSCHEF_REDIS_URL": redis.url,
        "SOUSCHEF_STORE_KEY": "a secret for the store",
        "SOUSCHEF_REDIS_TIMEOUT_S": "5",
        "SOUSCHEF_REQUESTS_PER_MINUTE": "100000",
    }
    with (
        serving_process("cloud_service", flags, settings) as first,
        serving_process("cloud_service", flags, settings) as second,
    ):
        yield first, second


@pytest.mark.skipif(PROGRAM is None, reason="nginx is not installed (Debian's package nginx-light)")
def test_a_replica_killed_behind_nginx_alters_no_answer(
    edges: RealEdges, smollm2_directory: Path, tmp_path: Path
) -> None:
    with (
        RedisServer(tmp_path) as redis,
        two_replicas(smollm2_directory, redis) as ((first, _), (second, victim)),
        gateway(tmp_path, [url.removeprefix("http://") for url in (first, second)]) as url,
    ):
        before = counted(first, second)
        undisturbed = asyncio.run(edges.answers(url, edges.requests()))
        assert affinity(before, counted(first, second)) >= 0.95
        shares = [counted(one)["souschef_cloud_verify_requests_total", "ok"] for one in (first, second)]
        assert min(shares) > 0.1 * sum(shares)

        num_rounds = sum(len(answer.rounds) for answer in undisturbed)
        strike = when_rounds(num_rounds // 2, victim.kill)
        disturbed = asyncio.run(edges.answers(url, edges.requests(), strike))

        assert victim.wait(60) < 0
        edges.assert_same(disturbed, undisturbed)
        # nginx repeats at the other replica what the dead one was computing: no device had to help.
        assert sum(answer.failures for answer in (*undisturbed, *disturbed)) == 0


def test_of_two_replicas_with_one_session_one_advances_it(
    edges: RealEdges, smollm2_directory: Path, tmp_path: Path
) -> None:
    """Round by round both get the session at once, with other drafts: one verdict stands, the other is refused."""
    prompt = edges.requests(1)[0].prompt
    tokens = list(prompt)
    barrier = Barrier(2)

    def body(number: int, draft: list[int]) -> dict[str, Any]:
        opening = {"tokens": list(prompt), "prompt_len": len(prompt), "sampling": {"temperature": 0}}
        later = {"prefix_len": len(tokens), "prefix_crc": tokens_crc(tokens)}
        return {
            "session_id": "session-0001",
            "round": number,
            "draft_tokens": draft,
            **({"opening": opening} if number == 0 else later),
        }

    def verify(url: str, number: int, draft: list[int]) -> httpx.Response:
        return httpx.post(f"{url}/v1/verify", json=body(number, draft), timeout=60)

    def contend(url: str, number: int, draft: list[int]) -> httpx.Response:
        barrier.wait(60)
        return verify(url, number, draft)

    with (
        RedisServer(tmp_path) as redis,
        two_replicas(smollm2_directory, redis) as ((first, _), (second, _)),
        ThreadPoolExecutor(2) as pool,
    ):
        tokens.append(verify(first, 0, []).json()["next_token"])
        for number in range(1, NUM_CONTESTED):
            drafts = {first: [1, 2], second: [3, 4]}
            rounds = {url: pool.submit(contend, url, number, draft) for url, draft in drafts.items()}
            replies = {url: round.result() for url, round in rounds.items()}
            winners = [url for url in drafts if replies[url].status_code == 200]
            assert len(winners) == 1
            verdict = replies[winners[0]].json()
            tokens += [*drafts[winners[0]][: verdict["accepted"]], verdict["next_token"]]
            [refused] = [url for url in drafts if url not in winners]
            assert replies[refused].status_code in (409, 410)
            if replies[refused].json()["error"]["code"] == "claim_lost":
                assert counted(refused)["souschef_cloud_sessions", ""] == 0

        assert_the_models_own(edges.model, prompt, tokens[len(prompt) :])
