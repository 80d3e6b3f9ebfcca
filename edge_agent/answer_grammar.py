"""The grammar that an answer is held to: a JSON schema, calls of tools, or either. In llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edge_agent.openai_schema import ChatRequest
from edge_agent.tool_schema import Function, JsonFormat, NamedChoice, SchemaFormat, TextFormat
from shared.errors import UnsupportedFieldError

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
"""Qwen's and Hermes' way to call: a JSON object with `name` and `arguments` between these."""

WHITESPACE = r"[ ]|\n[ \t]{0,20}"
"""Between the tokens of JSON: as much as pretty printing needs. A small model that may goes on with blanks for ever."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def answer_grammar(body: ChatRequest) -> tuple[str, str] | None:
    """(grammar, the field it comes from); None for free text, with or without calls as the model sees fit.

    Raises:
        UnsupportedFieldError: a schema that isn't an object at its root.
    """
    functions = [tool.function for tool in body.offered_tools]
    if isinstance(body.tool_choice, NamedChoice):
        functions = [function for function in functions if function.name == body.tool_choice.function.name]
    content = _content_rule(body.response_format)
    if not functions:
        return None if content is None else (f"start: {content}\n", "response_format")
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedChoice):
        return _calls_only(functions, parallel=body.parallel_tool_calls), "tools"
    if content is not None:
        return f"start: calls | {content}\n" + _calls(functions, parallel=body.parallel_tool_calls), "response_format"
    if body.parallel_tool_calls and not any(function.strict for function in functions):
        return None
    return _text_and_calls(functions, parallel=body.parallel_tool_calls), "tools"


def _content_rule(response_format: TextFormat | JsonFormat | SchemaFormat | None) -> str | None:
    if isinstance(response_format, JsonFormat):
        return _json({"type": "object"})
    if isinstance(response_format, SchemaFormat):
        return _json(response_format.json_schema.json_schema)
    return None


def _calls_only(functions: Sequence[Function], *, parallel: bool) -> str:
    return "start: calls\n" + _calls(functions, parallel=parallel)


def _calls(functions: Sequence[Function], *, parallel: bool) -> str:
    more = r' ("\n" call)*' if parallel else ""
    return f'calls: call{more}\ncall: {_quoted(CALL_OPEN)} "\\n" body\n{_bodies(functions)}'


def _text_and_calls(functions: Sequence[Function], *, parallel: bool) -> str:
    """Free text that turns into a call wherever it opens one."""
    start = "start: call* TEXT\n" if parallel else "start: call | TEXT\n"
    opening = f'call: opening "\\n" body\nopening[lazy]: TEXT {_quoted(CALL_OPEN)}\nTEXT: /(.|\\n)*/\n'
    return start + opening + _bodies(functions)


def _bodies(functions: Sequence[Function]) -> str:
    """A rule a function. Each schema stays a root of its own, so that its references keep their meaning."""
    names = " | ".join(f"body_{index}" for index in range(len(functions)))
    rules = (f"body_{index}: {_body(function)}\n" for index, function in enumerate(functions))
    return f"body: ({names}) {_quoted(chr(10) + CALL_CLOSE)}\n" + "".join(rules)


def _body(function: Function) -> str:
    parameters = NO_PARAMETERS if function.parameters is None else {"type": "object", **function.parameters}
    if parameters["type"] != "object":
        raise UnsupportedFieldError(f"tools: the parameters of {function.name} must be of type 'object'", param="tools")
    head = f'{{"name": "{function.name}", "arguments": '
    return f'{_quoted(head)} {_json(parameters)} "}}"'


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _quoted(text: str) -> str:
    """A literal of Lark, which JSON's spelling is."""
    return json.dumps(text)
