"""The service over real sockets, around a toy model: rounds, repeats, moves, streams, batches, limits, stops."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cloud_service.config import load_settings
from cloud_service.load import LoadMeter, best_gamma, expected_tokens
from cloud_service.pass_costs import PassCosts, pass_cost_ms
from edge_agent.request import GenerationRequest
from shared.errors import ConfigError, EngineError
from shared.protocol import tokens_crc
from shared.sampling import SamplingParams
from tests.cloud_edge import PROMPT, expected
from tests.cloud_toy import CloudProcess, RunningCloud, TableDecoder, running_cloud
from tests.fakes import TableLM
from tests.servers import wait_until

GREEDY = {"temperature": 0}
ANSWER = expected(GenerationRequest(PROMPT, 200, SamplingParams(temperature=0)))


def opening(session_id: str = "session-0001", round: int = 0, **fields: object) -> dict[str, object]:
    start = {"tokens": list(PROMPT), "prompt_len": len(PROMPT), "sampling": GREEDY}
    return {"session_id": session_id, "round": round, "opening": start, **fields}


def later(
    tokens: list[int], round: int, num_known: int, draft: list[int], session_id: str = "session-0001"
) -> dict[str, object]:
    return {
        "session_id": session_id,
        "round": round,
        "prefix_len": num_known,
        "prefix_crc": tokens_crc(tokens[:num_known]),
        "new_tokens": tokens[num_known:],
        "draft_tokens": draft,
    }


def post(cloud: RunningCloud | CloudProcess, path: str, content: dict[str, object], **headers: str) -> httpx.Response:
    return httpx.post(f"{cloud.url}{path}", json=content, headers=headers, timeout=30)


def outcome(response: httpx.Response) -> tuple[int, int]:
    assert response.status_code == 200, response.text
    return response.json()["accepted"], response.json()["next_token"]


def continue_tokens(cloud: RunningCloud, start: list[int], max_tokens: int, **extra: object) -> list[dict[str, object]]:
    opens = {"tokens": start, "prompt_len": len(PROMPT), "sampling": GREEDY, **extra}
    response = post(cloud, "/v1/continue", {"session_id": "stream-0001", "opening": opens, "max_tokens": max_tokens})
    assert response.status_code == 200, response.text
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def test_rounds_follow_the_model() -> None:
    with running_cloud() as cloud:
        measuring = sum(lm.num_forward_tokens for lm in cloud.decoder.caches)
        assert outcome(post(cloud, "/v1/verify", opening(draft_tokens=ANSWER[:3]))) == (3, ANSWER[3])
        tokens = [*PROMPT, *ANSWER[:4]]
        wrong = [ANSWER[4], (ANSWER[5] + 1) % 16, 0]
        assert outcome(post(cloud, "/v1/verify", later(tokens, 1, len(tokens), wrong))) == (1, ANSWER[5])
        tokens = [*PROMPT, *ANSWER[:6]]
        local = [*tokens, *ANSWER[6:9]]  # Made on the device meanwhile.
        assert outcome(post(cloud, "/v1/verify", later(local, 2, len(tokens), []))) == (0, ANSWER[9])
        forwarded = sum(lm.num_forward_tokens for lm in cloud.decoder.caches) - measuring
        assert forwarded < 25, "the cache was not used"


def test_a_repeated_round_is_answered_the_same_and_counted_once() -> None:
    with running_cloud() as cloud:
        body = opening(draft_tokens=ANSWER[:3])
        first = post(cloud, "/v1/verify", body)
        passes = [lm.num_forward_calls for lm in cloud.decoder.caches]
        assert post(cloud, "/v1/verify", body).content == first.content
        assert [lm.num_forward_calls for lm in cloud.decoder.caches] == passes
        other = post(cloud, "/v1/verify", opening(draft_tokens=ANSWER[:2]))
        assert (other.status_code, other.json()["error"]["code"]) == (409, "stale_round")
        tokens = [*PROMPT, *ANSWER[:4]]
        assert post(cloud, "/v1/verify", later(tokens, 5, len(tokens), [])).status_code == 200
        assert post(cloud, "/v1/verify", body).status_code == 409
        assert "souschef_cloud_replays_total 1.0" in httpx.get(f"{cloud.url}/metrics").text


def test_repeats_at_the_same_time_advance_the_session_once() -> None:
    with running_cloud(TableDecoder(pass_s=0.05)) as cloud, ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(lambda _: post(cloud, "/v1/verify", opening(draft_tokens=ANSWER[:3])).content, range(8))
        )
        assert len(set(replies)) == 1
        tokens = [*PROMPT, *ANSWER[:4]]
        assert outcome(post(cloud, "/v1/verify", later(tokens, 1, len(tokens), []))) == (0, ANSWER[4])


def test_a_reply_that_was_lost_is_cut_off() -> None:
    """The edge never heard of round 0's tokens, made others itself, and comes back."""
    with running_cloud() as cloud:
        outcome(post(cloud, "/v1/verify", opening(draft_tokens=ANSWER[:3])))
        own = [*PROMPT, 7, 7]
        lm = TableLM(16, 5)
        reply = post(cloud, "/v1/verify", later(own, 1, len(PROMPT), []))
        assert outcome(reply) == (0, int(lm.logits_after(own).argmax()))


def test_other_tokens_under_the_same_length_are_noticed() -> None:
    with running_cloud() as cloud:
        outcome(post(cloud, "/v1/verify", opening(draft_tokens=ANSWER[:3])))
        diverged = [*PROMPT[:-1], 9, *ANSWER[:2]]
        response = post(cloud, "/v1/verify", later(diverged, 1, len(diverged), []))
        assert response.status_code == 410


@pytest.mark.parametrize("num_known", [0, 3, 99])
def test_an_unknown_session_is_gone(num_known: int) -> None:
    with running_cloud() as cloud:
        tokens = [*PROMPT] * 20
        response = post(cloud, "/v1/verify", later(tokens, 3, num_known, []))
        assert (response.status_code, response.json()["error"]["code"]) == (410, "session_lost")


def test_an_ended_session_is_not_revived_by_a_late_request() -> None:
    with running_cloud() as cloud:
        body = opening(draft_tokens=ANSWER[:3])
        post(cloud, "/v1/verify", body)
        assert httpx.delete(f"{cloud.url}/v1/sessions/session-0001").status_code == 204
        assert len(cloud.service.sessions) == 0
        assert post(cloud, "/v1/verify", body).status_code == 409
        assert len(cloud.service.sessions) == 0
        assert httpx.delete(f"{cloud.url}/v1/sessions/session-0001").status_code == 204


def test_evicted_caches_and_sessions_change_nothing() -> None:
    """Two slots for six sessions, room for three of them."""
    with running_cloud(num_slots=2, max_sessions=3) as cloud:
        held: dict[str, list[int]] = {f"session-{i:04}": [*PROMPT] for i in range(6)}
        for round_number in range(8):
            for session_id, tokens in held.items():
                done = len(tokens) - len(PROMPT)
                body = later(tokens, round_number, len(tokens), ANSWER[done : done + 2], session_id)
                response = post(cloud, "/v1/verify", body) if round_number else None
                if response is None or response.status_code == 410:
                    body = opening(session_id, round_number, draft_tokens=ANSWER[done : done + 2])
                    body["opening"]["tokens"] = tokens  # type: ignore[index]
                    response = post(cloud, "/v1/verify", body)
                assert outcome(response) == (2, ANSWER[done + 2])
                tokens += ANSWER[done : done + 3]
        assert len(cloud.service.sessions) <= 3
        assert len(cloud.decoder.caches) <= 2


def test_a_stream_is_the_models_own_answer() -> None:
    with running_cloud() as cloud:
        frames = continue_tokens(cloud, [*PROMPT, *ANSWER[:4]], 10)
        assert [frame["token"] for frame in frames[:-1]] == ANSWER[4:14]
        assert [frame["position"] for frame in frames[:-1]] == list(range(9, 19))
        assert frames[-1]["finish"] == "length"
        stop = ANSWER[4]
        frames = continue_tokens(cloud, [*PROMPT, *ANSWER[:4]], 10, stop_ids=[stop])
        assert [frame["token"] for frame in frames[:-1]] == [stop]
        assert frames[-1]["finish"] == "stop"


def test_streams_at_the_same_time_share_passes_and_change_nothing() -> None:
    prompts = [[1, 2, 3, n, n + 1] for n in range(8)]
    with running_cloud(TableDecoder(pass_s=0.01)) as cloud, ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda prompt: continue_tokens(cloud, prompt, 30), prompts))
        sizes = cloud.decoder.batch_sizes
    for prompt, frames in zip(prompts, streams, strict=True):
        request = GenerationRequest(tuple(prompt), 30, SamplingParams(temperature=0))
        assert [frame["token"] for frame in frames[:-1]] == expected(request)
    assert max(sizes) == 8
    assert len(sizes) < sum(sizes) / 2


def test_rounds_and_streams_at_the_same_time_share_passes_and_change_nothing() -> None:
    """Drafts of other lengths and other truth in every round, caches taken from each other, streams between them."""
    prompts = [[1, 2, 3, n, n + 1] for n in range(8)]
    texts = [expected(GenerationRequest(tuple(each), 60, SamplingParams(temperature=0))) for each in prompts]

    def rounds(number: int) -> list[int]:
        tokens, text = list(prompts[number]), texts[number]
        for turn in range(12):
            done = len(tokens) - len(prompts[number])
            draft = text[done : done + (number + turn) % 4]
            if draft and turn % 3 == 2:
                draft[-1] = (draft[-1] + 1) % 16
            start = {"tokens": tokens, "prompt_len": 5, "sampling": GREEDY}
            body = {"session_id": f"session-{number:04}", "round": turn, "opening": start, "draft_tokens": draft}
            accepted, token = outcome(post(cloud, "/v1/verify", body))
            assert accepted == len(draft) - bool(draft and turn % 3 == 2)
            tokens += [*draft[:accepted], token]
        return tokens[len(prompts[number]) :]

    def stream(number: int) -> list[object]:
        return [frame["token"] for frame in continue_tokens(cloud, prompts[number], 30)[:-1]]

    with running_cloud(TableDecoder(pass_s=0.01), num_slots=10) as cloud, ThreadPoolExecutor(16) as pool:
        verified, streamed = (pool.map(ask, range(8)) for ask in (rounds, stream))
        for text, answer, streamed_answer in zip(texts, verified, streamed, strict=True):
            assert answer == text[: len(answer)]
            assert len(answer) >= 12
            assert streamed_answer == text[:30]
        sizes = cloud.decoder.batch_sizes
    assert len(sizes) < sum(sizes) / 2


def test_a_failed_pass_ends_its_streams_with_an_error_and_nothing_else() -> None:
    with running_cloud() as cloud:
        cloud.decoder.failure = EngineError("a CANARY of a pass failed")
        frames = continue_tokens(cloud, [*PROMPT], 10)
        assert [frame["token"] for frame in frames[:-1]] == ANSWER[:1]
        assert frames[-1]["error"]["code"] == "internal_error"  # type: ignore[index]
        assert "CANARY" not in json.dumps(frames)
        assert len(continue_tokens(cloud, [*PROMPT], 10)) == 11


def test_a_client_that_leaves_frees_its_place() -> None:
    with running_cloud(TableDecoder(pass_s=0.01)) as cloud:
        body = {
            "session_id": "stream-0001",
            "opening": {"tokens": list(PROMPT), "prompt_len": 5, "sampling": GREEDY},
            "max_tokens": 3000,
        }
        for _ in range(10):
            with httpx.stream("POST", f"{cloud.url}/v1/continue", json=body, timeout=30) as response:
                next(response.iter_lines())
        wait_until(lambda: cloud.service.meter.running == 0)
        assert cloud.service.meter.streams == 0


def test_tenants_do_not_share_sessions() -> None:
    with running_cloud(api_keys=("key-one", "key-two")) as cloud:
        one, two = ({"Authorization": f"Bearer key-{name}"} for name in ("one", "two"))
        assert post(cloud, "/v1/verify", opening(), **one).status_code == 200
        tokens = [*PROMPT, ANSWER[0]]
        assert post(cloud, "/v1/verify", later(tokens, 1, len(tokens), []), **two).status_code == 410
        assert httpx.delete(f"{cloud.url}/v1/sessions/session-0001", headers=two).status_code == 204
        assert post(cloud, "/v1/verify", later(tokens, 1, len(tokens), []), **one).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/handshake", "/v1/verify", "/v1/continue", "/ready", "/metrics", "/v1/sessions/abcdefgh", "/v1/fleet"]
)
def test_nothing_but_health_is_open_where_keys_are_set(path: str) -> None:
    with running_cloud(api_keys=("key-one",)) as cloud:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key-one"}):
            response = httpx.post(f"{cloud.url}{path}", json={}, headers=headers)
            assert response.status_code == 401
        assert httpx.get(f"{cloud.url}/health").status_code == 200


def test_the_limits_of_body_rate_context_and_vocabulary() -> None:
    decoder = TableDecoder(context_length=20)
    with running_cloud(decoder, max_body_bytes=2048, requests_per_minute=5) as cloud:
        assert post(cloud, "/v1/verify", opening(new_tokens=[1] * 2000)).status_code == 413
        long = post(cloud, "/v1/verify", opening(new_tokens=[1] * 15))
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert post(cloud, "/v1/verify", opening(draft_tokens=[16])).status_code == 400
        statuses = [post(cloud, "/v1/verify", opening()).status_code for _ in range(5)]
        assert statuses.count(429) == 2
        assert int(post(cloud, "/v1/verify", opening()).headers["retry-after"]) > 0


def test_a_full_queue_sends_the_next_away_and_serves_the_rest() -> None:
    with running_cloud(TableDecoder(pass_s=0.05), num_slots=4, max_running=2, max_waiting=3) as cloud:
        ids = [f"session-{i:04}" for i in range(20)]
        with ThreadPoolExecutor(20) as pool:
            replies = list(pool.map(lambda i: post(cloud, "/v1/verify", opening(i, draft_tokens=ANSWER[:2])), ids))
        served = [reply for reply in replies if reply.status_code == 200]
        refused = [reply for reply in replies if reply.status_code == 503]
        assert len(served) + len(refused) == 20
        assert len(served) >= 5
        assert refused
        assert all(reply.headers["retry-after"] for reply in refused)
        assert {outcome(reply) for reply in served} == {(2, ANSWER[2])}


def test_errors_name_the_field_and_never_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running_cloud() as cloud:
        for content in (b'{"session_id": "CANARY', b'["CANARY"]', b'{"session_id":"CANARY!!!","round":0}', b"\xff\xfe"):
            response = httpx.post(f"{cloud.url}/v1/verify", content=content)
            assert response.status_code == 400
            assert "CANARY" not in response.text
        assert httpx.get(f"{cloud.url}/CANARY").status_code == 404
        assert httpx.get(f"{cloud.url}/v1/verify").status_code == 405
        assert httpx.post(f"{cloud.url}/v1/verify", json={**opening(), "protocol": 2}).status_code == 409
    ours = [
        record for record in caplog.records if not record.name.startswith("http")
    ]  # The test's own client logs too.
    assert "CANARY" not in "".join(record.getMessage() for record in ours)


def test_a_dead_inference_thread_is_not_ready() -> None:
    with running_cloud() as cloud:
        assert httpx.get(f"{cloud.url}/ready").status_code == 200
        cloud.service.thread.stop()
        assert httpx.get(f"{cloud.url}/ready").status_code == 503
        assert httpx.get(f"{cloud.url}/health").status_code == 200
        response = post(cloud, "/v1/verify", opening())
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stopped")


def test_health_answers_while_the_model_works() -> None:
    held = threading.Event()
    with running_cloud() as cloud, ThreadPoolExecutor(1) as pool:
        cloud.decoder.hold = held.wait
        try:
            working = pool.submit(continue_tokens, cloud, [*PROMPT], 10)
            wait_until(lambda: len(cloud.decoder.batch_sizes) > 0)
            with httpx.Client(base_url=cloud.url) as client:
                assert {client.get("/health").status_code for _ in range(5)} == {200}
            assert not working.done()
        finally:
            held.set()
        assert len(working.result()) == 11


def test_a_stop_lets_streams_finish_and_admits_nobody(tmp_path: Path) -> None:
    """The stream stands still until the stop has been seen from outside."""
    held_by = tmp_path / "held"
    with CloudProcess(tmp_path / "log", held_by=held_by) as cloud:
        held_by.touch()
        # The first token comes with the prompt, outside of any batch.
        body = {"session_id": "stream-0001", "opening": {"tokens": [1, 2], "prompt_len": 2}, "max_tokens": 40}
        with httpx.stream("POST", f"{cloud.url}/v1/continue", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            cloud.signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{cloud.url}/ready", timeout=60).status_code == 503)
            assert post(cloud, "/v1/continue", body).status_code == 503
            held_by.unlink()
            frames = [line for line in lines if line]
            assert "finish" in frames[-1]
            assert len(frames) == 40
        assert cloud.wait() == 0


def test_500_cancelled_requests_leave_no_session() -> None:
    with running_cloud(TableDecoder(pass_s=0.002), requests_per_minute=100_000, max_waiting=1000) as cloud:

        async def one(client: httpx.AsyncClient, number: int) -> None:
            session_id = f"session-{number:06}"
            request = client.post("/v1/verify", json=opening(session_id, draft_tokens=ANSWER[:3]))
            task = asyncio.create_task(request)
            await asyncio.sleep((number % 10) * 0.004)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.delete(f"/v1/sessions/{session_id}")

        async def scenario() -> None:
            limits = httpx.Limits(max_connections=20)
            async with httpx.AsyncClient(base_url=cloud.url, timeout=60, limits=limits) as client:
                for start in range(0, 500, 20):
                    await asyncio.gather(*(one(client, number) for number in range(start, start + 20)))

        asyncio.run(scenario())
        wait_until(lambda: cloud.service.meter.running == 0)
        assert len(cloud.service.sessions) == 0
        assert cloud.service.store.num_sessions == 0  # type: ignore[attr-defined]
        assert (cloud.service.meter.running, cloud.service.meter.waiting) == (0, 0)


def test_idle_sessions_expire() -> None:
    with running_cloud() as cloud:
        post(cloud, "/v1/verify", opening())
        cloud.service.sessions.expire()
        assert len(cloud.service.sessions) == 1
        cloud.service.sessions._ttl_s = -1.0
        cloud.service.sessions.expire()
        assert len(cloud.service.sessions) == 0


def test_settings_are_refused_by_name() -> None:
    for flags, word in (
        ({"host": "0.0.0.0"}, "API key"),
        ({"api_keys": (" ",)}, "must not be empty"),
        ({"store_key": "CANARY"}, "store_key"),
        ({"max_running": 0}, "max_running"),
    ):
        with pytest.raises(ConfigError, match=word) as caught:
            load_settings(flags)
        assert "CANARY" not in str(caught.value)


def test_the_gamma_hint_falls_as_the_load_grows() -> None:
    cost = [84.0, 106.0, 137.0, 160.0, 177.0, 200.0, 222.0, 245.0, 267.0]  # ms, measured on two AVX2 cores
    dear = [84.0, 200.0]  # A row more of another session costs more than a pass of its own would.
    hints = [best_gamma(0.8, PassCosts(cost, dear), 100.0, users, 8) for users in (1, 2, 4, 8, 16)]
    assert hints == sorted(hints, reverse=True)
    assert hints[0] >= 3
    flat = PassCosts([10.0] * 9)  # Verification is free: every draft pays.
    assert best_gamma(0.8, flat, 0.0, 1, 8) == 8
    assert pass_cost_ms(cost, 11) == pytest.approx(267 + 2 * (267 - 160) / 5)
    assert expected_tokens(0.5, 2) == 1.75
    meter = LoadMeter(PassCosts(cost), 8)
    assert meter.load(1).gamma_hint == 8
    assert 1 <= meter.load(8).gamma_hint < 8
    meter.waiting = 1
    assert meter.load(8).gamma_hint == 0
