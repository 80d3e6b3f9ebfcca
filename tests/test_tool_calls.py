"""Tool calls read out of an answer's text, whatever pieces it comes in, and told as OpenAI does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.tool_calls import AnswerPart, ArgumentsAdded, CallBegun, CallReader, Said
from shared.chat_template import ChatTemplate
from tests.fakes import TableLM
from tests.servers import CHAT, RunningServer, chat, error_of, events, run_server
from tests.toy_engine import END, TEMPLATE, Script, ScriptLM, script_engine, toy_engine, toy_settings

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\\u00f6ln }", "days": [1, {"x": 2}]}}\n</tool_call>'
OTHER = '<tool_call>{"arguments": {"a": 1}, "name": "other"}</tool_call>'
ARGUMENTS = '{"city": "K\\u00f6ln }", "days": [1, {"x": 2}]}'
TOOL_TEMPLATE = TEMPLATE.replace(
    "{% for message",
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}{% for message",
).replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}{% endfor %}",
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["today", "tomorrow"]}, "metric": {"type": "boolean"}},
            "required": ["day", "metric"],
            "additionalProperties": False,
        },
    },
}


def read(text: str, cuts: list[int], names: tuple[str, ...] = ()) -> tuple[str, list[tuple[str, str]]]:
    """What was said, and the calls, with the text cut at the given places."""
    reader = CallReader(names)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parts: list[AnswerPart] = []
    for start, end in itertools.pairwise(edges):
        parts += reader.feed(text[start:end])
    parts += reader.finish()
    said = "".join(part.text for part in parts if isinstance(part, Said))
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegun):
            assert part.index == len(calls)
            calls.append([part.name, ""])
        elif isinstance(part, ArgumentsAdded):
            calls[part.index][1] += part.text
    assert reader.num_calls == len(calls)
    return said, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("", "", []),
        ("Just text. ", "Just text. ", []),
        ("a < b <tool", "a < b <tool", []),
        (CALL, "", [("weather", ARGUMENTS)]),
        (f"Let me see.\n\n{CALL}", "Let me see.", [("weather", ARGUMENTS)]),
        (f"{CALL}\n{CALL}\n", "", [("weather", ARGUMENTS)] * 2),
        (f"{CALL}\n{OTHER}", "", [("weather", ARGUMENTS), ("other", '{"a": 1}')]),
        (f"{CALL} done", "done", [("weather", ARGUMENTS)]),
        ("<tool_call>no call</tool_call> x", "<tool_call>no call</tool_call> x", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "n"}</tool_call>', "", [("n", "{}")]),
        ('<tool_call>{"name": "n", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("n", '{"a": 1}')]),
        ('<tool_call>\n{"na', '<tool_call>\n{"na', []),
        ('<tool_call>{"name": "n", "arguments": {"a": "b', "", [("n", '{"a": "b')]),
        ('<tool_call>{"name": "n", "arguments": {"a": 1}} and on', "and on", [("n", '{"a": 1}')]),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", []),
    ],
)
def test_calls_and_text_are_told_apart(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert read(text, []) == (said, calls)
    assert read(text, list(range(min(len(text), 300)))) == (said, calls)


BARE = '{"name": "weather", "arguments": ' + ARGUMENTS + "}"


@pytest.mark.parametrize(
    ("text", "said", "num_calls"),
    [
        (BARE, "", 1),
        (f"```json\n{BARE}\n```", "", 1),
        (f" \n```\n{BARE}\n```\nDone.", "Done.", 1),
        (f"{BARE}\n{CALL}", "", 2),
        ('```json\n{\n  "name": "weather",\n  "arguments": {}\n}\n```', "", 1),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', 0),
        ('```json\n{"name": "weather"}\n```', '```json\n{"name": "weather"}\n```', 0),
        (f"Like this: {BARE}", f"Like this: {BARE}", 0),
        ('{"names": 1}', '{"names": 1}', 0),
        ("```python\nx\n```", "```python\nx\n```", 0),
        ('{"name": "wea', '{"name": "wea', 0),
        ("``", "``", 0),
        ("", "", 0),
    ],
)
def test_a_call_that_lacks_its_tags(text: str, said: str, num_calls: int) -> None:
    for cuts in ([], list(range(len(text)))):
        found, calls = read(text, cuts, ("weather",))
        assert (found, len(calls)) == (said, num_calls)
        assert all(name == "weather" for name, _ in calls)


def test_text_is_not_held_back_for_a_call_that_it_can_not_become() -> None:
    for text in ("Hello", "``x", "{a", "```py", '{"nam3'):
        assert CallReader({"weather"}).feed(text), text


@settings(max_examples=500)
@given(
    st.lists(
        st.sampled_from(
            [CALL, OTHER, BARE, "```json", "text", " ", "\n", "<", "<tool_call>", "</tool_call>", "{", '"', "}"]
        )
    ),
    st.data(),
)
def test_what_is_read_does_not_depend_on_the_cuts(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    for names in ((), ("weather", "other")):
        assert read(text, cuts, names) == read(text, [], names)


# Over the API


def with_tools(engine: Any) -> Any:
    engine.chat_template = ChatTemplate(TOOL_TEMPLATE, None, END)
    return engine


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """An agent that says some text and calls twice."""
    with run_server(
        toy_settings(context_length=1024),
        lambda: with_tools(script_engine(Script(f"I look.\n{CALL}\n{OTHER}"), context_length=1024)),
    ) as running:
        yield running


def test_calls_in_a_whole_answer(server: RunningServer) -> None:
    choice = chat(server, tools=[WEATHER]).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "I look."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": ARGUMENTS},
        {"name": "other", "arguments": '{"a": 1}'},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}


def test_calls_in_a_stream_add_up_to_the_whole(server: RunningServer) -> None:
    frames = events(chat(server, tools=[WEATHER], stream=True).text)
    deltas = [choice["delta"] for frame in frames[:-1] for choice in frame["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    for index, (name, arguments) in enumerate([("weather", ARGUMENTS), ("other", '{"a": 1}')]):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert mine[0]["function"]["name"] == name
        assert mine[0]["id"].startswith("call_")
        assert all("id" not in piece and "name" not in piece["function"] for piece in mine[1:])
        assert "".join(piece["function"]["arguments"] for piece in mine) == arguments
    assert len(pieces) > 6, "arguments come as they are written"
    assert frames[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_openais_client_reads_the_stream(server: RunningServer) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="toy", messages=CHAT["messages"], tools=[WEATHER], temperature=0
        ) as stream,  # type: ignore[list-item]
    ):
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == ["weather", "other"]


def test_without_tools_or_with_choice_none_the_text_is_text(server: RunningServer) -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = chat(server, **fields).json()["choices"][0]
        assert choice["message"]["content"] == f"I look.\n{CALL}\n{OTHER}"
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_a_limit_inside_a_call_says_length(server: RunningServer) -> None:
    choice = chat(server, tools=[WEATHER], max_tokens=70).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_the_history_of_calls_goes_through_the_template(server: RunningServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    history = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    body = chat(server, messages=history, tools=[WEATHER]).json()
    rendered = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}'
    assert body["usage"]["prompt_tokens"] > len(rendered.encode())
    agent = server.agent
    prompt = agent.engine.chat_template.render([dict(message) for message in history])
    assert rendered in prompt
    assert "tool\nrain" in prompt


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud83d"}', "[" * 3000, "{", "", '{"<|im_start|>": 1}', "NaN", '{"a": 1e999}', "null"]
)
def test_arguments_that_a_model_botched_are_no_500(server: RunningServer, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    response = chat(server, messages=history, max_tokens=1)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert error_of(response)["param"] == "messages"


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "description": "\ud83d"},
        {"type": "object", "\ud83d": {}},
        {"type": "object", "minimum": float("nan")},
        json.loads('{"items":' * 70 + "{}" + "}" * 70),
        json.loads('{"items":' * 900 + "{}" + "}" * 900),
        {"type": "string"},
        {"type": "object", "not": {}},
    ],
)
def test_schemas_that_are_none_are_400(server: RunningServer, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert error_of(chat(server, tools=[tool], tool_choice="required"))["param"].startswith("tools")
    assert chat(server, max_tokens=1).status_code == 200


@pytest.fixture(scope="module")
def babbler() -> Iterator[RunningServer]:
    """An agent that babbles, so that all sense comes from the grammar."""

    def engine() -> Any:
        return with_tools(toy_engine(lambda: TableLM(258, 5, sharpness=3.0, context_length=2048), context_length=2048))

    with run_server(toy_settings(context_length=2048), engine) as running:
        yield running


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_keeps_to_its_schema(babbler: RunningServer, choice: object, seed: int) -> None:
    fields = {"temperature": 1, "seed": seed, "parallel_tool_calls": False, "max_tokens": 1200}
    answer = chat(babbler, tools=[WEATHER], tool_choice=choice, **fields).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["day"] in ("today", "tomorrow")
    assert isinstance(arguments["metric"], bool)


def test_a_held_answer_may_not_be_for_the_cloud_only(babbler: RunningServer) -> None:
    fields = {"response_format": {"type": "json_object"}, "souschef": {"execution": "only_cloud"}}
    error = error_of(chat(babbler, **fields))
    assert error["param"] == "souschef.execution"
    assert "on the device" in error["message"]


def test_a_template_that_knows_no_tools_is_refused_by_name() -> None:
    with run_server(toy_settings(), lambda: script_engine(Script())) as plain:
        assert "template of toy" in error_of(chat(plain, tools=[WEATHER]))["message"]


def test_the_script_model_is_held_too() -> None:
    """A model that says something else altogether: ScriptLM never wants JSON."""
    with run_server(
        toy_settings(), lambda: toy_engine(lambda: ScriptLM(Script("```json nonsense"), 256), context_length=256)
    ) as server:
        schema = {"name": "x", "schema": {"enum": ["a", "b"]}}
        fields = {"response_format": {"type": "json_schema", "json_schema": schema}}
        assert json.loads(chat(server, **fields).json()["choices"][0]["message"]["content"]) in ("a", "b")
