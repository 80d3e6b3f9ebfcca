"""What a caller may ask an answer to be: a call of its tools, or text that keeps to a JSON schema. OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field

from edge_agent.request_fields import Body, Text, unsupported

MAX_TOOLS = 128
MAX_JSON_DEPTH = 64


def _plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """Nothing that breaks later: no half surrogate pairs, no NaN, no nesting without end."""
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for container in level for item in _items(container)]
        if not level:
            return value
    raise ValueError(f"must not be nested more than {MAX_JSON_DEPTH} deep")


def _items(value: object) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list):
        return value
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be valid Unicode: half of a surrogate pair stands alone")
    if isinstance(value, float) and value - value != 0:
        raise ValueError("must hold finite numbers only")
    return []


JsonObject = Annotated[dict[str, Any], AfterValidator(_plain_json)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _as_function(value: object) -> object:
    if value == "custom":
        raise unsupported("not supported; known: 'function'")
    return value


FunctionType = Annotated[Literal["function"], BeforeValidator(_as_function)]


class Function(Body):
    """A function that the model may call. parameters: a JSON schema; none means no parameters."""

    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(default=None, description="calls are held to the schema, by tool_choice 'auto' too")


class Tool(Body):
    """A tool; functions are all there are."""

    type: FunctionType
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as a chat template writes it out."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class FunctionName(Body):
    """Which function has to be called."""

    name: Name


class NamedChoice(Body):
    """A tool choice that names a function."""

    type: FunctionType
    function: FunctionName


class CalledFunction(Body):
    """A call that an earlier answer made. arguments: JSON as the model wrote it."""

    name: Text
    arguments: Text


class ToolCall(Body):
    """One of the calls of an assistant's message."""

    id: Text
    type: FunctionType
    function: CalledFunction


class TextFormat(Body):
    """Text as it comes."""

    type: Literal["text"]


class JsonFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema by OpenAI's shape. The answer is always held to it, `strict` or not."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Name
    description: Text | None = None
    json_schema: JsonObject = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Discriminator("type")]
