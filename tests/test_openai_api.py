"""The OpenAI API over real sockets: whole answers and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from edge_agent.openai_schema import ChatRequest, CompletionRequest
from tests.servers import (
    CHAT,
    RunningServer,
    chat,
    complete,
    error_of,
    run_server,
    streamed_text,
)
from tests.toy_engine import Script, script_engine, table_engine, toy_settings

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


def test_chat_answer_has_openais_shape(server: RunningServer) -> None:
    body = chat(server).json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("chat.completion", "toy", "fp_toy")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_tokens = len(ANSWER.encode())
    assert body["usage"]["completion_tokens"] == num_tokens
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + num_tokens
    report = body["souschef"]
    assert sum(report["tokens_by_origin"].values()) == num_tokens
    assert report["accepted_tokens"] == report["tokens_by_origin"]["draft"] > 0
    assert report["ttft_ms"] > 0
    assert report["tokens_per_second"] > 0


def test_completion_takes_text_and_ids_alike(server: RunningServer) -> None:
    text = complete(server, prompt="abc").json()
    assert text["object"] == "text_completion"
    assert complete(server, prompt=list(b"abc")).json()["choices"] == text["choices"]
    assert complete(server, prompt=["abc"]).json()["choices"] == text["choices"]
    assert complete(server, prompt=[list(b"abc")]).json()["choices"] == text["choices"]
    assert text["usage"]["prompt_tokens"] == 3
    assert text["usage"]["completion_tokens"] == 8
    assert complete(server, max_tokens=None).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("limit", range(1, 7))
def test_limit_is_exact_and_named_length(server: RunningServer, limit: int) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        body = chat(server, **{field: limit}, logprobs=True).json()
        assert body["usage"]["completion_tokens"] == limit
        assert len(body["choices"][0]["logprobs"]["content"]) == limit
        assert body["choices"][0]["finish_reason"] == "length"


def test_limit_past_the_context_is_clamped_and_ends_by_length() -> None:
    with run_server(toy_settings(), lambda: script_engine(Script(LONG, ends=False))) as server:
        body = chat(server, max_tokens=10**8).json()
    assert body["usage"]["total_tokens"] == 256
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("stop", "text"), [("😀", "Hello "), (["zzz", "wör"], "Hello 😀, "), ("H", ""), ([], ANSWER)])
def test_stop_strings(server: RunningServer, stop: object, text: str) -> None:
    choice = chat(server, stop=stop).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert streamed_text(chat(server, stop=stop, stream=True)) == text


def test_logprobs_of_chat(server: RunningServer) -> None:
    content = chat(server, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == ANSWER
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
        assert -1e-6 <= entry["logprob"] <= 0
        assert entry["top_logprobs"][1]["logprob"] < -30


def test_logprobs_of_completion(server: RunningServer) -> None:
    logprobs = complete(server, logprobs=1).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 8
    assert logprobs["text_offset"] == list(range(8))


def test_prediction_is_used_and_reported(server: RunningServer) -> None:
    prediction = {"type": "content", "content": ANSWER}
    body = chat(server, prediction=prediction).json()
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > len(ANSWER) // 2
    assert body["choices"][0]["message"]["content"] == ANSWER
    parts = {"type": "content", "content": [{"type": "text", "text": ANSWER}]}
    assert chat(server, prediction=parts).json()["usage"]["completion_tokens_details"] == details


def test_speculation_can_be_turned_off(server: RunningServer) -> None:
    for wish in ({"speculation": "off"}, {"max_gamma": 0}):
        report = chat(server, souschef=wish).json()["souschef"]
        assert report["draft_tokens"] == 0
        assert "acceptance_rate" not in report
        assert report["decisions"][0]["mode"] == "local_direct"


def test_special_tokens_in_content_are_text(server: RunningServer) -> None:
    plain = chat(server, messages=[{"role": "user", "content": "x"}]).json()["usage"]["prompt_tokens"]
    spelled = chat(server, messages=[{"role": "user", "content": "<|im_end|>"}]).json()["usage"]["prompt_tokens"]
    assert spelled - plain == len("<|im_end|>") - 1
    assert complete(server, prompt="<|im_end|>").json()["usage"]["prompt_tokens"] == len("<|im_end|>")


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_empty_content_is_answered(server: RunningServer, content: object) -> None:
    assert chat(server, messages=[{"role": "user", "content": content}]).status_code == 200


def test_seeds_decide_the_text_whatever_the_gamma() -> None:
    texts: dict[int, set[str]] = {}
    for gamma in (0, 3):
        with run_server(toy_settings(), lambda gamma=gamma: table_engine(gamma=gamma)) as server:
            for seed in (-1, 7, 8):
                body = chat(server, temperature=1, seed=seed, max_tokens=24, logit_bias={"257": -100}).json()
                texts.setdefault(seed, set()).add(body["choices"][0]["message"]["content"])
            unseeded = {json.dumps(chat(server, temperature=1, max_tokens=24).json()["choices"]) for _ in range(3)}
            assert len(unseeded) == 3
    assert all(len(found) == 1 for found in texts.values())
    assert len(set.union(*texts.values())) == 3


def test_answers_side_by_side_are_those_given_alone() -> None:
    bodies = [
        {
            **CHAT,
            "messages": [{"role": "user", "content": f"question {n}"}],
            "max_tokens": 20,
            "seed": n,
            "temperature": n % 2,
        }
        for n in range(16)
    ]

    def ask(body: dict[str, Any]) -> Any:
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"]

    with run_server(toy_settings(), table_engine) as server, ThreadPoolExecutor(16) as pool:
        alone = [ask(body) for body in bodies]
        assert list(pool.map(ask, bodies)) == alone


# Refusals


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": None}, "messages", "list"),
        ({"messages": [{"role": "boss", "content": ""}]}, "messages.0.role", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages.0", "content is required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "'text'"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages.0.content.0.text", "Unicode"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "'tool'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages", "template"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0", "tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id", "required"),
        ({"temperature": -1}, "temperature", "0"),
        ({"temperature": 2.1}, "temperature", "2"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 1.1}, "top_p", "1"),
        ({"top_k": 0.01}, "top_k", "integer"),
        ({"min_p": 2}, "min_p", "1"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "one"),
        ({"n": 3}, "n", "1"),
        ({"n": 10**6}, "n", "1"),
        ({"n": True}, "n", "1"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"seed": "x"}, "seed", "integer"),
        ({"seed": 2**64}, "seed", "less"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "100"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "258"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "template"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools", "once"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "one of the tools"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
        ({"souschef": {"max_gamma": 17}}, "souschef.max_gamma", "16"),
        ({"souschef": {"speculation": "yes"}}, "souschef.speculation", "'auto', 'on' or 'off'"),
        ({"souschef": {"privacy": "on_device", "execution": "only_cloud"}}, "souschef", "contradict"),
        ({"souschef": {"gamma": 1}}, "souschef.gamma", "unknown"),
        ({"souschef": []}, "souschef", "object"),
        ({"base_url": "http://evil.example"}, "base_url", "unknown"),
        ({"prediction": {"type": "text", "content": ""}}, "prediction.type", "content"),
    ],
)
def test_bad_values_are_400_with_the_field_and_what_is_allowed(
    server: RunningServer, fields: dict[str, Any], param: str, hint: str
) -> None:
    error = error_of(chat(server, **fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert hint in error["message"]
    assert chat(server, max_tokens=1).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud83d"'])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "seed"])
def test_numbers_that_are_none_are_400(server: RunningServer, field: str, number: str) -> None:
    content = json.dumps(CHAT)[:-1] + f', "{field}": {number}}}'
    headers = {"Content-Type": "application/json"}
    error_of(httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b"1" * 10_000])
def test_bodies_that_are_none_are_400(server: RunningServer, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error_of(httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers))


def test_body_of_another_type_is_400(server: RunningServer) -> None:
    headers = {"Content-Type": "text/plain"}
    error = error_of(httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(CHAT), headers=headers))
    assert "application/json" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_bad_values_of_completions_are_400(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(complete(server, **fields))["param"] == param


@pytest.mark.parametrize("temperature", [1e-4, 1e-45, 5e-324, 0.0])
def test_tiny_temperatures_are_greedy(server: RunningServer, temperature: float) -> None:
    assert chat(server, temperature=temperature, top_k=9_999_999).json()["choices"][0]["message"]["content"] == ANSWER


DEFAULTS: dict[str, Any] = {
    "model": "toy",
    "n": 1,
    "stream": False,
    "temperature": 1,
    "top_p": 1.0,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stop": [],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "service_tier": "auto",
    "store": False,
    "metadata": {},
    "user": "someone",
    "logit_bias": {},
    "max_tokens": 4,
}


def test_every_field_of_openai_is_known_by_name() -> None:
    chat_fields = set(chat_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    text_fields = set(text_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert chat_fields <= set(ChatRequest.model_fields)
    assert text_fields <= set(CompletionRequest.model_fields)


@pytest.mark.parametrize("field", sorted(set(ChatRequest.model_fields) - {"messages"}))
def test_null_is_the_default_of_every_field(server: RunningServer, field: str) -> None:
    assert chat(server, **{"max_tokens": 1, field: None}).status_code == 200


def test_fields_with_their_defaults_pass(server: RunningServer) -> None:
    assert chat(server, **DEFAULTS).status_code == 200


def test_prompt_past_the_context_is_refused_before_any_work() -> None:
    script = Script()
    with run_server(toy_settings(), lambda: script_engine(script)) as fresh:
        for stream in (False, True):
            long_prompt = [{"role": "user", "content": "x" * 300}]
            error = error_of(chat(fresh, messages=long_prompt, stream=stream))
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
            assert "256" in error["message"]
        assert error_of(complete(fresh, prompt=[1] * 256))["code"] == "context_length_exceeded"
        assert script.num_rows == fresh.agent.engine.target.slots.num_cached_tokens == 0
        assert complete(fresh, prompt=[1] * 255, max_tokens=9).json()["usage"]["completion_tokens"] == 1


def test_unknown_model_route_and_method(server: RunningServer) -> None:
    assert error_of(chat(server, model="gpt-4"), 404)["code"] == "model_not_found"
    assert error_of(httpx.get(f"{server.url}/v1/nothing"), 404)["code"] == "not_found"
    wrong_method = httpx.get(f"{server.url}/v1/chat/completions")
    assert error_of(wrong_method, 405)["code"] == "method_not_allowed"
    assert wrong_method.headers["allow"] == "POST"


def test_errors_and_requests_are_documented(server: RunningServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        operation = document["paths"][path]["post"]
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}
        assert "text/event-stream" in operation["responses"]["200"]["content"]
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(fields) == set(ChatRequest.model_fields)
    assert fields["n"]["enum"] == [1, None]


def test_template_that_refuses_is_400() -> None:
    def strict_engine() -> Any:
        engine = script_engine(Script())
        engine.chat_template = type(engine.chat_template)(
            "{% if messages[0].role != 'user' %}{{ raise_exception('a user has to begin') }}{% endif %}", None, None
        )
        return engine

    with run_server(toy_settings(), strict_engine) as server:
        error = error_of(chat(server, messages=[{"role": "system", "content": "x"}]))
    assert "a user has to begin" in error["message"]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")
