"""Section B: streams and text."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import openai
import psutil
import pytest

from edge_agent.decision import Mode
from edge_agent.request import GenerationRequest
from edge_agent.round import Round
from shared.detokenizer import IncrementalDetokenizer
from shared.errors import CloudError
from shared.sampling import SamplingParams
from shared.sse import SseParser, frame
from shared.tokenizer import Tokenizer
from tests.cloud_edge import PROMPT, PlannedController, always, cloud_client, edge_session, expected, tokens_of
from tests.cloud_toy import running_cloud
from tests.servers import CHAT, chat, events, post_bytes, run_server, settled, streamed_text, wait_until
from tests.toy_engine import Script, script_engine, toy_settings

TEXTS = ["😀", "👩‍👩‍👧‍👦 ok", "日本語のテキスト", "a\u2028b\u0085c", "naïve 🇩🇪!"]


@pytest.mark.parametrize("text", TEXTS)
def test_B1_characters_are_never_split(text: str) -> None:
    """Half a character is sent as U+FFFD, or the stream stalls on it (aprender#2019, qwisp#134).

    Here: bytes are held until a character is whole; what dangles at the end is flushed once.
    """
    with run_server(toy_settings(), lambda: script_engine(Script(text), gamma=2)) as server:
        whole = chat(server).json()["choices"][0]["message"]["content"]
        stream = chat(server, stream=True)
    assert whole == text
    assert streamed_text(stream) == text
    deltas = [choice["delta"].get("content", "") for event in events(stream.text)[:-1] for choice in event["choices"]]
    assert not any("\ufffd" in delta for delta in deltas)


def test_B1_a_dangling_character_is_flushed_at_the_end() -> None:
    with run_server(toy_settings(), lambda: script_engine(Script("a😀"))) as server:
        assert chat(server, max_tokens=3).json()["choices"][0]["message"]["content"] == "a\ufffd"
        assert streamed_text(chat(server, max_tokens=3, stream=True)) == "a\ufffd"


def metaspace_tokenizer() -> Tokenizer:
    words = {"▁Hello": 0, "▁world": 1, "!": 2, "▁": 3}
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    definition: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": decoder, "post_processor": None, "decoder": decoder,
        "model": {"type": "BPE", "vocab": words, "merges": [], "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False},
    }  # fmt: skip
    return Tokenizer(definition)


def test_B2_the_space_before_a_word_survives() -> None:
    """Decoded one by one, tokens lose their leading space: "Helloworld!" (litgpt#2326, transformers#28776).

    Here: a token is its bytes, and only the very first space of a text goes where the tokenizer put it.
    """
    tokenizer = metaspace_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in (0, 1, 2)] + [detokenizer.flush()]
    assert "".join(pieces) == "Hello world!" == tokenizer.decode([0, 1, 2])


def test_B4_line_separators_inside_of_frames() -> None:
    """U+2028 and U+0085 in a delta are taken for line ends by clients (httpx-sse#34).

    Here: frames are ASCII, and the cloud's stream is cut at \\n, \\r and \\r\\n alone.
    """
    text = "a\u2028b\u0085c\u2029d"
    with run_server(toy_settings(), lambda: script_engine(Script(text))) as server:
        stream = chat(server, stream=True)
    assert stream.content.isascii()
    assert streamed_text(stream) == text
    assert frame({"x": text}).isascii()
    raw = f'data: {{"x": "{text}"}}\n\n'.encode()
    assert [json.loads(data)["x"] for data in SseParser().feed(raw)] == [text]


def test_B5_pings_and_headers_for_proxies() -> None:
    """Pings after `id:` fields break clients; proxies buffer or compress streams (openai-python#2722, gin#1589).

    Here: comments alone; no `id`, `retry` or empty `data`; headers against buffering and caching; never compressed.
    """
    script = Script("ok", pause_s=0.3)
    with run_server(toy_settings(ping_s=0.05), lambda: script_engine(script)) as server:
        stream = chat(server, stream=True)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            chunks = client.chat.completions.create(model="toy", messages=CHAT["messages"], temperature=0, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "ok"
    assert ": ping" in stream.text
    lines = stream.text.split("\n")
    assert all(line == "" or line.startswith(("data: {", "data: [DONE]", ": ping")) for line in lines)
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["cache-control"] == "no-cache"
    assert "content-encoding" not in stream.headers


def test_B7_failure_after_the_200() -> None:
    """The stream just ends, or says "stop", when what makes it fails (open-webui#29628, axonhub#2185).

    Here: a frame with an error and a clean end; with the device allowed, it goes on there.
    """
    script = Script("abcdefghijklmnop")
    script.fail_after = 6
    with run_server(toy_settings(), lambda: script_engine(script, gamma=0)) as server:
        found = events(chat(server, stream=True).text)
    assert set(found[-1]) == {"error"}
    assert "[DONE]" not in found
    finishes = [choice["finish_reason"] for event in found[:-1] for choice in event["choices"]]
    assert set(finishes) == {None}


@pytest.mark.parametrize("fallback", [True, False])
def test_B7_the_cloud_dies_after_five_tokens(fallback: bool) -> None:
    request = GenerationRequest(PROMPT, 40, SamplingParams(seed=3))

    async def answer(url: str, kill: Any) -> list[Round]:
        rounds: list[Round] = []
        async with (
            cloud_client(url) as client,
            edge_session(client, request, PlannedController(always(Mode.CLOUD_VERIFY), fallback=fallback)) as session,
        ):
            async for round in session.run():
                rounds.append(round)
                if len(tokens_of(rounds)) >= 5:
                    kill()
        return rounds

    with running_cloud() as cloud:
        decoder = cloud.decoder

        def kill() -> None:
            for cache in decoder.caches:
                cache.forward = _broken  # type: ignore[method-assign]

        if fallback:
            assert tokens_of(asyncio.run(answer(cloud.url, kill))) == expected(request)
        else:
            with pytest.raises(CloudError):
                asyncio.run(answer(cloud.url, kill))


def _broken(tokens: object, num_logits: int) -> Any:
    raise RuntimeError("the toy broke")


def leave_early(stream: bool) -> None:
    gamma, context = 3, 60_000
    script = Script("abcdefghij" * 20, ends=False, pause_s=0.001)
    settings = toy_settings(context_length=context)
    with run_server(settings, lambda: script_engine(script, gamma=gamma, context_length=context)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(post_bytes("/v1/chat/completions", {**CHAT, "stream": stream}))
            if stream:
                connection.recv(100)
            wait_until(lambda: script.num_rows > 4)
            script.gate.clear()
        rows = script.num_rows
        settled(server.url)
        script.gate.set()
        wait_until(lambda: server.agent.scheduler.num_running == 0)
        # A pass that was past the gate when it closed, and the one that waited at it.
        assert script.num_rows - rows <= 2 * (gamma + 1)
        rows = script.num_rows
        time.sleep(0.2)
        assert script.num_rows == rows


def test_B8_a_client_that_leaves_before_its_answer() -> None:
    """The answer is made to its end for nobody: middleware hides the disconnect (litellm#37140, vLLM#11096).

    Here: pure ASGI all the way; within a round the work stops, and place and cache are given back.
    """
    leave_early(stream=False)


def test_B9_a_client_that_leaves_its_stream() -> None:
    """A sync generator runs on to its next yield, and its `finally` much later (findajob#743, exo#1745).

    Here: async generators, closed at once by whoever opened them.
    """
    leave_early(stream=True)


def test_B10_a_slow_client_fills_no_memory() -> None:
    """A client that reads a byte a second fills memory, or holds up the others (starlette#1012).

    Here: the next frame is made when the one before was taken; other requests have their own turns.
    """
    script = Script("0123456789" * 50, ends=False)
    with run_server(toy_settings(context_length=8192), lambda: script_engine(script, context_length=8192)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20}
            connection.sendall(post_bytes("/v1/chat/completions", body))
            connection.recv(1)
            before = psutil.Process().memory_info().rss
            for _ in range(5):
                connection.recv(1)
                assert chat(server, max_tokens=5).status_code == 200
            assert psutil.Process().memory_info().rss - before < 64 * 2**20
        wait_until(lambda: server.agent.scheduler.num_running == 0)
