"""The compose stack for real: containers that start, answer, hand over, lose a service under a stream, and stop."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.models.cache import ModelCache
from tests.containers import (
    BASE_IMAGE,
    PYTHON_IMAGE,
    WHEELS_FOLDER,
    Engine,
    EngineUnavailableError,
    Stack,
    make_base_images,
    run_engine,
)
from tests.servers import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SERVICES = ("edge", "cloud", "redis", "prometheus")
LONG = 400
"""Tokens of an answer that lasts while a service is restarted."""
NEVER_END = {"0": -100, "2": -100}
"""SmolLM2's ends of text and of turn."""
IDLE_S = 31.0
"""A health check and two scrapes fall into it."""
IDLE_SHARE = 0.03
"""Of a core, on a machine that starts a program in a container at the cost below."""
START_COST_S = 0.1
"""Processor time of `docker exec CONTAINER true`, charged to the container."""
COOL = {"temperature_c": 33.0, "battery_percent": 90, "charging": True, "headroom": 0.3}
HOT = {"temperature_c": 44.0, "battery_percent": 90, "charging": False, "headroom": 0.95}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def settings(profile: str) -> dict[str, str]:
    return {
        "COMPOSE_PROFILES": profile,
        "EDGE_API_KEYS": "caller",
        "EDGE_ADMIN_KEY": "admin",
        "CLOUD_API_KEY": "between",
        "METRICS_KEY": "metrics",
        "REDIS_PASSWORD": "stored",
        "STORE_KEY": "0123456789abcdef",
        "GRAFANA_ADMIN_PASSWORD": "unused",
        "EDGE_PORT": str(free_port()),
        "EDGE_PRESET": "tiny",
        "CLOUD_PRESET": "tiny",
        "EDGE_SENSORS": "push",
        "EDGE_POLICY": "phone",
        "EDGE_MEMORY": "2g",
        "CLOUD_MEMORY": "2g",
        "PYTHON_IMAGE": PYTHON_IMAGE,
        "REDIS_IMAGE": BASE_IMAGE,
        "PROMETHEUS_IMAGE": BASE_IMAGE,
        "NGINX_IMAGE": BASE_IMAGE,
        "BUILD_PIP_NO_INDEX": "1",
        "BUILD_PIP_FIND_LINKS": WHEELS_FOLDER,
    }


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    try:
        with run_engine() as running:
            make_base_images(running)
            yield running
    except EngineUnavailableError as error:
        pytest.skip(f"no container engine: {error}")


def bring_up(stack: Stack, services: tuple[str, ...], models: Path) -> None:
    stack.compose("build", *services)
    stack.compose("up", "--no-start", *services)
    stack.fill_models(ModelCache().root, models)
    stack.compose("up", "--detach", "--no-build", *services)
    stack.wait_healthy(services)


@pytest.fixture(scope="module")
def stack(engine: Engine, smollm2_directory: Path) -> Iterator[Stack]:
    made = Stack(engine, "souschef", settings("full"))
    try:
        bring_up(made, SERVICES, smollm2_directory)
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "5")


class Client:
    """An app in front of the stack."""

    def __init__(self, stack: Stack) -> None:
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{stack.settings['EDGE_PORT']}",
            headers={"Authorization": "Bearer caller"},
            timeout=120,
        )

    def body(self, num_tokens: int, execution: str) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": "Tell a long story about a lighthouse."}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "logit_bias": NEVER_END,
            "souschef": {"execution": execution},
        }

    def chat(self, num_tokens: int, execution: str) -> dict[str, Any]:
        reply = self.http.post("/v1/chat/completions", json=self.body(num_tokens, execution))
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def stream(self, num_tokens: int, execution: str, meanwhile: Callable[[], object], after: int = 5) -> list[Any]:
        """The events of a stream during which something else happens, from its fifth chunk on."""
        body = self.body(num_tokens, execution) | {"stream": True, "stream_options": {"include_usage": True}}
        failures: list[Exception] = []

        def act() -> None:
            try:
                meanwhile()
            except Exception as error:
                failures.append(error)

        other = threading.Thread(target=act)
        text = ""
        with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            for part in reply.iter_text():
                text += part
                if other.ident is None and text.count("data: ") > after:
                    other.start()
        other.join()
        assert not failures, failures
        return events(text)

    def push(self, reading: dict[str, Any]) -> None:
        """Often enough to outvote what was read before."""
        for _ in range(4):
            self.http.post("/v1/device", json=reading).raise_for_status()
            time.sleep(0.2)

    def decide_at_once(self) -> None:
        """Let the policy change its mind as soon as the device does."""
        changes = {"min_dwell_s": 0, "forecast_s": 0}
        headers = {"Authorization": "Bearer admin"}
        self.http.put("/v1/policy", json=changes, headers=headers).raise_for_status()

    def wait_for_cloud(self) -> None:
        """Until the edge hands requests over again."""
        deadline = time.monotonic() + 120
        while self.chat(4, "prefer_cloud")["souschef"]["tokens_by_origin"]["cloud"] == 0:
            assert time.monotonic() < deadline, "the edge does not go back to the cloud"
            time.sleep(1)


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    made = Client(stack)
    made.decide_at_once()
    made.push(COOL)
    yield made
    made.http.close()


@pytest.fixture
def linked(client: Client) -> Client:
    """An app in front of an edge that reaches its cloud."""
    client.wait_for_cloud()
    return client


def summary(stream: list[Any]) -> dict[str, Any]:
    """Souschef's object at the end of a stream that ended well."""
    assert stream[-1] == "[DONE]"
    assert not [event for event in stream[:-1] if "error" in event]
    told: dict[str, Any] = next(event["souschef"] for event in reversed(stream[:-1]) if "souschef" in event)
    return told


def assert_whole(stream: list[Any], num_tokens: int) -> dict[str, Any]:
    """Every token is there once: as many as were asked for, and their origins add up."""
    told = summary(stream)
    usage = next(event["usage"] for event in stream[:-1] if event.get("usage"))
    assert usage["completion_tokens"] == num_tokens
    assert sum(told["tokens_by_origin"].values()) == num_tokens
    return told


def test_a_chat_needs_the_key_and_is_answered(client: Client) -> None:
    refused = client.http.post("/v1/chat/completions", json=client.body(4, "auto"), headers={"Authorization": ""})
    answer = client.chat(12, "only_device")

    assert refused.status_code == 401
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["souschef"]["tokens_by_origin"]["cloud"] == 0


def test_the_cloud_answers_what_is_meant_for_it(linked: Client) -> None:
    answer = linked.chat(12, "only_cloud")

    assert answer["souschef"]["tokens_by_origin"]["cloud"] > 0


def test_a_device_that_gets_hot_hands_over_in_mid_answer(linked: Client) -> None:
    told = assert_whole(linked.stream(LONG, "auto", lambda: linked.push(HOT)), LONG)

    assert told["handoffs"]
    assert told["handoffs"][0]["to"] == "cloud"
    assert told["tokens_by_origin"]["cloud"] > 0
    assert told["tokens_by_origin"]["target"] + told["tokens_by_origin"]["draft"] > 0


@pytest.mark.parametrize("service", ["cloud", "redis"])
def test_a_restart_under_a_stream_loses_nothing(linked: Client, stack: Stack, service: str) -> None:
    stream = linked.stream(LONG, "prefer_cloud", lambda: stack.compose("restart", "--timeout", "1", service))

    assert_whole(stream, LONG)
    stack.wait_healthy([service])


def test_a_killed_cloud_under_a_stream_loses_nothing(linked: Client, stack: Stack) -> None:
    def kill() -> None:
        stack.engine.docker("kill", *stack.containers("cloud"))

    try:
        assert_whole(linked.stream(LONG, "prefer_cloud", kill), LONG)
    finally:
        stack.compose("up", "--detach", "--no-build", "cloud")
        stack.wait_healthy(["cloud"])


def test_prometheus_sees_every_service(stack: Stack) -> None:
    (prometheus,) = stack.containers("prometheus")

    def up() -> dict[str, str]:
        query = ["promtool", "query", "instant", "--format=json", "http://127.0.0.1:9090", "up"]
        found = json.loads(stack.engine.docker("exec", prometheus, *query))
        return {one["metric"]["job"]: one["value"][1] for one in found}

    deadline = time.monotonic() + 60
    while up() != {"edge": "1", "cloud": "1"}:
        assert time.monotonic() < deadline, up()
        time.sleep(2)


def test_containers_are_confined_as_the_file_says(stack: Stack) -> None:
    for service in SERVICES:
        (container,) = stack.containers(service)
        user = stack.engine.docker("exec", container, "id", "-u").strip()
        written = stack.engine.docker("exec", container, "sh", "-c", "touch /usr/x 2>&1 || true")
        capabilities = stack.engine.docker("exec", container, "grep", "CapEff", "/proc/self/status")

        assert user == "10001"
        assert "Read-only file system" in written
        assert int(capabilities.split()[1], 16) == 0


def test_the_edge_reads_its_limit_of_cores(stack: Stack) -> None:
    (container,) = stack.containers("edge")

    cores = stack.engine.docker(
        "exec", container, "python3", "-c", "from shared.cpus import usable_cpus; print(usable_cpus())"
    )

    assert cores.strip() == "2"


def start_cost(stack: Stack, container: str) -> float:
    """Processor seconds that starting the least of programs in the container takes, the median of some."""
    costs = []
    for _ in range(5):
        before = stack.engine.cpu_seconds(container)
        stack.engine.docker("exec", container, "true")
        costs.append(stack.engine.cpu_seconds(container) - before)
    return statistics.median(costs)


def test_an_idle_stack_rests(client: Client, stack: Stack) -> None:
    """Each service takes less than 3% of a core while nobody asks anything, health checks and scrapes included.

    Processor time is what a slow or crowded machine takes more of for the same work. So the bar rises with what this
    machine, just now, takes for a piece of work that no change of ours can touch, and never falls below 3%.
    """
    containers = {service: stack.containers(service)[0] for service in SERVICES}
    slowness = max(1.0, start_cost(stack, containers["redis"]) / START_COST_S)
    before = {service: stack.engine.cpu_seconds(container) for service, container in containers.items()}
    start = time.monotonic()
    time.sleep(IDLE_S)
    lasted = time.monotonic() - start
    shares = {
        service: (stack.engine.cpu_seconds(container) - before[service]) / lasted
        for service, container in containers.items()
    }

    told = {service: f"{share:.2%}" for service, share in shares.items()}
    print(f"idle, share of a core: {told}; this machine is {slowness:.1f} times as slow as thought")  # noqa: T201
    assert max(shares.values()) < IDLE_SHARE * slowness, (shares, slowness)


def test_a_stop_lets_a_stream_end(client: Client, stack: Stack) -> None:
    seen: set[int] = set()

    def stop() -> None:
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(stack.compose, "stop", "edge")
            while not stopped.done():
                with contextlib.suppress(httpx.TransportError):
                    seen.add(client.http.get("/ready").status_code)
                time.sleep(0.1)
            stopped.result()

    stream = client.stream(LONG, "only_device", stop)

    assert_whole(stream, LONG)
    assert 503 in seen
    (container,) = stack.engine.docker("ps", "--all", "--quiet", "--filter", "name=souschef_edge").split()
    assert stack.engine.inspect(container)["State"]["ExitCode"] == 0
    stack.compose("up", "--detach", "--no-build", "edge")
    stack.wait_healthy(["edge"])


def test_the_services_refuse_a_public_address_without_a_key(stack: Stack) -> None:
    for image in ("souschef-edge", "souschef-cloud"):
        with pytest.raises(AssertionError, match="set an API key"):
            stack.engine.docker("run", "--rm", "--env", "SOUSCHEF_HOST=0.0.0.0", image)


ROUNDS_BY_HAND = """
import json, sys, urllib.request

def post(session, number):
    opening = {"tokens": list(range(1000, 1020)), "prompt_len": 20}
    message = {"protocol": 1, "session_id": session, "round": 0, "draft_tokens": [7], "opening": opening}
    headers = {"Authorization": "Bearer between", "Content-Type": "application/json", "X-Session": session}
    request = urllib.request.Request("http://cloud:8090/v1/verify", json.dumps(message).encode(), headers)
    return urllib.request.urlopen(request, timeout=30).status

first, last = int(sys.argv[1]), int(sys.argv[2])
print({post(f"by-hand-{number:04}", number) for number in range(first, last)})
"""
"""Sends one round of each session through nginx."""


def test_replicas_behind_nginx_keep_their_sessions(engine: Engine, smollm2_directory: Path) -> None:
    services = ("edge", "gateway", "cloud-replica", "redis")
    scaled = Stack(engine, "scaled", settings("scale"))
    try:
        bring_up(scaled, services, smollm2_directory)
        replicas = scaled.containers("cloud-replica")
        (edge,) = scaled.containers("edge")

        def rounds(first: int, last: int) -> str:
            return engine.docker("exec", edge, "python3", "-c", ROUNDS_BY_HAND, str(first), str(last)).strip()

        for _ in range(3):
            assert rounds(0, 30) == "{200}"
        counted = [metrics(scaled, replica) for replica in replicas]

        # The second and third time each session found the replica that had its first reply.
        assert sum(one["souschef_cloud_replays_total"] for one in counted) == 60
        assert all(one["souschef_cloud_replays_total"] > 0 for one in counted)

        engine.docker("kill", replicas[0])
        assert rounds(0, 60) == "{200}"

        client = Client(scaled)
        with client.http:
            client.push(COOL)
            client.wait_for_cloud()
            origins = client.chat(12, "only_cloud")["souschef"]["tokens_by_origin"]
        assert sum(origins.values()) == 12
        assert origins["target"] == 0
    finally:
        scaled.compose("down", "--volumes", "--timeout", "5")


def metrics(stack: Stack, replica: str) -> dict[str, float]:
    """A cloud service's metrics that have no labels."""
    code = (
        "import urllib.request as u; r = u.Request('http://127.0.0.1:8090/metrics');"
        "r.add_header('Authorization', 'Bearer between'); print(u.urlopen(r).read().decode())"
    )
    text = stack.engine.docker("exec", replica, "python3", "-c", code)
    lines = [line.split() for line in text.splitlines() if line and line[0] != "#" and "{" not in line]
    return {name: float(value) for name, value in lines}
