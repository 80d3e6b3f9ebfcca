"""What a caller may send: OpenAI's request bodies, every field of theirs named.

A field we don't implement is declared with `OnlyDefault`: it passes where its value changes nothing, and is refused by
name otherwise. A field nobody knows is refused by name too, and so are values of the wrong type: nothing a caller asks
for is silently ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from shared.errors import BadRequestError

UNSUPPORTED: Final = "unsupported_value"
"""Type of the validation error for what we don't implement."""

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_GAMMA = 16


class OnlyDefault:
    """Annotation of a field that isn't implemented: null and the defaults pass, and all of them read as null."""

    def __init__(self, *defaults: object) -> None:
        self._defaults = defaults

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check by `_check`."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """An enumeration of what passes."""
        return {"enum": [*self._defaults, None], "description": "Not supported: only its default passes."}

    def _check(self, value: object) -> None:
        if value is not None and not any(value == known and type(value) is type(known) for known in self._defaults):
            allowed = ", ".join(json.dumps(known) for known in (*self._defaults, None))
            raise unsupported(f"not supported; leave it out or send {allowed}")


def unsupported(message: str) -> PydanticCustomError:
    """A complaint about something that exists in OpenAI's API and not here."""
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class SouschefOptions(_Body):
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


class StreamOptions(_Body):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, OnlyDefault(False)] = None


def _valid_unicode(value: str) -> str:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be valid Unicode: half of a surrogate pair stands alone")
    return value


Text = Annotated[str, AfterValidator(_valid_unicode)]


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


class SamplingFields(_Body):
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
    repetition_penalty: Annotated[float, _default(1.0)] = Field(default=1.0, gt=0, le=10)
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


class TextPart(_Body):
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
    if value in ("tool", "function"):
        raise unsupported("messages of tools are not supported")
    return value


Content = Annotated[list[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


class ChatMessage(_Body):
    """One turn. `developer` is OpenAI's newer word for `system`."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_as_role)]
    content: Content
    name: Text | None = Field(default=None, description="handed to the chat template")
    refusal: Annotated[None, OnlyDefault()] = None
    audio: Annotated[None, OnlyDefault()] = None
    annotations: Annotated[None, OnlyDefault([])] = None
    function_call: Annotated[None, OnlyDefault()] = None
    tool_calls: Annotated[None, OnlyDefault([])] = None
    tool_call_id: Annotated[None, OnlyDefault()] = None

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template reads it."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": "\n".join(part.text for part in self.content)}
        return message | ({"name": self.name} if self.name is not None else {})


class Prediction(_Body):
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

    # Hints that change nothing of an answer.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    audio: Annotated[None, OnlyDefault()] = None
    function_call: Annotated[None, OnlyDefault("none", "auto")] = None
    functions: Annotated[None, OnlyDefault([])] = None
    metadata: Annotated[None, OnlyDefault({})] = None
    modalities: Annotated[None, OnlyDefault(["text"])] = None
    moderation: Annotated[None, OnlyDefault()] = None
    parallel_tool_calls: Annotated[None, OnlyDefault(True)] = None
    prompt_cache_options: Annotated[None, OnlyDefault()] = None
    prompt_cache_retention: Annotated[None, OnlyDefault()] = None
    reasoning_effort: Annotated[None, OnlyDefault("none")] = None
    response_format: Annotated[None, OnlyDefault({"type": "text"})] = None
    service_tier: Annotated[None, OnlyDefault("auto", "default")] = None
    store: Annotated[None, OnlyDefault(False)] = None
    tool_choice: Annotated[None, OnlyDefault("none", "auto")] = None
    tools: Annotated[None, OnlyDefault([])] = None
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
