"""Both stores, one behaviour: fences, tombstones, limits. And what Redis gets to see."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cloud_service.redis_store import RedisStore
from cloud_service.sealer import Sealer
from cloud_service.session_store import (
    ClaimLostError,
    MemoryStore,
    SessionKey,
    SessionState,
    SessionStore,
    StoreUnavailableError,
)
from shared.errors import ConflictError
from shared.sampling import SamplingParams
from tests.redis_server import RedisServer
from tests.tcp_proxy import TcpProxy

SECRET = "a secret for the store"
KEY = SessionKey("tenant-a", "session-0001")
STATE = SessionState(tokens=(31337, 31338), prompt_len=1, sampling=SamplingParams(seed=3), round=4, request_hash="h")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@asynccontextmanager
async def redis_store(url: str, secret: str | None = SECRET, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, Sealer(secret), **{"ttl_s": 60.0, "timeout_s": 5.0, **options})
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def opened(kind: str, server: RedisServer) -> AsyncIterator[SessionStore]:
    if kind == "memory":
        yield MemoryStore(60.0)
        return
    server.flush()
    async with redis_store(server.url) as store:
        yield store


both = pytest.mark.parametrize("kind", ["memory", "redis"])


@both
def test_a_session_moves_between_replicas_and_only_its_owner_advances_it(kind: str, server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(kind, server) as store:
            first = await store.open(KEY, "a")
            await store.advance(KEY, "a", first.fence, STATE)
            moved = await store.claim(KEY, "b")
            assert moved is not None
            assert moved.state == STATE
            assert moved.fence > first.fence
            with pytest.raises(ClaimLostError):
                await store.advance(KEY, "a", first.fence, STATE)
            later = STATE.model_copy(update={"round": 5})
            await store.advance(KEY, "b", moved.fence, later)
            again = await store.claim(KEY, "b")
            assert again is not None
            assert (again.fence, again.state) == (moved.fence, later)

    asyncio.run(scenario())


@both
def test_two_replicas_that_claim_at_once_have_one_winner(kind: str, server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(kind, server) as store:
            claim = await store.open(KEY, "z")
            await store.advance(KEY, "z", claim.fence, STATE)
            names = [f"replica-{i}" for i in range(8)]
            claims = await asyncio.gather(*(store.claim(KEY, name) for name in names))
            fences = [claim.fence for claim in claims if claim is not None]
            assert len(set(fences)) == 8
            outcomes = await asyncio.gather(
                *(store.advance(KEY, name, fence, STATE) for name, fence in zip(names, fences, strict=True)),
                return_exceptions=True,
            )
            assert [outcome for outcome in outcomes if outcome is None] == [None]
            assert outcomes[fences.index(max(fences))] is None

    asyncio.run(scenario())


@both
def test_an_ended_session_stays_ended(kind: str, server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(kind, server) as store:
            claim = await store.open(KEY, "a")
            await store.end(KEY)
            assert await store.claim(KEY, "a") is None
            with pytest.raises(ConflictError):
                await store.advance(KEY, "a", claim.fence, STATE)
            with pytest.raises(ConflictError):
                await store.open(KEY, "a")

    asyncio.run(scenario())


@both
def test_tenants_do_not_meet_under_one_id(kind: str, server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(kind, server) as store:
            claim = await store.open(KEY, "a")
            await store.advance(KEY, "a", claim.fence, STATE)
            assert await store.claim(SessionKey("tenant-b", KEY.session_id), "a") is None

    asyncio.run(scenario())


@both
def test_a_limit_holds_for_its_window(kind: str, server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(kind, server) as store:
            waits = await asyncio.gather(*(store.allow("tenant", 3, 60.0) for _ in range(5)))
            assert sorted(waits)[:3] == [0.0, 0.0, 0.0]
            assert all(0 < wait <= 60 for wait in sorted(waits)[3:])
            assert await store.allow("other", 3, 60.0) == 0.0

    asyncio.run(scenario())


def test_memory_forgets_after_its_time() -> None:
    async def scenario() -> None:
        now = 0.0
        store = MemoryStore(10.0, clock=lambda: now)
        claim = await store.open(KEY, "a")
        await store.advance(KEY, "a", claim.fence, STATE)
        assert store.num_sessions == 1
        now = 11.0
        assert store.num_sessions == 0
        assert await store.claim(KEY, "b") is None

    asyncio.run(scenario())


def test_memory_is_bounded() -> None:
    async def scenario() -> None:
        store = MemoryStore(10.0, max_sessions=5)
        for number in range(20):
            await store.open(SessionKey("t", str(number)), "a")
            await store.allow(str(number), 1, 60)
        assert store.num_sessions == 5

    asyncio.run(scenario())


def test_everything_in_redis_expires_and_tells_nothing(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened("redis", server) as store:
            claim = await store.open(KEY, "a")
            await store.advance(KEY, "a", claim.fence, STATE)
            await store.end(SessionKey("tenant-a", "session-0002"))
            await store.open(SessionKey("tenant-a", "session-0003"), "a")
            await store.claim(KEY, "b")
            await store.allow("tenant-a", 5, 60.0)

    asyncio.run(scenario())
    with server.client() as client:
        keys = client.keys("*")
        assert len(keys) == 4
        assert all(0 < client.pttl(key) <= 60_000 for key in keys)
        dumped = b" ".join(keys + [part for key in keys if client.type(key) == b"hash" for part in client.hvals(key)])
    for canary in (b"tenant-a", b"session-0001", b"31337", b"tokens", b"sampling"):
        assert canary not in dumped


def test_without_a_secret_no_ids_are_kept(server: RedisServer) -> None:
    async def scenario() -> None:
        server.flush()
        async with redis_store(server.url, secret=None) as store:
            claim = await store.open(KEY, "a")
            await store.advance(KEY, "a", claim.fence, STATE)
            moved = await store.claim(KEY, "b")
            assert moved is not None
            assert moved.state is None

    asyncio.run(scenario())
    with server.client() as client:
        assert all(client.hget(key, "state") in (None, b"") for key in client.keys("*session*"))


def test_another_secret_or_another_name_reads_nothing() -> None:
    sealed = Sealer(SECRET).seal(b"tokens", "name")
    assert Sealer(SECRET).unseal(sealed, "name") == b"tokens"
    assert Sealer(SECRET).unseal(sealed, "other") is None
    assert Sealer("another secret entirely").unseal(sealed, "name") is None
    assert Sealer(None).unseal(sealed, "name") is None
    assert Sealer(SECRET).seal(b"tokens", "name") != sealed


def test_a_fence_grows_even_over_a_flush(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened("redis", server) as store:
            before = await store.open(KEY, "a")
            server.flush()
            after = await store.open(KEY, "b")
            assert after.fence > before.fence
            with pytest.raises(ClaimLostError):
                await store.advance(KEY, "a", before.fence, STATE)

    asyncio.run(scenario())


def test_a_flush_or_a_lost_script_costs_nothing(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened("redis", server) as store:
            claim = await store.open(KEY, "a")
            server.flush()
            with server.client() as client:
                client.script_flush()
            await store.advance(KEY, "a", claim.fence, STATE)
            found = await store.claim(KEY, "a")
            assert found is not None
            assert found.state == STATE

    asyncio.run(scenario())


def test_a_cancelled_command_never_shifts_the_replies(server: RedisServer) -> None:
    other = SessionKey("tenant-a", "session-0002")

    async def scenario() -> None:
        server.flush()
        proxy = TcpProxy(server.port)
        async with proxy.running() as port, redis_store(f"redis://127.0.0.1:{port}") as store:
            for key, round_number in ((KEY, 1), (other, 2)):
                claim = await store.open(key, "a")
                await store.advance(key, "a", claim.fence, STATE.model_copy(update={"round": round_number}))
            proxy.delay_s = 0.1
            for _ in range(3):
                task = asyncio.create_task(store.claim(KEY, "a"))
                await asyncio.sleep(0.15)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                found = await store.claim(other, "a")
                assert found is not None
                assert found.state is not None
                assert found.state.round == 2

    asyncio.run(scenario())


def test_a_frozen_or_killed_redis_costs_one_timeout_and_comes_back(tmp_path: Path) -> None:
    async def scenario(server: RedisServer) -> None:
        now = 0.0
        async with redis_store(server.url, timeout_s=1.0, clock=lambda: now) as store:
            claim = await store.open(KEY, "a")
            server.signal(signal.SIGSTOP)
            for _ in range(20):  # The first waits for the timeout, the others don't ask.
                with pytest.raises(StoreUnavailableError):
                    async with asyncio.timeout(60):
                        await store.advance(KEY, "a", claim.fence, STATE)
            server.signal(signal.SIGCONT)
            now = 10.0
            await store.advance(KEY, "a", claim.fence, STATE)
            server.kill()
            with pytest.raises(StoreUnavailableError):
                await store.claim(KEY, "a")
            server.start()
            now = 20.0
            assert await store.claim(KEY, "a") is None
            await store.advance(KEY, "a", claim.fence, STATE)
            found = await store.claim(KEY, "b")
            assert found is not None
            assert found.state == STATE

    with RedisServer(tmp_path) as server:
        asyncio.run(scenario(server))
