"""The life of the server: load, health, readiness, a stop that lets answers finish."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.servers import (
    chat,
    error_of,
    events,
    run_server,
    streamed_text,
    wait_until,
)
from tests.toy_engine import Script, script_engine, toy_settings

LONG = "abcdefghijklmnopqrstuvwxyz"


def test_burst_past_the_queue_is_refused_with_a_time_to_retry() -> None:
    script = Script(LONG, pause_s=0.002)
    with (
        run_server(toy_settings(max_running=2, max_waiting=4), lambda: script_engine(script)) as server,
        ThreadPoolExecutor(30) as pool,
    ):
        responses = list(pool.map(lambda n: chat(server, stream=bool(n % 2), max_tokens=26), range(30)))
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 6
    for response in responses:
        if response.status_code == 503:
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert error_of(response, 503)["code"] == "overloaded"
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert streamed_text(response) == LONG
        else:
            assert response.json()["choices"][0]["message"]["content"] == LONG


def test_health_answers_while_the_model_is_busy() -> None:
    script = Script(LONG)
    script.gate.clear()
    with run_server(toy_settings(), lambda: script_engine(script)) as server, ThreadPoolExecutor(1) as pool:
        try:
            busy = pool.submit(chat, server, max_tokens=3)
            wait_until(lambda: server.agent.scheduler.num_running == 1)
            for _ in range(3):
                assert httpx.get(f"{server.url}/health", timeout=60).json() == {"status": "ok"}
            assert httpx.get(f"{server.url}/ready", timeout=60).json()["ready"] is True
            assert not busy.done()
        finally:
            script.gate.set()
        assert busy.result().status_code == 200


def test_dead_inference_thread_is_not_ready_and_answers_503() -> None:
    with run_server(toy_settings(), lambda: script_engine(Script())) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
        server.agent.engine.thread.stop()
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert error_of(chat(server), 503)["code"] == "engine_stopped"


def test_stop_is_not_ready_at_once_and_running_streams_finish() -> None:
    script = Script(LONG)
    script.gate.clear()
    with run_server(toy_settings(grace_s=60), lambda: script_engine(script)) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(chat, server, stream=True)
        wait_until(lambda: server.agent.scheduler.num_running == 1)
        try:
            server.stop()
            wait_until(lambda: server.agent.scheduler.draining)
            assert httpx.get(f"{server.url}/ready").status_code == 503
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert error_of(chat(server), 503)["code"] == "overloaded"
        finally:
            script.gate.set()
        assert streamed_text(answer.result()) == LONG
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_stream_past_the_grace_time_ends_with_an_error_frame() -> None:
    script = Script(LONG, ends=False, pause_s=0.001)
    settings = toy_settings(grace_s=0.2, context_length=60_000)
    make = lambda: script_engine(script, context_length=60_000)  # noqa: E731
    with run_server(settings, make) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(chat, server, stream=True)
        wait_until(lambda: script.num_rows > 2)
        server.stop()
        *chunks, last = events(answer.result().text)
        assert last["error"]["code"] == "overloaded"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
