"""The device's and the policy's routes, on a real server with a policy."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from edge_agent.config import EdgeSettings
from edge_agent.cost_model import CostModel
from edge_agent.device import Device
from edge_agent.energy import CpuTimeMeter
from edge_agent.engine import Engine
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.thresholds import PRESETS, Preset
from tests.servers import RunningServer, run_agent, wait_until
from tests.toy_engine import Script, script_engine, toy_settings

CURVE = [0.010, 0.011, 0.012, 0.013, 0.014]


async def policy_engine(device: Device, senses: Senses) -> Engine:
    engine = script_engine(Script("ab" * 40))
    engine.policy = PolicyEngine(
        CostModel(CURVE), PRESETS[Preset.PHONE], drafters=("ngram",), senses=senses, meter=CpuTimeMeter(4.0)
    )
    return engine


def serve(settings: EdgeSettings) -> Iterator[RunningServer]:
    with run_agent(settings, policy_engine) as server:
        yield server


@pytest.fixture
def real_device() -> Iterator[RunningServer]:
    yield from serve(toy_settings(sensors="push"))


@pytest.fixture
def simulated_device() -> Iterator[RunningServer]:
    yield from serve(toy_settings(sensors="simulated:phone"))


def ask(server: RunningServer, **options: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "temperature": 0, "souschef": options}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    report: dict[str, object] = response.json()["souschef"]
    return report


def test_a_device_that_told_nothing_is_unknown(real_device: RunningServer) -> None:
    device = httpx.get(f"{real_device.url}/v1/device").json()
    assert (device["age_s"], device["reading"], device["source"]) == (None, None, "none")
    assert device["state"]["temperature_c"] is None
    metrics = httpx.get(f"{real_device.url}/metrics").text
    assert "souschef_edge_device_temperature_celsius NaN" in metrics


def test_a_push_reaches_the_policy_and_the_metrics(real_device: RunningServer) -> None:
    url = real_device.url
    for _ in range(3):  # One reading alone could be an outlier.
        reply = httpx.post(f"{url}/v1/device", json={"temperature_c": 47.0, "battery_percent": 60.0, "charging": False})
        assert reply.status_code == 200
    assert reply.json()["state"]["temperature_c"] == 47.0
    assert reply.json()["age_s"] < 60
    report = ask(real_device)
    assert report["decisions"][0]["mode"] == "local_direct"  # type: ignore[index]
    assert report["decisions"][0]["reason"] in ("device_hot", "device_critical")  # type: ignore[index]
    metrics = httpx.get(f"{url}/metrics").text
    assert "souschef_edge_device_temperature_celsius 47.0" in metrics
    assert "souschef_edge_device_battery_percent 60.0" in metrics
    policy = httpx.get(f"{url}/v1/policy").json()
    assert policy["mode"] == "local_direct"
    assert policy["heat_rung"] in ("offload", "critical")


@pytest.mark.parametrize(
    "body",
    [{"temperature_c": "hot"}, {"temperature_c": 900}, {"battery_percent": -1}, {"unknown": 1}, {"charging": 2}],
)
def test_a_push_that_makes_no_sense_is_refused(real_device: RunningServer, body: dict[str, object]) -> None:
    reply = httpx.post(f"{real_device.url}/v1/device", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(body))


def test_energy_is_reported_and_counted_with_its_source(real_device: RunningServer) -> None:
    report = ask(real_device)
    assert report["energy_source"] == "cpu_time_model"
    assert float(report["energy_j"]) > 0  # type: ignore[arg-type]
    wait_until(lambda: 'source="cpu_time_model"' in httpx.get(f"{real_device.url}/metrics").text)


def test_thresholds_change_from_the_next_round_on(real_device: RunningServer) -> None:
    url = real_device.url
    assert ask(real_device)["draft_tokens"] > 0  # type: ignore[operator]
    changed = httpx.put(f"{url}/v1/policy", json={"max_gamma": 0})
    assert changed.status_code == 200
    assert changed.json()["thresholds"]["max_gamma"] == 0
    assert ask(real_device)["draft_tokens"] == 0


@pytest.mark.parametrize("changes", [{"max_gama": 3}, {"max_gamma": 99}, {"temperature_c": [[1, 2]]}])
def test_thresholds_that_make_no_sense_are_refused(real_device: RunningServer, changes: dict[str, object]) -> None:
    before = httpx.get(f"{real_device.url}/v1/policy").json()["thresholds"]
    reply = httpx.put(f"{real_device.url}/v1/policy", json=changes)
    assert reply.status_code == 400
    assert next(iter(changes)) in reply.json()["error"]["message"]
    assert httpx.get(f"{real_device.url}/v1/policy").json()["thresholds"] == before


def test_profiles_belong_to_simulated_devices(real_device: RunningServer) -> None:
    for reply in (
        httpx.get(f"{real_device.url}/v1/device/profiles"),
        httpx.post(f"{real_device.url}/v1/device/profile", json={"profile": "phone"}),
    ):
        assert reply.status_code == 404
        assert "simulated" in reply.json()["error"]["message"]


def test_a_simulated_device_reads_itself_and_can_be_another(simulated_device: RunningServer) -> None:
    url = simulated_device.url
    wait_until(lambda: httpx.get(f"{url}/v1/device").json()["source"] == "simulated:phone")
    assert httpx.get(f"{url}/v1/device/profiles").json()["current"] == "phone"
    assert httpx.post(f"{url}/v1/device/profile", json={"profile": "board"}).json()["current"] == "board"
    wait_until(lambda: httpx.get(f"{url}/v1/device").json()["source"] == "simulated:board")
    refused = httpx.post(f"{url}/v1/device/profile", json={"profile": "toaster"})
    assert refused.status_code == 400
    assert "phone" in refused.json()["error"]["message"]


def test_a_push_stands_over_the_simulation_until_the_profile_is_chosen_anew(simulated_device: RunningServer) -> None:
    url = simulated_device.url
    httpx.post(f"{url}/v1/device", json={"temperature_c": 50.0})
    wait_until(lambda: httpx.get(f"{url}/v1/device").json()["state"]["temperature_c"] == 50.0)
    assert httpx.get(f"{url}/v1/device").json()["state"]["battery_percent"] is not None
    httpx.post(f"{url}/v1/device/profile", json={"profile": "phone"})
    wait_until(lambda: (httpx.get(f"{url}/v1/device").json()["state"]["temperature_c"] or 99) < 40)


def test_only_the_admin_changes_policy_and_profile() -> None:
    settings = toy_settings(sensors="simulated:phone", api_keys=("user-key",), admin_key="admin-key")
    for server in serve(settings):
        user, admin = ({"Authorization": f"Bearer {key}"} for key in ("user-key", "admin-key"))
        assert httpx.put(f"{server.url}/v1/policy", json={}, headers=user).status_code in (401, 403)
        assert httpx.put(f"{server.url}/v1/policy", json={}, headers=admin).status_code == 200
        assert httpx.post(f"{server.url}/v1/device", json={}, headers=user).status_code == 200
        assert httpx.get(f"{server.url}/v1/device").status_code == 401
