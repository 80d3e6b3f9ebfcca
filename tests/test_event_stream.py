"""Streams over real sockets: frames, pings, failures, clients that leave, clients that are slow."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.servers import (
    CHAT,
    RunningServer,
    chat,
    complete,
    error_of,
    events,
    post_bytes,
    run_server,
    settled,
    streamed_text,
    wait_until,
)
from tests.toy_engine import Script, script_engine, toy_settings

MESSAGES = CHAT["messages"]
ANSWER = "Hello 😀, wörld! Hello 😀, wörld!"
LONG = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """An agent that always says ANSWER."""
    with run_server(toy_settings(), lambda: script_engine(Script(ANSWER))) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_stream_is_framed_as_promised(server: RunningServer) -> None:
    response = chat(server, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    assert response.text.isascii()
    found = events(response.text)
    assert found[-1] == "[DONE]"
    chunks = found[:-1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        assert {"id", "object", "created", "model", "system_fingerprint", "choices"} <= set(chunk)
        assert "usage" not in chunk
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [index for index, delta in enumerate(deltas) if "role" in delta] == [0]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes[-1] == "stop"
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    assert [index for index, chunk in enumerate(chunks) if "souschef" in chunk] == [len(chunks) - 1]
    assert streamed_text(response) == chat(server).json()["choices"][0]["message"]["content"] == ANSWER


def test_usage_chunk_comes_last_and_only_when_asked_for(server: RunningServer) -> None:
    found = events(chat(server, stream=True, stream_options={"include_usage": True}).text)
    *chunks, last, done = found
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ANSWER.encode())
    assert sum(last["souschef"]["tokens_by_origin"].values()) == len(ANSWER.encode())
    assert all(chunk["usage"] is None and "souschef" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_completion_streams(server: RunningServer) -> None:
    found = events(complete(server, stream=True, logprobs=0).text)
    whole = complete(server).json()["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == whole["text"]
    assert found[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"
    offsets = [
        o for chunk in found[:-1] for o in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert offsets == list(range(8))


def test_official_client_parses_every_chunk(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0,
        stream=True,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
        extra_body={"souschef": {"speculation": "on", "max_gamma": 2}},
    )
    chunks = list(stream)
    assert all(
        isinstance(ChatCompletionChunk.model_validate(chunk.model_dump()), ChatCompletionChunk) for chunk in chunks
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["souschef"]["accepted_tokens"] > 0
    whole = client.completions.create(model="toy", prompt="x", max_tokens=5)
    assert whole.choices[0].finish_reason == "length"


def test_pings_fill_the_silence_and_the_official_client_takes_them() -> None:
    script = Script("abc", pause_s=0.3)
    with run_server(toy_settings(ping_s=0.05), lambda: script_engine(script)) as server:
        raw = chat(server, stream=True)
        assert raw.text.count(": ping\n\n") >= 3
        assert streamed_text(raw) == "abc"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "abc"


def test_failure_before_the_start_is_a_500_and_after_it_an_error_frame() -> None:
    script = Script(LONG, ends=False)
    with run_server(toy_settings(), lambda: script_engine(script, gamma=0)) as server:
        script.fail_after = 5
        response = chat(server, stream=True)
        assert response.status_code == 200
        *chunks, last = events(response.text)
        assert last["error"]["code"] == "internal_error"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "abcde"
        error = error_of(chat(server), 500)
        assert "toy" not in error["message"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
            with pytest.raises(openai.APIError):
                list(stream)
        script.fail_after = None
        assert chat(server, max_tokens=3).status_code == 200
        assert server.agent.scheduler.num_running == 0


def raw_post(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(post_bytes("/v1/chat/completions", body))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_generation_stops_within_a_round_when_the_client_leaves(stream: bool) -> None:
    script = Script(LONG, ends=False, pause_s=0.001)
    settings = toy_settings(context_length=60_000)
    with run_server(settings, lambda: script_engine(script, gamma=3, context_length=60_000)) as server:
        connection = raw_post(server, {**CHAT, "stream": stream})
        wait_until(lambda: script.num_rows > 5)
        if stream:
            received = b""
            while b'"content":"a"' not in received:
                received += connection.recv(4096)
        script.gate.clear()
        rows_at_close = script.num_rows
        connection.close()
        settled(server.url)
        script.gate.set()
        wait_until(lambda: server.agent.scheduler.num_running == 0)
        # A pass that was past the gate, and the one that waited at it; each has up to gamma + 1 rows.
        assert script.num_rows - rows_at_close <= 2 * 4
        rows = script.num_rows
        time.sleep(0.2)
        assert script.num_rows == rows
        text = httpx.get(f"{server.url}/metrics").text
        assert 'souschef_edge_requests_total{finish_reason="cancelled",mode="local_speculative"} 1.0' in text
        assert chat(server, max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_the_queue_frees_its_place_in_it(stream: bool) -> None:
    script = Script(LONG, ends=False)
    script.gate.clear()
    with run_server(toy_settings(max_running=1, max_waiting=2), lambda: script_engine(script)) as server:
        try:
            running = raw_post(server, {**CHAT, "stream": True, "max_tokens": 5})
            wait_until(lambda: server.agent.scheduler.num_running == 1)
            waiting = raw_post(server, {**CHAT, "stream": stream})
            wait_until(lambda: server.agent.scheduler.num_waiting == 1)
            waiting.close()
            wait_until(lambda: server.agent.scheduler.num_waiting == 0)
        finally:
            script.gate.set()
        running.close()
        assert chat(server, max_tokens=2).status_code == 200


def test_slow_client_holds_up_nobody_and_fills_no_memory() -> None:
    script = Script("é" * 100, ends=False)
    settings = toy_settings(context_length=60_000)
    make = lambda: script_engine(script, context_length=60_000, gamma=0)  # noqa: E731
    with run_server(settings, make) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(post_bytes("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20}))
        rows = -1
        while rows != script.num_rows:  # Until its session stands still, waiting for its reader.
            rows = script.num_rows
            time.sleep(0.3)
        assert rows < 30_000
        before = psutil.Process().memory_info().rss
        for _ in range(3):
            slow.recv(1)
            assert chat(server, max_tokens=20).status_code == 200
        assert psutil.Process().memory_info().rss - before < 20_000_000
        assert server.agent.scheduler.num_running == 1
        slow.close()
        wait_until(lambda: server.agent.scheduler.num_running == 0)


def test_client_that_takes_nothing_is_given_up() -> None:
    script = Script("é" * 100, ends=False)
    settings = toy_settings(context_length=60_000, stall_s=0.5)
    with run_server(settings, lambda: script_engine(script, context_length=60_000, gamma=0)) as server:
        dead = raw_post(server, {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20})
        wait_until(lambda: script.num_rows > 0)
        wait_until(lambda: server.agent.scheduler.num_running == 0)
        dead.close()


def test_async_official_client_can_break_off() -> None:
    script = Script(LONG, ends=False, pause_s=0.01)

    async def scenario(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()

    with run_server(toy_settings(), lambda: script_engine(script)) as server:
        asyncio.run(scenario(server.url))
        wait_until(lambda: server.agent.scheduler.num_running == 0)
