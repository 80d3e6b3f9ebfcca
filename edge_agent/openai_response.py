"""What a caller gets: OpenAI's response bodies and stream chunks, with our `souschef` object."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Protocol

from typing_extensions import TypedDict

from edge_agent.piece import LoggedToken
from edge_agent.report import Report, Tally, Usage
from edge_agent.round import FinishReason
from edge_agent.tool_calls import AnswerPart, AnswerReader, ArgumentsAdded, CallBegun, PlainReader, Said
from shared.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"
"""OpenAI's finish reason of an answer that calls tools."""

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM reports this in its place."""


class TopLogprob(TypedDict):
    """A token that could have stood in a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log probabilities of a chat answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """Log probabilities of a completion's tokens. text_offset: where each begins in the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionCall(TypedDict):
    """What is called. arguments: JSON as the model wrote it."""

    name: NotRequired[str]
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool; a chunk of a stream names its call by `index` and says the rest once."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


class AssistantMessage(TypedDict):
    """The answer. content: null where it is calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """The one choice of a chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class TextChoice(TypedDict):
    """The one choice of a completion, and of its chunks."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class ResponseHead(TypedDict):
    """What every body and chunk of a response repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(ResponseHead):
    """Body of a whole chat answer."""

    choices: list[ChatChoice]
    usage: Usage
    souschef: Report


class TextCompletion(ResponseHead):
    """Body of a whole completion."""

    choices: list[TextChoice]
    usage: Usage
    souschef: Report


class Delta(TypedDict):
    """What a chunk adds."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@dataclass(frozen=True)
class Head:
    """Where the fields that repeat come from."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def body(self, object_name: str) -> ResponseHead:
        """The fields in OpenAI's order."""
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class ResponseShape(Protocol):
    """How one route spells an answer."""

    chunk_object: str

    def whole(self, text: str, logged: Sequence[LoggedToken], finish_reason: FinishReason, tally: Tally) -> Any:
        """The body of a whole answer."""

    def opening(self) -> Any:
        """The choice of a stream's first chunk, sent before there is any text."""

    def delta(self, text: str, logged: Sequence[LoggedToken], *, last: bool) -> Any:
        """The choice of a chunk with text, None while there is nothing to tell. last: none comes after it."""

    def finish(self, finish_reason: FinishReason) -> Any:
        """The choice of the chunk that ends the answer."""


class ChatShape:
    """`/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"

    def __init__(
        self, head: Head, tokenizer: Tokenizer, with_logprobs: bool, reader: AnswerReader | None = None
    ) -> None:
        """reader: tells calls of tools from text."""
        self._head = head
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._reader = reader or PlainReader()

    def whole(
        self, text: str, logged: Sequence[LoggedToken], finish_reason: FinishReason, tally: Tally
    ) -> ChatCompletion:
        """The body of a whole answer."""
        parts = [*self._reader.feed(text), *self._reader.finish()]
        calls = _calls(parts)
        message: AssistantMessage = {"role": "assistant", "content": _said(parts), "refusal": None}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = calls
        choice: ChatChoice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(logged),
            "finish_reason": self._finish_reason(finish_reason),
        }
        return {
            **self._head.body("chat.completion"),
            "choices": [choice],
            "usage": tally.usage(),
            "souschef": tally.report(),
        }

    def opening(self) -> dict[str, Any]:
        """The role, once."""
        return self._choice({"role": "assistant", "content": ""})

    def delta(self, text: str, logged: Sequence[LoggedToken], *, last: bool) -> dict[str, Any] | None:
        """More text, and more of calls."""
        parts = self._reader.feed(text) + (self._reader.finish() if last else [])
        delta: Delta = {}
        if said := _said(parts):
            delta["content"] = said
        if calls := [_call_delta(part) for part in parts if not isinstance(part, Said)]:
            delta["tool_calls"] = calls
        return self._choice(delta, self._logprobs(logged)) if delta or logged else None

    def finish(self, finish_reason: FinishReason) -> dict[str, Any]:
        """The end."""
        return self._choice({}, finish_reason=self._finish_reason(finish_reason))

    def _finish_reason(self, finish_reason: FinishReason) -> str:
        called = self._reader.num_calls and finish_reason is FinishReason.STOP
        return TOOL_CALLS if called else finish_reason.value

    def _choice(
        self, delta: Delta, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, logged: Sequence[LoggedToken]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return {"content": [self._token(entry) for entry in logged], "refusal": None}

    def _token(self, entry: LoggedToken) -> TokenLogprob:
        top = [self._alternative(token, logprob) for token, logprob in entry.logprobs.top]
        return {**self._alternative(entry.token, entry.logprobs.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float) -> TopLogprob:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}


def _said(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Said))


def _calls(parts: Sequence[AnswerPart]) -> list[ToolCall]:
    """Each call whole."""
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(part, CallBegun):
            calls.append({"id": _new_call_id(), "type": "function", "function": {"name": part.name, "arguments": ""}})
        elif isinstance(part, ArgumentsAdded):
            calls[part.index]["function"]["arguments"] += part.text
    return calls


def _call_delta(part: CallBegun | ArgumentsAdded) -> ToolCall:
    if isinstance(part, ArgumentsAdded):
        return {"index": part.index, "function": {"arguments": part.text}}
    function: FunctionCall = {"name": part.name, "arguments": ""}
    return {"index": part.index, "id": _new_call_id(), "type": "function", "function": function}


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class TextShape:
    """`/v1/completions`."""

    chunk_object = "text_completion"

    def __init__(self, head: Head, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._offset = 0

    def whole(
        self, text: str, logged: Sequence[LoggedToken], finish_reason: FinishReason, tally: Tally
    ) -> TextCompletion:
        """The body of a whole answer."""
        choice: TextChoice = {**self._choice(text, self._logprobs(logged)), "finish_reason": finish_reason.value}
        return {
            **self._head.body("text_completion"),
            "choices": [choice],
            "usage": tally.usage(),
            "souschef": tally.report(),
        }

    def opening(self) -> TextChoice:
        """No text yet."""
        return self._choice("", None)

    def delta(self, text: str, logged: Sequence[LoggedToken], *, last: bool) -> TextChoice | None:
        """More text."""
        return self._choice(text, self._logprobs(logged)) if text or logged else None

    def finish(self, finish_reason: FinishReason) -> TextChoice:
        """The end."""
        return {**self._choice("", None), "finish_reason": finish_reason.value}

    def _choice(self, text: str, logprobs: TextLogprobs | None) -> TextChoice:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, logged: Sequence[LoggedToken]) -> TextLogprobs | None:
        if not self._with_logprobs:
            return None
        tokens = [self._text(entry.token) for entry in logged]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.logprobs.logprob, LOWEST_LOGPROB) for entry in logged],
            "top_logprobs": [
                {self._text(token): max(logprob, LOWEST_LOGPROB) for token, logprob in entry.logprobs.top}
                for entry in logged
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")


class StreamChunks:
    """The chunks of one stream. `usage` stands in every chunk when it was asked for, null in all but the last."""

    def __init__(self, head: Head, shape: ResponseShape, include_usage: bool) -> None:
        self._head = head
        self._shape = shape
        self._include_usage = include_usage

    def opening(self) -> dict[str, Any]:
        """The first chunk."""
        return self._chunk([self._shape.opening()])

    def delta(self, text: str, logged: Sequence[LoggedToken], *, last: bool) -> dict[str, Any] | None:
        """A chunk with text, None while there is nothing to tell. last: none comes after it."""
        choice = self._shape.delta(text, logged, last=last)
        return None if choice is None else self._chunk([choice])

    def closing(self, finish_reason: FinishReason, tally: Tally) -> list[dict[str, Any]]:
        """The finish chunk and, when asked for, the usage chunk; the last of them holds the report."""
        chunks = [self._chunk([self._shape.finish(finish_reason)])]
        if self._include_usage:
            chunks.append(self._chunk([]) | {"usage": tally.usage()})
        chunks[-1]["souschef"] = tally.report()
        return chunks

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {**self._head.body(self._shape.chunk_object), "choices": choices}
        return chunk | ({"usage": None} if self._include_usage else {})
