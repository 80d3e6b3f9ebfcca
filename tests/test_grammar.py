"""Grammars as constraints on tokens: the mask, the end, copies, and refusals that name why."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge_agent.answer_grammar import answer_grammar
from edge_agent.openai_schema import ChatRequest
from shared.errors import UnsupportedFieldError
from shared.grammar import GrammarCompiler, GrammarConstraint
from shared.sampling import Sampler, SamplingParams
from tests.toy_engine import byte_tokenizer

END = 257
COMPILER = GrammarCompiler(byte_tokenizer())
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def compiled(schema: object) -> GrammarConstraint:
    return COMPILER.compile(f"start: %json {json.dumps(schema)}\n", "response_format")


def follow(constraint: GrammarConstraint, text: str) -> GrammarConstraint:
    for token in text.encode():
        assert constraint.mask()[token], chr(token)
        constraint.append(token)
    return constraint


def allowed(constraint: GrammarConstraint) -> str:
    return "".join("$" if token == END else chr(token) for token in np.flatnonzero(constraint.mask()))


def test_the_mask_is_what_the_schema_allows_next() -> None:
    constraint = compiled(SCHEMA)
    assert allowed(constraint) == "{"
    assert "n" not in allowed(follow(constraint, "{"))
    assert allowed(follow(constraint, '"')) == "n"
    assert "9" in allowed(follow(constraint, 'n":')).replace(" ", "")
    assert "}" not in allowed(constraint)
    assert "}" in allowed(follow(constraint, "12"))


def test_after_the_end_only_the_end_is_left_and_stays() -> None:
    constraint = follow(compiled(SCHEMA), '{"n":1}')
    for _ in range(3):
        assert allowed(constraint) == "$"
        constraint.append(END)


def test_a_token_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(ValueError, match="not allowed"):
        compiled(SCHEMA).append(ord("x"))


def test_a_fork_moves_alone() -> None:
    constraint = follow(compiled(SCHEMA), '{"n":')
    fork = follow(constraint.fork(), "1}")
    assert allowed(fork) == "$"
    assert "}" not in allowed(constraint)
    assert allowed(compiled(SCHEMA)) == "{"


def test_the_sampler_draws_what_is_allowed_whatever_the_model_prefers() -> None:
    logits = np.zeros(258)
    logits[ord("x")] = 50.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=50, logit_bias={ord("y"): 100.0})
        sampler = Sampler(params, stop_ids=[END], constraint=compiled(SCHEMA))
        drawn = []
        for position in range(400):
            token = sampler.draw(logits, position)
            if token == END:
                break
            sampler.append(token)
            drawn.append(token)
        if drawn[-1] == ord("}"):
            assert set(json.loads(bytes(drawn))) == {"n"}
        assert bytes(drawn).startswith(b"{")
        assert not {ord("x"), ord("y")} & set(drawn)


def test_the_end_of_the_grammar_outranks_min_tokens() -> None:
    sampler = Sampler(SamplingParams(min_tokens=9), stop_ids=[END], constraint=follow(compiled(SCHEMA), '{"n":1}'))
    assert sampler.draw(np.zeros(258), 7) == END


def test_a_row_of_logits_wider_or_narrower_than_the_vocabulary() -> None:
    for width in (250, 258, 300):
        logits = np.zeros(width)
        logits[-1] = 9.0
        assert Sampler(SamplingParams(temperature=0), constraint=compiled(SCHEMA)).draw(logits, 0) == ord("{")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "foo"}, "foo"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "not present"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "minLength": 9, "maxLength": 2}, ""),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(schema: dict[str, object], why: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=r"^response_format can't be followed: .") as refused:
        compiled(schema)
    assert why in refused.value.message
    assert refused.value.param == "response_format"


def test_a_pattern_that_explodes_is_stopped() -> None:
    """Refused at once or given up later by name; never followed without bounds."""
    try:
        constraint = compiled({"type": "string", "pattern": "^(a|b)*a(a|b){5000}$"})
        for token in b'"' + b"ab" * 2000:
            constraint.mask()
            constraint.append(token)
    except UnsupportedFieldError as refused:
        assert refused.param == "response_format"  # noqa: PT017


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"anyOf": [{"type": "object", "properties": {f"a{i}": {}}, "required": [f"a{i}"]} for i in range(5000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
        {"enum": [f"value-{i}" for i in range(100_000)]},
    ],
    ids=["in a circle", "thousands of choices", "thousands of fields", "thousands of values"],
)
def test_schemas_that_ask_too_much_are_refused(schema: dict[str, object]) -> None:
    with pytest.raises(UnsupportedFieldError, match=r"^response_format.*(too complex|too large|too big)"):
        follow(compiled(schema), '{"a17":')


def test_what_was_compiled_last_is_kept() -> None:
    compiler = GrammarCompiler(byte_tokenizer())
    for number in range(70):
        compiler.compile(f'start: "{number}"', "tools")
    assert len(compiler._compiled) == 64
    assert 'start: "0"' not in compiler._compiled


def grammar_of(**fields: object) -> tuple[str, str] | None:
    return answer_grammar(ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields}))


def tool(name: str, **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **fields}}


def accepts(grammar: tuple[str, str] | None, text: str) -> bool:
    """Whether the text is a whole answer by the grammar."""
    assert grammar is not None
    constraint = COMPILER.compile(*grammar)
    for token in text.encode():
        if not constraint.mask()[token]:
            return False
        constraint.append(token)
    return bool(constraint.mask()[END])


CALL_F = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
TOOLS = [tool("f", parameters=SCHEMA), tool("g")]
STRICT = [tool("f", parameters=SCHEMA, strict=True), tool("g")]


def test_free_text_has_no_grammar() -> None:
    assert grammar_of() is None
    assert grammar_of(response_format={"type": "text"}) is None
    assert grammar_of(tools=TOOLS) is None
    assert grammar_of(tools=TOOLS, tool_choice="auto") is None
    assert grammar_of(tools=STRICT, tool_choice="none") is None


def test_a_required_call() -> None:
    grammar = grammar_of(tools=TOOLS, tool_choice="required")
    assert accepts(grammar, CALL_F)
    assert accepts(grammar, CALL_G)
    assert accepts(grammar, f"{CALL_F}\n{CALL_G}\n{CALL_F}")
    assert not accepts(grammar, "")
    assert not accepts(grammar, "I would rather not.")
    assert not accepts(grammar, CALL_F.replace("1", '"1"'))
    assert not accepts(grammar, CALL_F.replace('"f"', '"h"'))
    alone = grammar_of(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert accepts(alone, CALL_F)
    assert not accepts(alone, f"{CALL_F}\n{CALL_G}")


def test_a_named_call() -> None:
    grammar = grammar_of(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}})
    assert accepts(grammar, CALL_G)
    assert not accepts(grammar, CALL_F)


def test_a_strict_tool_is_held_to_its_schema_wherever_it_is_called() -> None:
    grammar = grammar_of(tools=STRICT)
    assert accepts(grammar, "Just text, <b>nothing</b> <tool_calls> else.")
    assert accepts(grammar, CALL_F)
    assert accepts(grammar, f"Let me see.\n{CALL_F}\n{CALL_G}\n")
    assert not accepts(grammar, f"Let me see.\n{CALL_F.replace('1', 'true')}")
    alone = grammar_of(tools=TOOLS, parallel_tool_calls=False)
    assert accepts(alone, f"Let me see.\n{CALL_F}")
    assert not accepts(alone, f"{CALL_F}\n{CALL_G}")


def test_a_schema_beside_tools() -> None:
    schema = {"name": "x", "schema": SCHEMA}
    grammar = grammar_of(tools=TOOLS, response_format={"type": "json_schema", "json_schema": schema})
    assert accepts(grammar, '{"n": 3}')
    assert accepts(grammar, CALL_F)
    assert not accepts(grammar, "three")
    assert accepts(grammar_of(response_format={"type": "json_object"}), '{"a": [1, {"b": null}]}')
    assert not accepts(grammar_of(response_format={"type": "json_object"}), "[1]")


def test_references_inside_of_a_tools_schema_keep_their_meaning() -> None:
    schema = {
        "properties": {"n": {"$ref": "#/$defs/number"}},
        "required": ["n"],
        "$defs": {"number": {"type": "integer"}},
    }
    grammar = grammar_of(tools=[tool("f", parameters=schema), tool("g", parameters=schema)], tool_choice="required")
    assert accepts(grammar, CALL_F)
    assert not accepts(grammar, CALL_F.replace("1", '"1"'))


def test_blanks_do_not_go_on_for_ever() -> None:
    grammar = grammar_of(response_format={"type": "json_object"})
    assert accepts(grammar, '{\n  "a": [\n    1\n  ]\n}')
    assert not accepts(grammar, '{\n\n\n"a": 1}')
    assert not accepts(grammar, '{"a":' + " " * 2 + "1}")
