"""What a caller may send: OpenAI's request bodies, every field of theirs named.

A field we don't implement is declared with `OnlyDefault`: it passes where its value changes nothing, and is refused by
name otherwise. A field nobody knows is refused by name too, and so are values of the wrong type: nothing a caller asks
for is silently ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from edge_agent.request_fields import Body, OnlyDefault, Text, unsupported
from edge_agent.tool_schema import MAX_TOOLS, NamedChoice, ResponseFormat, Tool, ToolCall
from shared.errors import BadRequestError
from shared.sampling import MIN_REPETITION_PENALTY

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_GAMMA = 16


class SouschefOptions(Body):
    """Our own wishes, in an object of their own so that ordinary client libraries pass them as `extra_body`."""

    execution: Literal["auto", "prefer_device", "prefer_cloud", "only_device", "only_cloud"] = "auto"
    speculation: Literal["auto", "on", "off"] = "auto"
    max_gamma: int = Field(default=MAX_GAMMA, ge=0, le=MAX_GAMMA)
    privacy: Literal["standard", "on_device"] = "standard"

    @model_validator(mode="after")
    def _refuse_contradiction(self) -> Self:
        if self.privacy == "on_device" and self.execution == "only_cloud":
            raise ValueError("privacy 'on_device' and execution 'only_cloud' contradict each other")
        return self


class StreamOptions(Body):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, OnlyDefault(False)] = None


def _as_stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a string or a list of strings, none of them empty")
    return stops


def _as_bias(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(str(key).isascii() and str(key).isdigit() for key in value):
        raise ValueError("must map token ids to numbers from -100 to 100")
    return {int(key): bias for key, bias in value.items()}


Bias = Annotated[float, Field(ge=-100, le=100)]
Stops = Annotated[
    list[Text], Field(max_length=MAX_STOPS), BeforeValidator(_as_stops, json_schema_input_type=str | list[str] | None)
]
LogitBias = Annotated[dict[int, Bias], BeforeValidator(_as_bias, json_schema_input_type=dict[str, Bias] | None)]


def _default(value: object) -> BeforeValidator:
    """Null means the default."""
    return BeforeValidator(lambda given: value if given is None else given)


class SamplingFields(Body):
    """What both routes take. Numbers out of range are refused, not clamped; null means the default."""

    model: str | None = Field(default=None, max_length=256)
    stream: Annotated[bool, _default(False)] = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(
        default=None, ge=1, description="Clamped to the context; the answer then ends by 'length'."
    )
    temperature: Annotated[float, _default(1.0)] = Field(default=1.0, ge=0, le=2)
    top_p: Annotated[float, _default(1.0)] = Field(default=1.0, gt=0, le=1)
    presence_penalty: Annotated[float, _default(0.0)] = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Annotated[float, _default(0.0)] = Field(default=0.0, ge=-2, le=2)
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Stops = Field(default_factory=list)
    user: str | None = None
    n: Annotated[None, OnlyDefault(1)] = None

    top_k: Annotated[int, _default(0)] = Field(default=0, ge=-1, description="0 and -1 are off")
    min_p: Annotated[float, _default(0.0)] = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Annotated[float, _default(1.0)] = Field(default=1.0, ge=MIN_REPETITION_PENALTY, le=10)
    min_tokens: Annotated[int, _default(0)] = Field(default=0, ge=0)
    souschef: Annotated[SouschefOptions, _default({})] = SouschefOptions()

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options needs stream: true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(Body):
    """A piece of a message's content; text is all that these models read."""

    type: Literal["text"]
    text: Text


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported("parts other than 'text' are not supported")
    return value


def _as_role(value: object) -> object:
    if value == "function":
        raise unsupported("not supported; send the role 'tool'")
    return value


Content = Annotated[list[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


class ChatMessage(Body):
    """One turn. `developer` is OpenAI's newer word for `system`."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_as_role)]
    content: Content | None = Field(default=None, description="may be missing beside tool_calls alone")
    name: Text | None = Field(default=None, description="handed to the chat template")
    refusal: Annotated[None, OnlyDefault()] = None
    audio: Annotated[None, OnlyDefault()] = None
    annotations: Annotated[None, OnlyDefault([])] = None
    function_call: Annotated[None, OnlyDefault()] = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: Text | None = Field(default=None, description="whose result a tool's message is")

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the role 'assistant'")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a tool_call_id belongs to each message of the role 'tool', and to no other")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required: a string or a list of text parts")
        return self

    @property
    def is_about_tools(self) -> bool:
        """Whether a model has to know tools to make sense of it."""
        return self.role == "tool" or bool(self.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template reads it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "\n".join(part.text for part in self.content or ())}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Prediction(Body):
    """OpenAI's predicted output: text that the answer is likely to repeat."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The predicted text."""
        return "".join(part.text for part in self.content)


class ChatRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The newer name of max_tokens.")
    logprobs: Annotated[bool, _default(False)] = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = Field(default=None, description="what the text of the answer is held to")
    tools: Annotated[list[Tool], _default([])] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = Field(
        default=None, description="'auto' where there are tools; 'required' and a function's name are held to"
    )
    parallel_tool_calls: Annotated[bool, _default(True)] = True

    # Hints that change nothing of an answer.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    audio: Annotated[None, OnlyDefault()] = None
    function_call: Annotated[None, OnlyDefault("none", "auto")] = None
    functions: Annotated[None, OnlyDefault([])] = None
    metadata: Annotated[None, OnlyDefault({})] = None
    modalities: Annotated[None, OnlyDefault(["text"])] = None
    moderation: Annotated[None, OnlyDefault()] = None
    prompt_cache_options: Annotated[None, OnlyDefault()] = None
    prompt_cache_retention: Annotated[None, OnlyDefault()] = None
    reasoning_effort: Annotated[None, OnlyDefault("none")] = None
    service_tier: Annotated[None, OnlyDefault("auto", "default")] = None
    store: Annotated[None, OnlyDefault(False)] = None
    verbosity: Annotated[None, OnlyDefault("medium")] = None
    web_search_options: Annotated[None, OnlyDefault()] = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise BadRequestError("max_tokens and max_completion_tokens differ: send one", param="max_tokens")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise BadRequestError("tools: each name must be there once", param="tools")
        if self.tool_choice == "required" and not names:
            raise BadRequestError("tool_choice 'required' needs tools", param="tool_choice")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            raise BadRequestError("tool_choice: must name one of the tools", param="tool_choice")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None is as many as the context holds."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives to report; None for no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _as_prompt(value: object) -> object:
    """A text or a list of ids; a list of one of these is the same."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return value
    raise ValueError("must be one string or one list of token ids, not empty")


Filled = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
One = Field(min_length=1, max_length=1)
Prompt = Annotated[
    Text | list[int],
    BeforeValidator(
        _as_prompt, json_schema_input_type=Filled | Ids | Annotated[list[Filled], One] | Annotated[list[Ids], One]
    ),
]


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Annotated[None, OnlyDefault(1)] = None
    echo: Annotated[None, OnlyDefault(False)] = None
    suffix: Annotated[None, OnlyDefault("")] = None

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer: OpenAI's 16 where nothing is said."""
        return self.max_tokens or 16

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives to report; None for no log probabilities at all."""
        return self.logprobs
