"""What must stay on the device, as the network sees it: a real agent whose cloud is a listener that notes who comes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from edge_agent.cost_model import CostModel
from edge_agent.device import Device
from edge_agent.engine import Engine
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.thresholds import PRESETS, Preset
from shared.chat_template import ChatTemplate
from tests.fakes import TableLM
from tests.servers import CHAT, RunningServer, chat, complete, run_agent, wait_until
from tests.test_tool_calls import TOOL_TEMPLATE, WEATHER
from tests.toy_engine import END, toy_engine, toy_settings

CURVE = [0.010, 0.011, 0.012, 0.013, 0.014]
CONTEXT = 1024
SCHEMA = {"type": "json_schema", "json_schema": {"name": "yes", "schema": {"type": "boolean"}}}
EXECUTIONS = ["auto", "prefer_cloud", "prefer_device", "only_device"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"temperature": 1.0, "seed": 7, "logprobs": True},
    "tools": {"tools": [WEATHER]},
    "forced tool": {"tools": [WEATHER], "tool_choice": "required"},
    "object": {"response_format": {"type": "json_object"}},
    "schema": {"response_format": SCHEMA},
    "prediction": {"prediction": {"type": "content", "content": "abcabcabc"}},
}


class Listener:
    """Takes every connection, notes what was said first, and hangs up."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(30)
                self.heard.append(connection.recv(65536))


async def _babbler(device: Device, senses: Senses) -> Engine:
    """An engine with the real policy, which knows the link."""
    engine = toy_engine(lambda: TableLM(258, 5, sharpness=4.0, context_length=CONTEXT), context_length=CONTEXT)
    engine.policy = PolicyEngine(CostModel(CURVE), PRESETS[Preset.PHONE], drafters=("ngram",), senses=senses)
    engine.chat_template = ChatTemplate(TOOL_TEMPLATE, None, END)
    return engine


@contextmanager
def watched_agent() -> Iterator[tuple[RunningServer, Listener]]:
    listener = Listener()
    try:
        with run_agent(
            toy_settings(cloud_url=listener.url, sensors="push", context_length=CONTEXT), _babbler
        ) as server:
            yield server, listener
    finally:
        listener.close()


def heat(server: RunningServer) -> None:
    """As hot and empty as can be: the policy would hand everything over."""
    for _ in range(3):  # One reading alone could be an outlier.
        reading = {"temperature_c": 60.0, "battery_percent": 2.0, "charging": False}
        httpx.post(f"{server.url}/v1/device", json=reading).raise_for_status()


def ask_to_leave(server: RunningServer) -> dict[str, Any]:
    """A request that may leave, and wants to."""
    response = chat(server, max_tokens=4, souschef={"execution": "prefer_cloud"})
    assert response.status_code == 200, response.text
    return dict(response.json()["souschef"])


def ask_in_every_way(server: RunningServer, **souschef: str) -> None:
    for fields in KINDS.values():
        for stream in (False, True):
            response = chat(server, max_tokens=12, stream=stream, souschef=souschef, **fields)
            assert response.status_code == 200, response.text
    for stream in (False, True):
        assert complete(server, stream=stream, souschef=souschef).status_code == 200


@pytest.mark.parametrize("hot", [False, True], ids=["cool", "hot"])
def test_no_connection_for_what_must_stay(hot: bool) -> None:
    with watched_agent() as (server, listener):
        if hot:
            heat(server)
        for execution in ("auto", "prefer_cloud") if hot else EXECUTIONS:  # Heat slows answers down, too.
            ask_in_every_way(server, privacy="on_device", execution=execution)
        assert chat(server, max_tokens=12, souschef={"execution": "only_device"}).status_code == 200
        for name in ("forced tool", "object", "schema"):
            wishes = {"execution": "prefer_cloud"}
            assert chat(server, max_tokens=12, souschef=wishes, **KINDS[name]).status_code == 200
        assert chat(server, souschef={"privacy": "on_device", "execution": "only_cloud"}).status_code == 400
        body = {**CHAT, "stream": True, "souschef": {"privacy": "on_device", "execution": "prefer_cloud"}}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as left:
            next(left.iter_raw())
        wait_until(lambda: server.agent.scheduler.num_running == 0)
        assert listener.heard == []
        # The listener would have noticed: one request that may leave is enough.
        report = ask_to_leave(server)
        assert listener.heard
        assert report["tokens_by_origin"]["cloud"] == 0


def test_nothing_is_sent_before_the_first_request_that_may_leave() -> None:
    """Neither starting, nor being looked at, nor heat, nor what is refused calls the cloud."""
    with watched_agent() as (server, listener):
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/policy", "/v1/device", "/"):
            httpx.get(f"{server.url}{path}", timeout=60).raise_for_status()
        heat(server)
        assert chat(server, temperature=-1, souschef={"execution": "prefer_cloud"}).status_code == 400
        assert chat(server, messages=[], souschef={"execution": "only_cloud"}).status_code == 400
        assert complete(server, prompt="x" * CONTEXT, souschef={"execution": "only_cloud"}).status_code == 400
        assert listener.heard == []
        ask_to_leave(server)
        assert b"/v1/handshake" in listener.heard[0]


def test_what_is_said_first_holds_no_prompt() -> None:
    """The greeting goes to whoever listens at the address; it tells how the tokenizer counts, and nothing else."""
    with watched_agent() as (server, listener):
        response = complete(server, prompt="canary-prompt", souschef={"execution": "prefer_cloud"})
        assert response.status_code == 200
        assert listener.heard
        ids = str(list(b"canary-prompt"))[1:-1].replace(" ", "").encode()
        for heard in listener.heard:
            assert heard.startswith(b"POST /v1/handshake")
            assert b"canary" not in heard
            assert ids not in heard.replace(b" ", b"")
