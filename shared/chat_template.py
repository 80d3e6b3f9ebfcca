"""A model's chat template: messages to prompt text and to token ids, with the content of messages kept text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, ContextReference, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import BadRequestError, UnsupportedModelError

Message = Mapping[str, Any]

_PRIVATE_USE: Final = range(0xE000, 0xF900)


class PromptTokenizer(Protocol):
    """What a template asks of a tokenizer."""

    special_tokens: frozenset[str]

    def split_special(self, text: str) -> Iterator[str | int]:
        """The text cut at its control tokens."""

    def encode_text(self, text: str, *, first: bool) -> list[int]:
        """Ids of text without control tokens."""


class ChatTemplate:
    """Renders messages as the model was trained to see them."""

    def __init__(self, source: str | None, bos: str | None, eos: str | None) -> None:
        """`source` is None for a model without a template: it refuses chat.

        Raises `UnsupportedModelError` for a source that is no template.
        """
        self._variables = {"bos_token": bos or "", "eos_token": eos or ""}
        self._source = source or ""
        self._template = None if source is None else _compile(source)

    def mentions(self, text: str) -> bool:
        """Whether the template's own text holds this, as it does with what the model was trained to write."""
        return text in self._source

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text. Raises `BadRequestError` for messages that the template refuses or can't render."""
        return self._render(_plain_messages(messages), tools, add_generation_prompt)

    def encode(
        self,
        tokenizer: PromptTokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt as ids: control ids come from the template alone, whatever messages and tools spell.

        Where they spell none, the ids are those of the rendered text as a whole, merges over the seams included. No BOS
        is added: a template that wants one writes it.
        """
        try:
            plain = _plain_messages(messages)
            guard = _Guard(tokenizer.special_tokens, [plain, tools])
            guarded, guarded_tools = guard.protect(plain), guard.protect(tools)
        except RecursionError as error:
            raise BadRequestError("messages and tools must not be nested so deep", param="messages") from error
        prompt = self._render(guarded, guarded_tools, add_generation_prompt)
        ids: list[int] = []
        for piece in tokenizer.split_special(prompt):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(tokenizer.encode_text(guard.unprotect(piece), first=not ids))
        return ids

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        if self._template is None:
            raise BadRequestError(
                "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
            )
        try:
            prompt = self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **self._variables
            )
            prompt.encode()  # Arguments of tool calls may spell half of a surrogate pair, which no tokenizer takes.
            return prompt
        except jinja2.TemplateError as error:
            raise BadRequestError(f"the model's chat template refuses this: {error}", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise BadRequestError(
                f"the model's chat template can't render these messages: {error}", param="messages"
            ) from error


class _Guard:
    """Keeps control tokens that a caller spells from being read as such, while a template may still look at the text.

    A private-use character that the caller does not use goes into every spelled control token, and into the text's ends
    where these could complete one together with the template's text; it is taken out again before encoding.
    """

    def __init__(self, special_tokens: frozenset[str], content: object) -> None:
        self._tokens = sorted((token for token in special_tokens if len(token) > 1), key=len, reverse=True)
        self._heads = {token[:n] for token in self._tokens for n in range(2, len(token))}
        self._tails = {token[n:] for token in self._tokens for n in range(1, len(token) - 1)}
        self._longest = max((len(token) for token in self._tokens), default=0)
        used = set().union(*map(set, _strings(content)))
        mark = next((mark for mark in map(chr, _PRIVATE_USE) if mark not in used), None)
        if mark is None:
            raise BadRequestError("the messages use every private-use character", param="messages")
        self._mark = mark

    def protect(self, content: Any) -> Any:
        """The content with all its strings guarded, keys too; one that spells no part of a token stays as it is."""
        if isinstance(content, str):
            return self._break(content)
        if isinstance(content, Mapping):
            return {self.protect(key): self.protect(item) for key, item in content.items()}
        if isinstance(content, list | tuple):
            return [self.protect(item) for item in content]
        return content

    def unprotect(self, text: str) -> str:
        """The text without the marks."""
        return text.replace(self._mark, "")

    def _break(self, text: str) -> str:
        for token in self._tokens:
            text = text.replace(token, token[0] + self._mark + token[1:])
        lengths = range(2, min(len(text), self._longest) + 1)
        if any(text[:n] in self._tails for n in lengths) or self._is_inside_token(text):
            text = text[0] + self._mark + text[1:]
        if any(text[-n:] in self._heads for n in lengths):
            text = text[:-1] + self._mark + text[-1]
        return text

    def _is_inside_token(self, text: str) -> bool:
        # A plain word is left alone: templates compare words, and one between `<` and `>` is meant as such.
        return (
            1 < len(text) < self._longest and not text.isidentifier() and any(text in token for token in self._tokens)
        )


def _compile(source: str) -> jinja2.Template:
    """The environment that transformers renders chat templates in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedModelError(
            f"the model's chat template has an error in line {error.lineno}: {error}"
        ) from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the model is trained to say; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> Node:
        """Renders the block's content as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content", [ContextReference()]), [], [], body).set_lineno(line)

    def _content(self, context: object, caller: Any) -> str:
        return str(caller())


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    """The message as templates expect it: content as one string, arguments of tool calls as objects.

    Text parts are joined by line breaks, as llama-server does.
    """
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_part_text(part, index) for part in content)
    plain = {**message, "content": "" if content is None else content}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in message["tool_calls"]]
    return plain


def _plain_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:  # A model may have written anything; the template shows it as it is.
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _part_text(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise BadRequestError(
            f"content parts of type {kind!r} are not supported; known: 'text'", param=f"messages.{index}.content"
        )
    return str(part["text"])


def _strings(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for key, item in content.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _strings(item)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
