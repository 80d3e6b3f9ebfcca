"""The fleet on the cloud's side: both stores behave alike, tenants stay apart, numbers are bounded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloud_service.fleet import MODES, Fleet, FleetFullError, MemoryFleet, Sighting, page, summarise
from cloud_service.redis_fleet import RedisFleet
from cloud_service.redis_scripts import RedisScripts
from cloud_service.sealer import Sealer
from shared.protocol import DeviceReport
from tests.cloud_toy import running_cloud
from tests.redis_server import RedisServer

TTL_S = 60.0


def device_id(number: int) -> str:
    return f"{number:032x}"


def report(number: int, **fields: Any) -> DeviceReport:
    return DeviceReport(device_id=device_id(number), model="toy", **fields)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@asynccontextmanager
async def opened(kind: str, server: RedisServer, ttl_s: float = TTL_S, max_devices: int = 3) -> AsyncIterator[Fleet]:
    fleet: Fleet = MemoryFleet(ttl_s, max_devices)
    if kind == "redis":
        server.flush()
        fleet = RedisFleet(RedisScripts(server.url, 5.0), Sealer("a secret for the store"), ttl_s, max_devices)
    try:
        yield fleet
    finally:
        await fleet.close()


both = pytest.mark.parametrize("kind", ["memory", "redis"])


@both
def test_the_latest_report_of_each_device_is_kept_by_its_tenant(kind: str, server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(kind, server) as fleet:
            await fleet.note("a", report(2, mode="local_direct", gamma=0))
            await fleet.note("a", report(1))
            await fleet.note("a", report(2, mode="local_speculative", gamma=4, acceptance_rate=0.5))
            await fleet.note("b", report(3))
            seen = await fleet.sightings("a")
            assert [sighting.report for sighting in seen] == [
                report(1),
                report(2, mode="local_speculative", gamma=4, acceptance_rate=0.5),
            ]
            assert all(0 <= sighting.age_s < TTL_S for sighting in seen)
            assert [sighting.report.device_id for sighting in await fleet.sightings("b")] == [device_id(3)]
            assert await fleet.sightings("c") == []

    asyncio.run(scenario())


@both
def test_a_device_too_many_is_refused_and_known_ones_are_not(kind: str, server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(kind, server) as fleet:
            for number in range(3):
                await fleet.note("a", report(number))
            with pytest.raises(FleetFullError):
                await fleet.note("a", report(3))
            await fleet.note("a", report(2, heat="offload"))
            await fleet.note("b", report(3))
            assert len(await fleet.sightings("a")) == 3

    asyncio.run(scenario())


@both
def test_silent_devices_are_forgotten_and_make_room(kind: str, server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(kind, server, ttl_s=0.2) as fleet:
            for number in range(3):
                await fleet.note("a", report(number))
            async with asyncio.timeout(60):
                while await fleet.sightings("a"):  # noqa: ASYNC110  (nobody tells when an entry expires)
                    await asyncio.sleep(0.05)
            await fleet.note("a", report(3))

    asyncio.run(scenario())


def test_redis_holds_what_expires_under_names_that_tell_nothing(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened("redis", server) as fleet:
            await fleet.note("tenant-of-a-key", report(1))

    asyncio.run(scenario())
    with server.client() as client:
        names = client.keys()
        assert len(names) == 2
        assert all(0 < client.pttl(name) <= TTL_S * 1e3 for name in names)
        assert not any(b"tenant" in name for name in names)


def test_pages_follow_each_other_without_gap_or_repeat() -> None:
    seen = [Sighting(report(number), 1.0) for number in range(1, 8)]
    found, after = [], device_id(0)
    for size in (3, 3, 1):
        part = page(seen, after, 3)
        assert (part.total, len(part.devices)) == (7, size)
        found += [device.device_id for device in part.devices]
        after = part.next or ""
    assert not after
    assert found == [device_id(number) for number in range(1, 8)]


def test_the_summary_counts_what_an_operator_watches() -> None:
    summary = summarise(
        [
            Sighting(fields, 1.0)
            for fields in (
                report(1, mode="local_speculative", acceptance_rate=0.8, tokens_per_second=30.0),
                report(2, mode="local_speculative", acceptance_rate=0.4, tokens_per_second=20.0, heat="eased"),
                report(3, mode="local_direct", tokens_per_second=10.0, heat="offload"),
                report(4, mode="cloud_generate", tokens_per_second=10.0, heat="critical"),
                report(5),
            )
        ]
    )
    assert summary.by_mode == {
        "local_speculative": 2,
        "local_direct": 1,
        "cloud_verify": 0,
        "cloud_generate": 1,
        "none": 1,
    }
    assert (summary.hot, summary.undrafted) == (2, 2)
    assert summary.acceptance == pytest.approx(0.6)
    assert math.isnan(summarise([]).acceptance)


def metric(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"souschef_cloud_{name} "))


def test_the_routes_keep_tenants_apart_and_metrics_count_all() -> None:
    with running_cloud(api_keys=("key-one", "key-two")) as cloud, httpx.Client(base_url=cloud.url) as client:
        one, two = ({"Authorization": f"Bearer key-{name}"} for name in ("one", "two"))
        hot = report(1, heat="offload", battery_percent=41.0)
        assert client.post("/v1/fleet", content=hot.encode(), headers=one).status_code == 204
        assert client.post("/v1/fleet", content=report(2).encode(), headers=two).status_code == 204
        listed = client.get("/v1/fleet", headers=one).json()
        assert (listed["total"], listed["next"]) == (1, None)
        (device,) = listed["devices"]
        assert {name: device[name] for name in ("device_id", "heat", "battery_percent", "mode")} == {
            "device_id": device_id(1),
            "heat": "offload",
            "battery_percent": 41.0,
            "mode": None,
        }
        text = client.get("/metrics", headers=one).text
        assert metric(text, 'fleet_devices{mode="none"}') == 2
        assert metric(text, "fleet_hot_devices") == 1
        assert text.count("souschef_cloud_fleet_devices{") == len(MODES)
        assert device_id(1) not in text


@pytest.mark.parametrize(
    ("method", "parameters", "body"),
    [
        ("GET", {"limit": "0"}, None),
        ("GET", {"limit": "1001"}, None),
        ("GET", {"after": "someone"}, None),
        ("POST", {}, {"device_id": "someone", "model": "toy"}),
        ("POST", {}, {"device_id": device_id(1), "model": "toy", "prompt": "a secret"}),
        ("POST", {}, {"device_id": device_id(1), "model": "toy", "reason": "Some text"}),
        ("POST", {}, {"device_id": device_id(1), "model": "toy", "acceptance_rate": 2}),
    ],
)
def test_what_is_no_report_is_refused(method: str, parameters: dict[str, str], body: dict[str, Any] | None) -> None:
    with running_cloud() as cloud:
        response = httpx.request(method, f"{cloud.url}/v1/fleet", params=parameters, json=body)
        assert response.status_code == 400
        assert "secret" not in response.text


def test_without_redis_the_fleet_is_503_and_the_metrics_unknown(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path) as redis,
        running_cloud(redis_url=redis.url, redis_timeout_s=0.5) as cloud,
        httpx.Client(base_url=cloud.url, timeout=60) as client,
    ):
        assert client.post("/v1/fleet", content=report(1).encode()).status_code == 204
        assert client.get("/v1/fleet").json()["total"] == 1
        redis.kill()
        for response in (client.post("/v1/fleet", content=report(1).encode()), client.get("/v1/fleet")):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
        assert math.isnan(metric(client.get("/metrics").text, "fleet_hot_devices"))
        redis.start()
