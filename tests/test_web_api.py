"""The demo's routes, over real sockets, on a scripted engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.servers import RunningServer, events, run_server, wait_until
from tests.toy_engine import Script, script_engine, toy_settings

LOOP = "Hello, world! "


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with run_server(toy_settings(), lambda: script_engine(Script(LOOP, ends=False))) as running:
        yield running


def ask(server: RunningServer, path: str, **body: Any) -> list[Any]:
    response = httpx.post(server.url + path, json={"prompt": "say it", **body}, timeout=60)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def text_of(found: list[Any], lane: str) -> str:
    rounds = [event for event in found[:-1] if event["type"] == "round" and event["lane"] == lane]
    return "".join(token["text"] for event in rounds for token in event["tokens"])


def test_a_race_tells_both_lanes_and_compares_them(server: RunningServer) -> None:
    found = ask(server, "/demo/race", max_tokens=40)
    assert found[-1] == "[DONE]"
    kinds = [event["type"] for event in found[:-1] if event["type"] != "round"]
    assert kinds == ["race", "lane", "end", "lane", "end", "comparison"]
    assert found[-2]["outcome"] == "equal"
    assert text_of(found, "direct") == text_of(found, "speculative") == (LOOP * 3)[:40]


def test_rounds_carry_drafts_verdicts_origins_and_true_times(server: RunningServer) -> None:
    rounds = [event for event in ask(server, "/demo/race", max_tokens=40)[:-1] if event["type"] == "round"]
    direct = [event for event in rounds if event["lane"] == "direct"]
    speculative = [event for event in rounds if event["lane"] == "speculative"]
    assert all(event["draft"] == [] and event["mode"] == "local_direct" for event in direct)
    assert len(speculative) < len(direct) == 40
    drafted = [event for event in speculative if event["draft"]]
    assert drafted
    for event in drafted:
        assert [draft["accepted"] for draft in event["draft"]] == [
            i < event["accepted"] for i in range(len(event["draft"]))
        ]
        origins = [token["origin"] for token in event["tokens"]]
        assert origins == ["draft"] * event["accepted"] + ["target"] * (len(origins) - event["accepted"])
        assert all(0 <= draft["confidence"] <= 1 for draft in event["draft"])
        assert event["tokens"][0]["top"][0][0] == event["tokens"][0]["text"]
    for lane in (direct, speculative):
        times = [event["at_ms"] for event in lane]
        assert times == sorted(times)
        assert all(event["verify_ms"] >= 0 and event["wait_ms"] >= 0 for event in lane)


def test_a_prediction_drafts_from_the_first_token_on(server: RunningServer) -> None:
    found = ask(server, "/demo/race", max_tokens=20, prediction=LOOP * 2)
    first = next(event for event in found if event["type"] == "round" and event["lane"] == "speculative")
    assert first["drafter"] == "prediction"
    assert first["accepted"] == len(first["draft"]) > 0


def test_half_characters_are_never_shown_in_an_answer() -> None:
    said = "¡Olé! 厨房 😀 "
    with run_server(toy_settings(), lambda: script_engine(Script(said, ends=True))) as running:
        found = ask(running, "/demo/race", max_tokens=60)
        assert text_of(found, "direct") == text_of(found, "speculative") == said


def test_an_answer_runs_once(server: RunningServer) -> None:
    found = ask(server, "/demo/answer", max_tokens=10)
    assert [event["type"] for event in found[:-1] if event["type"] != "round"] == ["lane", "end"]
    assert found[-2]["report"]["tokens_by_origin"]["cloud"] == 0


@pytest.mark.parametrize("path", ["/demo/race", "/demo/answer"])
def test_who_leaves_stops_the_work(path: str) -> None:
    script = Script(LOOP, ends=False, pause_s=0.001)
    settings = toy_settings(context_length=60_000)
    with run_server(settings, lambda: script_engine(script, context_length=60_000)) as running:
        with httpx.stream("POST", running.url + path, json={"prompt": "x", "max_tokens": 4096}, timeout=60) as response:
            lines = response.iter_lines()
            while '"type":"round"' not in next(lines):
                pass
        wait_until(lambda: running.agent.scheduler.num_running == 0)
        rows = script.num_rows
        time.sleep(0.2)
        assert script.num_rows == rows


def test_facts_without_a_policy_say_so(server: RunningServer) -> None:
    facts = httpx.get(server.url + "/demo/facts").json()
    assert facts["verify_ms"] is None
    assert facts["model"] == "toy"
    assert {"command", "translation", "private", "summary", "edit"} <= {s["category"] for s in facts["scenarios"]}


def test_a_prompt_that_does_not_fit_is_refused_before_the_stream(server: RunningServer) -> None:
    response = httpx.post(server.url + "/demo/race", json={"prompt": "x" * 2000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_failure_in_the_middle_is_told() -> None:
    script = Script(LOOP, ends=False)
    with run_server(toy_settings(), lambda: script_engine(script)) as running:
        script.fail_after = 30
        found = ask(running, "/demo/race", max_tokens=40)
        assert "error" in found[-1]
