"""What the bodies of requests are made of: strict objects, valid text, and fields that only pass by default."""

from __future__ import annotations

import json
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

UNSUPPORTED: Final = "unsupported_value"
"""Type of the validation error for what we don't implement."""


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


class Body(BaseModel):
    """An object that takes the fields it names, each of its own type, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _valid_unicode(value: str) -> str:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be valid Unicode: half of a surrogate pair stands alone")
    return value


Text = Annotated[str, AfterValidator(_valid_unicode)]
