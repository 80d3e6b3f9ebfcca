"""What an edge tells of itself, as the network hears it: a real agent, and a recorder in the cloud's place."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from edge_agent.circuit_breaker import CircuitState
from edge_agent.cloud_client import CloudClient
from edge_agent.cloud_link import CloudService
from edge_agent.config import load_settings
from edge_agent.cost_model import CostModel
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.device import Device
from edge_agent.device_state import UNKNOWN_DEVICE
from edge_agent.engine import Engine
from edge_agent.fleet import FleetReporter, NoFleet, kept_device_id
from edge_agent.piece import Piece
from edge_agent.policy import Rung
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.request import Execution, GenerationRequest, Privacy
from edge_agent.round import Origin, Round, TokenEvent
from edge_agent.thresholds import PRESETS, Preset
from shared.acceptance import Draft
from shared.errors import ConfigError
from shared.protocol import HeatName, ModeName
from tests.servers import RunningServer, chat, run_agent, wait_until
from tests.toy_engine import table_engine, toy_settings

CANARY = "a canary in the prompt"
ALWAYS = {"protocol", "device_id", "model"}
OF_DEVICE = {"heat", "temperature_c", "battery_percent", "charging"}
OF_ROUNDS = {"mode", "gamma", "reason", "acceptance_rate", "tokens_per_second"}
ID = "0123456789abcdef" * 2


class Recorder:
    """Takes reports and refuses all else; notes every request, and how many connections were opened."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.num_connections = 0
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                recorder.num_connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                recorder.heard.append((self.path, body))
                self.send_response(204 if self.path == "/v1/fleet" else 503)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(body) for path, body in list(self.heard) if path == "/v1/fleet"]

    def hear(self, more: int = 3) -> list[dict[str, Any]]:
        """The next reports: the first of them may have been made before now."""
        before = len(self.reports)
        wait_until(lambda: len(self.reports) >= before + more + 1)
        return self.reports[before + 1 :]


async def _engine(device: Device, senses: Senses) -> Engine:
    engine = table_engine()
    engine.policy = PolicyEngine(CostModel([0.01, 0.011, 0.012]), PRESETS[Preset.PHONE], senses=senses)
    return engine


@contextmanager
def agent(url: str, folder: Path, **settings: Any) -> Iterator[RunningServer]:
    fleet = {"fleet": True, "fleet_every_s": 0.02, "sensors": "push", "cache_dir": folder}
    with run_agent(toy_settings(cloud_url=url, **fleet | settings), _engine) as server:
        yield server


def ask(server: RunningServer, **souschef: str) -> None:
    messages = [{"role": "user", "content": CANARY}]
    response = chat(server, messages=messages, max_tokens=12, souschef=souschef)
    assert response.status_code == 200, response.text


def test_nothing_is_reported_unless_it_is_asked_for(tmp_path: Path) -> None:
    with Recorder() as cloud, agent(cloud.url, tmp_path, fleet=False) as server:
        assert isinstance(server.agent.fleet, NoFleet)
        ask(server, privacy="on_device")
        assert cloud.num_connections == 0
        ask(server, execution="prefer_cloud")
        assert {path for path, _ in cloud.heard} == {"/v1/handshake"}
        assert not (tmp_path / "device-id").exists()


def test_reports_say_how_the_device_fares_and_nothing_else(tmp_path: Path) -> None:
    with Recorder() as cloud, agent(cloud.url, tmp_path) as server:
        assert all(set(report) == ALWAYS for report in cloud.hear())
        for _ in range(3):
            reading = {"temperature_c": 43.3, "battery_percent": 61.6, "charging": False}
            httpx.post(f"{server.url}/v1/device", json=reading).raise_for_status()
        report = cloud.hear()[-1]
        assert set(report) == ALWAYS | OF_DEVICE
        assert (report["heat"], report["temperature_c"], report["battery_percent"]) == ("offload", 43.0, 62.0)
        assert {report["device_id"] for report in cloud.reports} == {(tmp_path / "device-id").read_text().strip()}


def test_what_must_stay_on_the_device_leaves_no_trace_in_them(tmp_path: Path) -> None:
    with Recorder() as cloud, agent(cloud.url, tmp_path) as server:
        cloud.hear()
        connections = cloud.num_connections
        for execution in ("auto", "prefer_cloud", "prefer_device"):
            ask(server, privacy="on_device", execution=execution)
        ask(server, execution="only_device")
        cloud.hear()
        assert {tuple(sorted(report)) for report in cloud.reports} == {tuple(sorted(ALWAYS))}
        assert {path for path, _ in cloud.heard} == {"/v1/fleet"}
        assert cloud.num_connections == connections
        before = len(cloud.reports)
        ask(server, execution="prefer_device")
        cloud.hear()
        told = [report for report in cloud.reports[before:] if "mode" in report]
        assert told
        assert set(told[-1]) <= ALWAYS | OF_ROUNDS
        assert not any(CANARY.encode() in body for _, body in cloud.heard)


@contextmanager
def silent_cloud() -> Iterator[tuple[str, list[socket.socket]]]:
    """Takes connections and never says a word."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take() -> None:
            while True:
                try:
                    taken.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


def circuit(server: RunningServer) -> CircuitState:
    cloud = server.agent.engine.cloud
    assert isinstance(cloud, CloudService)
    return cloud.circuit_state


def test_a_cloud_that_is_silent_keeps_no_answer_waiting(tmp_path: Path) -> None:
    with silent_cloud() as (url, taken), agent(url, tmp_path) as server:
        wait_until(lambda: len(taken) > 0)
        for _ in range(5):
            ask(server, privacy="on_device")  # Answered while the report still waits for its reply.
        assert len(taken) == 1
        assert circuit(server) is CircuitState.CLOSED


def test_a_cloud_that_is_gone_says_nothing_about_the_way_for_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="edge_agent.fleet")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with agent(f"http://127.0.0.1:{port}", tmp_path, fleet_every_s=0.001) as server:
        wait_until(lambda: any("fleet:" in record.getMessage() for record in caplog.records))
        ask(server, privacy="on_device")
        assert circuit(server) is CircuitState.CLOSED


def reporter(client: Any, **options: Any) -> FleetReporter:
    return FleetReporter(client, ID, "toy", lambda: UNKNOWN_DEVICE, lambda: PRESETS[Preset.PHONE], 10.0, **options)


def piece(mode: Mode, drafted: int, accepted: int, number: int = 1) -> Piece:
    origins = [Origin.DRAFT] * accepted + [Origin.TARGET]
    tokens = tuple(TokenEvent(position, 7, origin) for position, origin in enumerate(origins))
    decision = Decision(mode, drafted, Reason.NOMINAL)
    round = Round(number, decision, Draft((7,) * drafted, "ngram"), accepted, 7, tokens, 0.0, 0.1)
    return Piece("", round, tokens, (), None, 0.1)


def test_only_rounds_of_requests_that_may_leave_are_counted() -> None:
    open_request = GenerationRequest((1,), 8)
    private = GenerationRequest((1,), 8, privacy=Privacy.ON_DEVICE)
    local = GenerationRequest((1,), 8, execution=Execution.ONLY_DEVICE)
    reports = reporter(None)
    reports.count(open_request, piece(Mode.LOCAL_SPECULATIVE, 4, 3))
    reports.count(private, piece(Mode.LOCAL_SPECULATIVE, 4, 0))
    reports.count(open_request, piece(Mode.LOCAL_SPECULATIVE, 2, 0))
    reports.count(local, piece(Mode.LOCAL_DIRECT, 0, 0))
    report = reports.report()
    assert (report.mode, report.gamma, report.reason) == ("local_speculative", 2, "nominal")
    assert report.acceptance_rate == pytest.approx(0.5)
    assert report.tokens_per_second == pytest.approx(25.0)
    assert reports.report().mode is None


def test_a_refusing_cloud_is_asked_ever_more_rarely_and_at_scattered_times() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 9:
            raise asyncio.CancelledError

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        client = CloudClient(f"http://127.0.0.1:{port}", "toy", 16)
        with pytest.raises(asyncio.CancelledError):
            await reporter(client, sleep=sleep).run()
        await client.close()

    asyncio.run(scenario())
    assert 0 <= waits[0] <= 10.0
    for failures, wait in enumerate(waits[1:], start=1):
        usual = 10.0 * min(2**failures, 16)
        assert 0.75 * usual <= wait <= 1.25 * usual
    assert len(set(waits)) == len(waits)


def test_the_id_stays_and_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "models" / "device-id"
    made = kept_device_id(path)
    assert kept_device_id(path) == made
    path.write_text("not an id")
    another = kept_device_id(path)
    assert another != made
    assert kept_device_id(path) == another
    blocked = path / "device-id"
    assert kept_device_id(blocked) != kept_device_id(blocked)
    assert "can't be kept" in caplog.text


def test_the_words_on_the_wire_are_the_policys() -> None:
    assert set(get_args(ModeName)) == {mode.value for mode in Mode}
    assert get_args(HeatName) == tuple(rung.name.lower() for rung in Rung)


def test_a_fleet_without_a_cloud_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="cloud_url"):
        load_settings({"fleet": True})
