"""Killed, frozen, restarted, repeated, reordered, slowed: no answer is lost and none is altered. Real processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from edge_agent.circuit_breaker import CircuitBreaker
from edge_agent.cloud_client import CloudTimeouts
from edge_agent.cloud_verifier import CloudVerifier
from edge_agent.decision import Mode
from edge_agent.request import GenerationRequest, Privacy
from edge_agent.round import FinishReason, Origin, Round
from shared.acceptance import Draft
from shared.causal_lm import Logits
from shared.errors import CloudUnavailableError
from shared.protocol import tokens_crc
from shared.sampling import Sampler, SamplingParams
from tests.cloud_edge import (
    PROMPT,
    PlannedController,
    always,
    cloud_client,
    expected,
    positions_of,
    rounds_of,
    tokens_of,
)
from tests.cloud_toy import CloudProcess, RunningCloud, running_cloud
from tests.redis_server import RedisServer
from tests.tcp_proxy import Fault, HttpProxy, LossyLink, TcpProxy

NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=11, temperature=0.9, frequency_penalty=0.3, top_p=0.95)
CLOUD_MODES = (Mode.CLOUD_VERIFY, Mode.CLOUD_GENERATE)
SECRET = "a secret for the store"
Forward = Callable[[Sequence[int], int], Logits]
IMPATIENT = CloudTimeouts(connect_s=1.0, read_s=0.3, per_token_s=0.0, forget_s=0.3)


def request(sampling: SamplingParams = GREEDY, num_tokens: int = NUM_TOKENS) -> GenerationRequest:
    return GenerationRequest(PROMPT, num_tokens, sampling)


def assert_whole(rounds: list[Round], asked: GenerationRequest) -> None:
    """Nothing lost, nothing altered, nothing twice; the origins add up."""
    assert tokens_of(rounds) == expected(asked)
    assert positions_of(rounds) == list(range(len(asked.prompt), len(asked.prompt) + asked.max_tokens))
    assert rounds[-1].finish_reason is FinishReason.LENGTH
    origins = [event.origin for round in rounds for event in round.tokens]
    assert sum(origins.count(origin) for origin in Origin) == asked.max_tokens


def when_reached(position: int, act: Callable[[], None]) -> Callable[[Round], None]:
    """Acts once, after the round that made the answer's token at `position`."""
    done: list[bool] = []

    def after_round(round: Round) -> None:
        if not done and round.tokens[-1].position - len(PROMPT) >= position:
            done.append(True)
            act()

    return after_round


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_handoffs_in_any_order_leave_no_gap(sampling: SamplingParams, gamma: int) -> None:
    """Device, cloud, device, … in one answer."""
    orders = [
        [Mode.LOCAL_SPECULATIVE, Mode.CLOUD_VERIFY, Mode.LOCAL_DIRECT, Mode.CLOUD_GENERATE],
        [Mode.CLOUD_GENERATE, Mode.CLOUD_VERIFY],
        [Mode.CLOUD_VERIFY, Mode.CLOUD_VERIFY, Mode.LOCAL_DIRECT],
    ]

    async def scenario(url: str) -> None:
        async with cloud_client(url) as client:
            for order in orders:
                controller = PlannedController(lambda state, order=order: order[state.round % len(order)], gamma)
                rounds = await rounds_of(client, request(sampling), controller)
                assert_whole(rounds, request(sampling))
                assert controller.failures == 0
                assert {event.origin for round in rounds for event in round.tokens} >= {Origin.CLOUD}

    with running_cloud() as cloud:
        asyncio.run(scenario(cloud.url))
        assert len(cloud.service.sessions) == 0


@pytest.mark.parametrize("mode", CLOUD_MODES)
def test_the_cloud_killed_at_each_of_the_first_30_positions(mode: Mode, tmp_path: Path) -> None:
    """The device goes on; the cloud is back for the next answer."""

    async def scenario(cloud: CloudProcess) -> None:
        for position in range(30):
            async with cloud_client(cloud.url, timeouts=IMPATIENT) as client:
                controller = PlannedController(always(mode), gamma=1)
                rounds = await rounds_of(client, request(), controller, after_round=when_reached(position, cloud.kill))
                assert_whole(rounds, request())
                assert controller.failures > 0
            cloud.start()

    with CloudProcess(tmp_path / "log", pass_s=0.001) as cloud:
        asyncio.run(scenario(cloud))


@pytest.mark.parametrize("mode", CLOUD_MODES)
@pytest.mark.parametrize("position", [0, 1, 7, 20])
def test_a_request_that_may_not_use_the_device_says_so(mode: Mode, position: int, tmp_path: Path) -> None:
    async def scenario(cloud: CloudProcess) -> None:
        async with cloud_client(cloud.url, timeouts=IMPATIENT) as client:
            controller = PlannedController(always(mode), gamma=1, fallback=False)
            kill = when_reached(position, cloud.kill)
            with pytest.raises(CloudUnavailableError):
                await rounds_of(client, request(), controller, after_round=kill)

    with CloudProcess(tmp_path / "log", pass_s=0.001) as cloud:
        asyncio.run(scenario(cloud))


@pytest.mark.parametrize("mode", CLOUD_MODES)
def test_a_cloud_that_restarts_in_the_middle_goes_on_with_the_same_text(mode: Mode, tmp_path: Path) -> None:
    def restart() -> None:
        cloud.kill()
        cloud.start()

    async def scenario() -> None:
        for position in (0, 3, 17):
            async with cloud_client(cloud.url) as client:
                controller = PlannedController(always(mode), gamma=2, fallback=False)
                rounds = await rounds_of(
                    client, request(SEEDED), controller, after_round=when_reached(position, restart)
                )
                assert_whole(rounds, request(SEEDED))
                assert {event.origin for round in rounds for event in round.tokens} <= {Origin.CLOUD, Origin.DRAFT}

    with CloudProcess(tmp_path / "log", pass_s=0.001) as cloud:
        asyncio.run(scenario())


@pytest.mark.parametrize("mode", CLOUD_MODES)
def test_a_frozen_cloud_is_given_up_and_found_again(mode: Mode, tmp_path: Path) -> None:
    async def scenario(cloud: CloudProcess) -> None:
        breaker = CircuitBreaker(threshold=2, rest_s=0.05)
        async with cloud_client(cloud.url, timeouts=IMPATIENT, breaker=breaker) as client:
            for position in (0, 9):
                freeze = when_reached(position, lambda: cloud.signal(signal.SIGSTOP))
                controller = PlannedController(always(mode), gamma=2)
                rounds = await rounds_of(client, request(), controller, after_round=freeze)
                assert_whole(rounds, request())
                assert controller.failures > 0
                cloud.signal(signal.SIGCONT)
                async with asyncio.timeout(60):
                    while not client.link_state.healthy:
                        await asyncio.sleep(0.06)
                        try:
                            await client.handshake()
                        except CloudUnavailableError:
                            continue
        async with cloud_client(cloud.url) as client:
            controller = PlannedController(always(mode), gamma=2, fallback=False)
            assert_whole(await rounds_of(client, request(), controller), request())

    with CloudProcess(tmp_path / "log", pass_s=0.001) as cloud:
        asyncio.run(scenario(cloud))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "fault", [Fault.DUPLICATE, Fault.REPEAT_LATE, Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.CUT_REPLY]
)
def test_lost_repeated_and_reordered_messages_change_nothing(sampling: SamplingParams, fault: Fault) -> None:
    """Every second exchange suffers; what is lost is asked for again, and the cloud alone makes the text."""

    async def scenario(port: int) -> HttpProxy:
        proxy = HttpProxy(port, lambda path, number: fault if number % 2 else Fault.NONE)
        async with proxy.running() as proxied, cloud_client(f"http://127.0.0.1:{proxied}") as client:
            controller = PlannedController(always(Mode.CLOUD_VERIFY), gamma=3, fallback=False)
            assert_whole(await rounds_of(client, request(sampling), controller), request(sampling))
        return proxy

    with running_cloud() as cloud:
        proxy = asyncio.run(scenario(int(cloud.url.rsplit(":", 1)[1])))
        assert proxy.faults.count(fault) > 3
        # A late repetition of the last round is answered as before; that of an older one, or after the end, is refused.
        assert set(proxy.late_statuses) <= {200, 204, 409, 410}
        assert fault is not Fault.REPEAT_LATE or proxy.late_statuses
        assert len(cloud.service.sessions) == 0


def test_an_old_reply_in_a_new_ones_place_is_noticed() -> None:
    async def scenario(port: int) -> None:
        proxy = HttpProxy(port, lambda path, number: Fault.OLD_REPLY if number in (3, 7) else Fault.NONE)
        async with proxy.running() as proxied, cloud_client(f"http://127.0.0.1:{proxied}") as client:
            controller = PlannedController(always(Mode.CLOUD_VERIFY), gamma=3)
            assert_whole(await rounds_of(client, request(), controller), request())
            assert controller.failures == 2

    with running_cloud() as cloud:
        asyncio.run(scenario(int(cloud.url.rsplit(":", 1)[1])))


def test_a_stream_that_is_cut_again_and_again_goes_on_where_it_was() -> None:
    async def scenario(port: int) -> HttpProxy:
        proxy = HttpProxy(port, lambda path, number: Fault.CUT_REPLY if number < 4 else Fault.NONE)
        async with proxy.running() as proxied, cloud_client(f"http://127.0.0.1:{proxied}") as client:
            controller = PlannedController(always(Mode.CLOUD_GENERATE), fallback=False)
            rounds = await rounds_of(client, request(SEEDED, 60), controller)
            assert_whole(rounds, request(SEEDED, 60))
        return proxy

    with running_cloud() as cloud:
        proxy = asyncio.run(scenario(int(cloud.url.rsplit(":", 1)[1])))
        assert proxy.faults.count(Fault.CUT_REPLY) == 4


@pytest.mark.parametrize("delay_s", [0.01, 0.1])
def test_slow_and_broken_connections_change_nothing(delay_s: float) -> None:
    async def scenario(port: int) -> None:
        proxy = TcpProxy(port, delay_s)
        async with proxy.running() as proxied, cloud_client(f"http://127.0.0.1:{proxied}") as client:
            for mode in CLOUD_MODES:
                controller = PlannedController(always(mode), gamma=3, fallback=False)
                cut = when_reached(10, proxy.cut)
                assert_whole(await rounds_of(client, request(), controller, after_round=cut), request())
            rtt_s = client.link_state.rtt_s
            assert rtt_s is not None
            assert rtt_s > delay_s

    with running_cloud() as cloud:
        asyncio.run(scenario(int(cloud.url.rsplit(":", 1)[1])))


@pytest.mark.slow
@pytest.mark.parametrize("mode", CLOUD_MODES)
def test_a_link_that_loses_segments_changes_nothing(mode: Mode) -> None:
    """200 ms there and back, 2 of 100 segments lost: emulated, as most kernels lack netem (below)."""
    asked = [request(SamplingParams(seed=number, temperature=0.9)) for number in range(8)]

    async def scenario(port: int) -> None:
        link = LossyLink(port, 0.1, 0.02)
        patient = CloudTimeouts(connect_s=20, read_s=60)
        async with link.running() as proxied, cloud_client(f"http://127.0.0.1:{proxied}", timeouts=patient) as client:
            while link.num_lost < 5:
                controllers = [PlannedController(always(mode), gamma=4, fallback=False) for _ in asked]
                answers = await asyncio.gather(*map(rounds_of, [client] * len(asked), asked, controllers))
                for rounds, each in zip(answers, asked, strict=True):
                    assert_whole(rounds, each)
            rtt_s = client.link_state.rtt_s
            assert mode is Mode.CLOUD_GENERATE or (rtt_s is not None and rtt_s > 0.2)

    with running_cloud() as cloud:
        asyncio.run(scenario(int(cloud.url.rsplit(":", 1)[1])))


@contextmanager
def two_replicas(directory: Path, redis: RedisServer, secret: str | None) -> Iterator[list[CloudProcess]]:
    environment = {"SOUSCHEF_REDIS_URL": redis.url, "SOUSCHEF_REDIS_TIMEOUT_S": "10"}
    environment |= {"SOUSCHEF_STORE_KEY": secret} if secret else {}
    with (
        CloudProcess(directory / "a.log", **environment) as first,
        CloudProcess(directory / "b.log", **environment) as second,
    ):
        yield [first, second]


class Alternating:
    """A client that sends each round to the next replica: the worst of load balancers."""

    def __init__(self, clients: list[object]) -> None:
        self._clients = clients
        self._turn = 0

    def __getattr__(self, name: str) -> object:
        self._turn += name == "verify"
        return getattr(self._clients[self._turn % len(self._clients)], name)


@asynccontextmanager
async def alternating(replicas: list[CloudProcess]) -> AsyncIterator[Alternating]:
    async with cloud_client(replicas[0].url) as first, cloud_client(replicas[1].url) as second:
        yield Alternating([first, second])


@pytest.mark.parametrize("secret", [SECRET, None], ids=["sealed", "hashes only"])
def test_a_session_goes_on_at_another_replica_every_round(secret: str | None, tmp_path: Path) -> None:
    async def scenario(replicas: list[CloudProcess]) -> None:
        async with alternating(replicas) as client:
            verifier = CloudVerifier(client, request(SEEDED))  # type: ignore[arg-type]
            sampler, tokens = Sampler(SEEDED, prompt=PROMPT), list(PROMPT)
            answer = expected(request(SEEDED))
            while len(tokens) < len(PROMPT) + 20:
                done = len(tokens) - len(PROMPT)
                draft = Draft((answer[done], (answer[done + 1] + done % 2) % 16))
                tokens += (await verifier.verify(tokens, draft, sampler)).tokens(draft)
            assert tokens[len(PROMPT) :] == answer[: len(tokens) - len(PROMPT)]
            await verifier.release(tokens)

    with RedisServer(tmp_path) as redis, two_replicas(tmp_path, redis, secret) as replicas:
        asyncio.run(scenario(replicas))


@pytest.mark.parametrize("misfortune", ["kill", "freeze", "flush", "restart"])
def test_an_unlucky_redis_stops_no_answer(misfortune: str, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        actions: dict[str, Callable[[], None]] = {
            "kill": redis.kill,
            "freeze": lambda: redis.signal(signal.SIGSTOP),
            "flush": redis.flush,
            "restart": lambda: (redis.kill(), redis.start())[1],
        }
        environment = {"SOUSCHEF_REDIS_URL": redis.url, "SOUSCHEF_STORE_KEY": SECRET, "SOUSCHEF_REDIS_TIMEOUT_S": "0.1"}

        async def scenario(cloud: CloudProcess) -> None:
            async with cloud_client(cloud.url) as client:
                for mode in CLOUD_MODES:
                    controller = PlannedController(always(mode), gamma=2, fallback=False)
                    strike = when_reached(8, actions[misfortune])
                    rounds = await rounds_of(client, request(SEEDED), controller, after_round=strike)
                    assert_whole(rounds, request(SEEDED))
                    if misfortune == "kill":
                        redis.start()
                redis.signal(signal.SIGCONT)
                controller = PlannedController(always(Mode.CLOUD_VERIFY), gamma=2, fallback=False)
                assert_whole(await rounds_of(client, request(), controller), request())

        try:
            with CloudProcess(tmp_path / "log", **environment) as cloud:
                asyncio.run(scenario(cloud))
        finally:
            redis.signal(signal.SIGCONT)


def _held(forward: Forward, entered: threading.Event, released: threading.Event) -> Forward:
    """A pass that says when it begins, and goes on when it is let."""

    def held(tokens: Sequence[int], num_logits: int) -> Logits:
        entered.set()
        assert released.wait(60)
        return forward(tokens, num_logits)

    return held


def test_two_replicas_with_one_session_advance_it_once(tmp_path: Path) -> None:
    """While the first computes a round, the second takes the session over: only its reply counts."""
    answer = expected(request())

    def body(round_number: int, num_known: int) -> dict[str, object]:
        tokens = [*PROMPT, *answer[: num_known - len(PROMPT)]]
        opening = {"tokens": tokens, "prompt_len": len(PROMPT), "sampling": {"temperature": 0}}
        later = {"prefix_len": num_known, "prefix_crc": tokens_crc(tokens)}
        return {
            "session_id": "session-0001",
            "round": round_number,
            "draft_tokens": answer[num_known - 5 : num_known - 3],
            **({"opening": opening} if round_number == 0 else later),
        }

    with RedisServer(tmp_path) as redis:
        flags = {"redis_url": redis.url, "store_key": SECRET, "redis_timeout_s": 10.0}
        with running_cloud(**flags) as first, running_cloud(**flags) as second, ThreadPoolExecutor(1) as pool:

            def verify(cloud: RunningCloud, round_number: int, num_known: int) -> httpx.Response:
                return httpx.post(f"{cloud.url}/v1/verify", json=body(round_number, num_known), timeout=60)

            assert verify(first, 0, 5).status_code == 200
            computing, won = threading.Event(), threading.Event()
            for cache in first.decoder.caches:
                cache.forward = _held(cache.forward, computing, won)  # type: ignore[method-assign]
            overtaken = pool.submit(verify, first, 1, 8)
            assert computing.wait(60)
            winner = verify(second, 1, 8)
            won.set()
            loser = overtaken.result()
            assert (winner.status_code, loser.status_code) == (200, 410)
            assert loser.json()["error"]["code"] == "claim_lost"
            assert len(first.service.sessions) == 0
            # The overtaken replica takes it over again in its turn, with the state that the other left.
            after = verify(first, 2, 11)
            assert (after.json()["accepted"], after.json()["next_token"]) == (2, answer[8])


def test_the_store_is_used_again_once_it_is_back(tmp_path: Path) -> None:
    """What was verified while Redis was down is there for another replica afterwards."""
    with RedisServer(tmp_path) as redis, two_replicas(tmp_path, redis, SECRET) as replicas:

        async def scenario() -> None:
            answer = expected(request())
            async with cloud_client(replicas[0].url) as first, cloud_client(replicas[1].url) as second:
                verifier = CloudVerifier(first, request())
                tokens, sampler = list(PROMPT), Sampler(GREEDY)

                async def next_round() -> None:
                    draft = Draft(tuple(answer[len(tokens) - 5 : len(tokens) - 3]))
                    tokens.extend((await verifier.verify(tokens, draft, sampler)).tokens(draft))

                await next_round()
                redis.kill()
                await next_round()
                redis.start()
                await asyncio.sleep(1.2)  # The store is left alone for a second after a failure.
                await next_round()
                session_id = verifier._session_id
                verifier._client = second
                replicas[0].kill()
                await next_round()
                assert verifier._session_id == session_id, "the session was opened anew instead of taken over"
                assert tokens[5:] == answer[: len(tokens) - 5]

        asyncio.run(scenario())


@pytest.mark.slow
def test_memory_stays_flat_over_a_thousand_requests() -> None:
    psutil = pytest.importorskip("psutil")

    async def scenario(url: str) -> list[int]:
        sizes = []
        async with cloud_client(url) as client:
            for block in range(5):
                for number in range(200):
                    mode = CLOUD_MODES[number % 2]
                    asked = GenerationRequest((1 + block, number % 16, 3), 8, SamplingParams(seed=number))
                    await rounds_of(client, asked, PlannedController(always(mode)), draft_blend=None)
                sizes.append(psutil.Process().memory_info().rss)
        return sizes

    with running_cloud(requests_per_minute=100_000) as cloud:
        sizes = asyncio.run(scenario(cloud.url))
        assert len(cloud.service.sessions) == 0
    assert sizes[-1] - sizes[1] < 8 * 2**20, sizes


def test_private_requests_reach_no_cloud() -> None:
    """The verifier is lazy: what never asks it, never connects."""

    async def scenario() -> None:
        connections: list[int] = []

        async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(1)
            writer.close()

        server = await asyncio.start_server(record, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        asked = GenerationRequest(PROMPT, NUM_TOKENS, GREEDY, privacy=Privacy.ON_DEVICE)
        async with cloud_client(f"http://127.0.0.1:{port}") as client:
            controller = PlannedController(always(Mode.LOCAL_SPECULATIVE))
            assert_whole(await rounds_of(client, asked, controller), asked)
        server.close()
        assert not connections

    asyncio.run(scenario())


can_netem = os.geteuid() == 0 and shutil.which("tc") and shutil.which("ip")


@pytest.mark.slow
@pytest.mark.skipif(not can_netem, reason="this kernel or user can make no slow link")
def test_a_link_of_200_ms_that_loses_2_percent() -> None:
    """In a network namespace of its own, so that nobody else's loopback is slowed."""
    script = """
import asyncio
from edge_agent.decision import Mode
from edge_agent.cloud_client import CloudTimeouts
from tests.cloud_edge import PlannedController, always, cloud_client, rounds_of
from tests.cloud_toy import running_cloud
from tests.test_cloud_faults import assert_whole, request

async def scenario(url):
    async with cloud_client(url, timeouts=CloudTimeouts(connect_s=20, read_s=60)) as client:
        for mode in (Mode.CLOUD_VERIFY, Mode.CLOUD_GENERATE):
            rounds = await rounds_of(client, request(), PlannedController(always(mode), gamma=4, fallback=False))
            assert_whole(rounds, request())
        assert client.link_state.rtt_s > 0.2

with running_cloud() as cloud:
    asyncio.run(scenario(cloud.url))
"""
    commands = 'ip link set lo up && tc qdisc add dev lo root netem delay 100ms loss 2% && exec "$@"'
    finished = subprocess.run(
        ["unshare", "--net", "sh", "-c", commands, "sh", sys.executable, "-c", script],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "Error: Specified qdisc kind is unknown" in finished.stderr or "Operation not permitted" in finished.stderr:
        pytest.skip("this kernel has no netem")
    assert finished.returncode == 0, finished.stderr
