"""The edge's own errors over HTTP, on top of what every service of ours does with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from edge_agent.request_fields import UNSUPPORTED
from shared import http
from shared.errors import BadRequestError, RequestError, UnsupportedFieldError


class ErrorDetail(TypedDict):
    """What was wrong, and where."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every error, as OpenAI's."""

    error: ErrorDetail


ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorBody, "description": "The request can't be served as it is."},
    "5XX": {"model": ErrorBody, "description": "Not now: overloaded, stopping, or failed. `Retry-After` says when."},
}
"""For the OpenAPI document."""


class CloudFailedError(RequestError):
    """The cloud can't serve a request that forbids the device."""

    status = 503
    type = "server_error"
    code = "cloud_unavailable"


def install_error_handlers(app: FastAPI) -> None:
    """Every error of a route leaves in OpenAI's shape, and never with what the caller sent."""
    http.install_error_handlers(app)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


def bad_request(errors: Sequence[Mapping[str, Any]]) -> BadRequestError:
    """The first complaint of a validation as our error: where, and what is allowed; the value is never repeated."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequestError("the body is not valid JSON", code="invalid_json")
    param = ".".join(str(part) for part in first["loc"] if part != "body")[: http.MAX_NAME_LENGTH] or None
    if first["type"] == "extra_forbidden":
        return UnsupportedFieldError(f"unknown field {param}", param=param)
    if first["type"] == UNSUPPORTED:
        return UnsupportedFieldError(f"{param}: {first['msg']}", param=param)
    if param is None:
        return BadRequestError(
            "the body must be a JSON object, sent as Content-Type: application/json", code="invalid_body"
        )
    return BadRequestError(f"{param}: {http.what_is_allowed(first)}", param=param, code="invalid_value")


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return http.error_response(bad_request(error.errors()))
