"""Section D: many at once, retries, stops, and things that die."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from cloud_service.config import CloudSettings
from cloud_service.redis_store import RedisStore
from cloud_service.sealer import Sealer
from cloud_service.session_store import SessionKey, SessionState
from edge_agent.circuit_breaker import CircuitBreaker, CircuitState
from edge_agent.cloud_client import CloudTimeouts
from edge_agent.config import EdgeSettings
from edge_agent.decision import Mode
from edge_agent.request import GenerationRequest
from shared.errors import CloudError
from shared.protocol import tokens_crc
from shared.sampling import SamplingParams
from shared.server import LAST_BYTES_S
from tests.cases.places import CLOUD, DEVICE, no_drafts, open_place, tokens
from tests.cloud_edge import PROMPT, PlannedController, always, cloud_client, expected, positions_of, rounds_of
from tests.cloud_toy import TableDecoder, running_cloud
from tests.redis_server import RedisServer
from tests.servers import chat, complete, error_of, run_server, streamed_text, wait_until
from tests.tcp_proxy import Fault, HttpProxy, TcpProxy
from tests.toy_engine import Script, script_engine, table_engine, toy_settings

ROOT = Path(__file__).parents[2]
LONG = "abcdefghijklmnopqrstuvwxyz"
GREEDY = SamplingParams(temperature=0)
STATE = SessionState(round=1, tokens=(1, 2, 3), prompt_len=1, sampling=GREEDY)


def test_D1_a_cancelled_command_does_not_shift_the_replies(tmp_path: Path) -> None:
    """A cancelled Redis command leaves its reply to the next one: another's data (redis-py#2624).

    Here: a connection whose command was cut off is closed; the first fixed version is the least that is allowed.
    """

    async def scenario(server: RedisServer) -> None:
        proxy = TcpProxy(server.port)
        keys = [SessionKey("tenant", f"session-000{number}") for number in (1, 2)]
        async with proxy.running() as port:
            store = RedisStore(f"redis://127.0.0.1:{port}", Sealer("a secret for tests"), ttl_s=60, timeout_s=10)
            try:
                for number, key in enumerate(keys, start=1):
                    claim = await store.open(key, "a")
                    await store.advance(key, "a", claim.fence, STATE.model_copy(update={"round": number}))
                proxy.delay_s = 0.1
                for _ in range(3):
                    cut_off = asyncio.create_task(store.claim(keys[0], "a"))
                    await asyncio.sleep(0.15)
                    cut_off.cancel()
                    await asyncio.gather(cut_off, return_exceptions=True)
                    found = await store.claim(keys[1], "a")
                    assert found is not None
                    assert found.state is not None
                    assert found.state.round == 2
            finally:
                await store.close()

    with RedisServer(tmp_path) as server:
        asyncio.run(scenario(server))
    assert tuple(map(int, redis.__version__.split(".")[:3])) >= (4, 5, 4)


def test_D3_no_counter_without_an_expiry(tmp_path: Path) -> None:
    """Killed between INCR and EXPIRE, a counter lives for ever and locks its caller out (limits#14).

    Here: counting and expiring are one script, and a counter found without an expiry gets one.
    """

    async def scenario(server: RedisServer) -> None:
        proxy = TcpProxy(server.port)
        async with proxy.running() as port:
            for number in range(20):
                store = RedisStore(f"redis://127.0.0.1:{port}", Sealer("a secret for tests"), ttl_s=60, timeout_s=0.5)
                proxy.delay_s = number * 0.001
                counting = asyncio.create_task(store.allow(f"tenant-{number}", 5, 60.0))
                await asyncio.sleep(number * 0.003)
                proxy.cut()
                await asyncio.gather(counting, return_exceptions=True)
                await store.close()
        with server.client() as client:
            assert all(client.ttl(key) > 0 for key in client.keys("*"))
            orphan = b"souschef:rate:" + Sealer("a secret for tests").name("orphan").encode()
            client.set(orphan, 99)
        store = RedisStore(server.url, Sealer("a secret for tests"), ttl_s=60)
        assert 0 < await store.allow("orphan", 5, 60.0) <= 60
        await store.close()
        with server.client() as client:
            assert client.ttl(orphan) > 0

    with RedisServer(tmp_path) as server:
        asyncio.run(scenario(server))


@pytest.mark.parametrize("mode", [Mode.CLOUD_VERIFY, Mode.CLOUD_GENERATE])
@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.CUT_REPLY, Fault.LOSE_REQUEST])
def test_D4_a_retry_repeats_no_token(mode: Mode, fault: Fault) -> None:
    """The stream breaks after five tokens, the retry begins anew: tokens twice (hive#6541, nuguard#455).

    Here: what goes on goes on after the committed tokens, at their position.
    """
    request = GenerationRequest(PROMPT, 40, SamplingParams(seed=9))

    def choose(path: str, number: int) -> Fault:
        return fault if number % 4 == 1 and not path.startswith("/v1/sessions") else Fault.NONE

    async def scenario(port: int) -> list[Any]:
        async with (
            HttpProxy(port, choose).running() as proxy_port,
            cloud_client(f"http://127.0.0.1:{proxy_port}") as client,
        ):
            return await rounds_of(client, request, PlannedController(always(mode)))

    with running_cloud() as cloud:
        rounds = asyncio.run(scenario(int(cloud.url.rsplit(":", 1)[1])))
    assert tokens(rounds) == expected(request)
    assert positions_of(rounds) == list(range(len(PROMPT), len(PROMPT) + 40))


def test_D6_cancels_and_refusals_leave_the_breaker_closed() -> None:
    """A caller's cancel or a 4xx counts as a failure of the service, and is tried again (cheetahclaws#72).

    Here: only what the service didn't answer, or answered with 5xx or nonsense, counts.
    """
    breaker = CircuitBreaker(threshold=3)

    async def scenario(url: str, dead_url: str) -> None:
        async with cloud_client(url, breaker=breaker) as client:
            for _ in range(20):
                asking = asyncio.create_task(client.handshake())
                await asyncio.sleep(0.001)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            client._hello = client._hello.model_copy(update={"protocol": 99})
            for _ in range(5):
                with pytest.raises(Exception, match="protocol"):
                    await client.handshake()
            assert breaker.state is CircuitState.CLOSED
        timeouts = CloudTimeouts(connect_s=0.2, read_s=0.2)
        async with cloud_client(dead_url, breaker=breaker, timeouts=timeouts) as client:
            for _ in range(3):
                with pytest.raises(CloudError):
                    await client.handshake()
        assert breaker.state is CircuitState.OPEN

    with running_cloud() as cloud:
        asyncio.run(scenario(cloud.url, "http://127.0.0.1:1"))


def test_D7_caches_of_requests_do_not_mix() -> None:
    """Sixteen prompts at once, and one answer continues another's cache (mlx-lm#965, llama.cpp#10513).

    Here: a cache belongs to one request at a time, and what it shares with the next prompt is compared token by token.
    """
    prompts = [f"{letter}{letter}{letter * (n % 5)}" for n, letter in enumerate("ABCDEFGHIJKLMNOP")]
    settings = toy_settings(max_running=8)
    with run_server(settings, lambda: table_engine(max_slots=8)) as server, ThreadPoolExecutor(16) as pool:
        alone = [complete(server, prompt=prompt, logprobs=0, max_tokens=30).json()["choices"] for prompt in prompts]
        for _ in range(2):
            together = pool.map(
                lambda prompt: complete(server, prompt=prompt, logprobs=0, max_tokens=30).json()["choices"], prompts
            )
            assert list(together) == alone
    assert len({str(choices) for choices in alone}) > 8


def test_D7_the_clouds_caches_neither() -> None:
    async def together(place: Any, requests: list[GenerationRequest]) -> list[Any]:
        return await asyncio.gather(*(place.answer(request, no_drafts) for request in requests))

    requests = [GenerationRequest((*PROMPT, n % 16, n % 7), 20, GREEDY) for n in range(16)]
    with open_place(CLOUD) as cloud, open_place(DEVICE) as device:
        answers = asyncio.run(together(cloud, requests))
        assert [tokens(rounds) for rounds in answers] == [tokens(device.rounds(request)) for request in requests]


def test_D9_replays_losses_and_orders_of_verify() -> None:
    """A repeated round advances the cache twice, or is answered otherwise (derived; local-inference-lab#465).

    Here: the same payload gives the same reply and counts once; another for a done round is 409; an unknown session is
    410, and the edge opens it anew, with the same text.
    """
    answer = expected(GenerationRequest(PROMPT, 20, GREEDY))
    opening = {"tokens": list(PROMPT), "prompt_len": len(PROMPT), "sampling": {"temperature": 0}}
    first = {"session_id": "session-0001", "round": 1, "opening": opening, "draft_tokens": answer[:2]}
    held = [*PROMPT, *answer[:3]]
    second = {
        "session_id": "session-0001",
        "round": 2,
        "prefix_len": len(held),
        "prefix_crc": tokens_crc(held),
        "draft_tokens": answer[3:5],
    }
    with running_cloud() as cloud, httpx.Client(base_url=cloud.url) as client:

        def post(message: dict[str, Any]) -> httpx.Response:
            return client.post("/v1/verify", json=message)

        told = [post(first).json() for _ in range(3)]
        assert told[0] == told[1] == told[2]
        assert told[0]["accepted"] == 2
        assert post(second).json()["accepted"] == 2
        assert post(second | {"draft_tokens": [1]}).status_code == 409
        assert post(first).status_code in (200, 409)
        assert post(second | {"session_id": "session-none"}).status_code == 410

        async def with_lost_sessions() -> list[Any]:
            def forget(round: Any) -> None:
                cloud.service.sessions._sessions.clear()
                cloud.service.store._entries.clear()  # type: ignore[attr-defined]

            async with cloud_client(cloud.url) as edge:
                request = GenerationRequest(PROMPT, 20, GREEDY)
                return await rounds_of(edge, request, PlannedController(always(Mode.CLOUD_VERIFY)), after_round=forget)

        assert tokens(asyncio.run(with_lost_sessions())) == answer


def test_D10_a_stop_in_the_middle_of_a_stream() -> None:
    """Scale-in cuts streams, or new requests still arrive at what is going away (posthog#73863, litellm#28714).

    Here: not ready at once, running streams get their grace time, and compose waits longer than that.
    """
    script = Script(LONG)
    script.gate.clear()
    with run_server(toy_settings(grace_s=60), lambda: script_engine(script)) as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(chat, server, stream=True)
        wait_until(lambda: server.agent.scheduler.num_running == 1)
        try:
            server.stop()
            wait_until(lambda: server.agent.scheduler.draining)
            assert httpx.get(f"{server.url}/ready").status_code == 503
            assert error_of(chat(server), 503)["code"] == "overloaded"
        finally:
            script.gate.set()
        assert streamed_text(stream.result()) == LONG


@pytest.mark.parametrize(("service", "settings"), [("edge", EdgeSettings), ("cloud", CloudSettings)])
def test_D10_compose_waits_longer_than_the_grace_time(service: str, settings: Any) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ours = {name: each for name, each in services.items() if service in name and "stop_grace_period" in each}
    assert ours
    grace_s = settings.model_fields["grace_s"].default
    for each in ours.values():
        waits_s = int(each["stop_grace_period"].removesuffix("s"))
        assert waits_s > float(each.get("environment", {}).get("SOUSCHEF_GRACE_S", grace_s)) + LAST_BYTES_S


def test_D11_ten_times_the_capacity() -> None:
    """Everything is taken in, and everyone waits for ever (vLLM#18826, #49445).

    Here: a bounded queue; past it 503 or 429 with a time to come back; who was admitted gets a right answer.
    """
    script = Script(LONG, pause_s=0.002)
    most = 0
    with (
        run_server(toy_settings(max_running=2, max_waiting=4), lambda: script_engine(script)) as server,
        ThreadPoolExecutor(60) as pool,
    ):
        burst = [pool.submit(chat, server) for _ in range(60)]
        while not all(each.done() for each in burst):
            most = max(most, server.agent.scheduler.num_waiting)
            time.sleep(0.002)
    responses = [each.result() for each in burst]
    assert {response.status_code for response in responses} <= {200, 429, 503}
    assert most <= 4
    admitted = [response for response in responses if response.status_code == 200]
    assert len(admitted) >= 6
    assert {response.json()["choices"][0]["message"]["content"] for response in admitted} == {LONG}
    for response in responses:
        if response.status_code != 200:
            assert 1 <= int(response.headers["retry-after"]) <= 60


def test_D12_health_while_the_model_works() -> None:
    """The event loop waits for the model, or the worker is dead and requests hang (vllm-mlx#261, mlx-lm#1776).

    Here: inference has a thread of its own; when it dies the service says that it isn't ready, and requests get 503.
    """
    script = Script(LONG)
    script.gate.clear()
    with run_server(toy_settings(), lambda: script_engine(script)) as server, ThreadPoolExecutor(1) as pool:
        try:
            busy = pool.submit(chat, server, max_tokens=3)
            wait_until(lambda: server.agent.scheduler.num_running == 1)
            for _ in range(3):
                assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            assert not busy.done()
        finally:
            script.gate.set()
        assert busy.result().status_code == 200
        server.agent.engine.thread.stop()
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert error_of(chat(server), 503)["code"] == "engine_stopped"


def test_D12_a_broken_pass_in_the_cloud_is_told_and_over() -> None:
    decoder = TableDecoder()
    with running_cloud(decoder) as cloud, httpx.Client(base_url=cloud.url) as client:
        cloud.service.thread.stop()
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        opening = {"tokens": list(PROMPT), "prompt_len": len(PROMPT)}
        message = {"session_id": "session-0001", "round": 1, "opening": opening}
        assert client.post("/v1/verify", json=message).status_code == 503
