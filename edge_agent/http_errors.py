"""Every failure in OpenAI's error shape, with its status, and never with what the caller sent."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from edge_agent.openai_schema import UNSUPPORTED
from shared.errors import (
    BadRequestError,
    CloudError,
    EngineStoppedError,
    NotFoundError,
    RequestError,
    SouschefError,
    UnsupportedFieldError,
)

logger = logging.getLogger(__name__)

MAX_NAME_LENGTH = 80
"""A field's name comes from the caller: more of it is not repeated."""


class MethodNotAllowedError(RequestError):
    """The route exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


def error_status(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, EngineStoppedError | CloudError):
        return 503
    return 500


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON body of an error. What isn't the caller's business stays in the log."""
    if isinstance(error, RequestError):
        return _body(error.message, error.type, error.param, error.code)
    if isinstance(error, CloudError):
        return _body("the cloud can't serve this request now", "server_error", None, "cloud_unavailable")
    if isinstance(error, EngineStoppedError):
        return _body("the inference thread has stopped", "server_error", None, "engine_stopped")
    return _body("internal error", "server_error", None, "internal_error")


def error_response(error: Exception) -> JSONResponse:
    """The whole response of an error, with `Retry-After` where a later try may work."""
    headers: dict[str, str] = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_s))
    if isinstance(error, RequestError) and error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error_status(error), headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Every error of a route leaves in our shape."""
    app.add_exception_handler(SouschefError, _on_souschef_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)


async def _on_souschef_error(request: Request, error: Exception) -> JSONResponse:
    if error_status(error) == 500:
        logger.error("inference failed", exc_info=error)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(bad_request(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFoundError("no such route", code="not_found"))
    if error.status_code == 405:
        return error_response(MethodNotAllowedError("this route does not take this method"))
    return error_response(BadRequestError("the body can't be read", code="invalid_body"))


async def _on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


def bad_request(errors: Sequence[Mapping[str, Any]]) -> BadRequestError:
    """The first complaint of a validation as our error: where, and what is allowed; the value is never repeated."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequestError("the body is not valid JSON", code="invalid_json")
    param = ".".join(str(part) for part in first["loc"] if part != "body")[:MAX_NAME_LENGTH] or None
    if first["type"] == "extra_forbidden":
        return UnsupportedFieldError(f"unknown field {param}", param=param)
    if first["type"] == UNSUPPORTED:
        return UnsupportedFieldError(f"{param}: {first['msg']}", param=param)
    if param is None:
        return BadRequestError(
            "the body must be a JSON object, sent as Content-Type: application/json", code="invalid_body"
        )
    message = str(first["msg"]).removeprefix("Value error, ")
    return BadRequestError(f"{param}: {message[:1].lower()}{message[1:]}", param=param, code="invalid_value")


def encode_json(content: Mapping[str, Any]) -> str:
    """JSON in ASCII: U+2028 and its kin, which some clients take for line ends, never stand in a frame."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _body(message: str, type: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
