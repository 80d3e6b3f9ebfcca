"""What every service of ours does with HTTP: errors in OpenAI's shape, keys, a limit on bodies, clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.errors import (
    BadRequestError,
    EngineStoppedError,
    ForbiddenError,
    NotFoundError,
    PayloadTooLargeError,
    RequestError,
    SouschefError,
    UnauthorizedError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANONYMOUS = "anonymous"
"""The tenant of every caller where no keys are set."""

MAX_NAME_LENGTH = 80
"""A field's name comes from the caller: more of it is not repeated."""


class ClientLeftError(Exception):
    """The client has closed the connection: there is nobody to answer."""


class MethodNotAllowedError(RequestError):
    """The route exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


def error_status(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    return 503 if isinstance(error, EngineStoppedError) else 500


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON body of an error. What isn't the caller's business stays in the log."""
    if isinstance(error, RequestError):
        return _body(error.message, error.type, error.param, error.code)
    if isinstance(error, EngineStoppedError):
        return _body("the inference thread has stopped", "server_error", None, "engine_stopped")
    return _body("internal error", "server_error", None, "internal_error")


def error_response(error: Exception) -> JSONResponse:
    """The whole response of an error, with `Retry-After` where a later try may work."""
    headers: dict[str, str] = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_s))
    if error_status(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error_status(error), headers=headers)


def bad_request(errors: Sequence[Mapping[str, Any]]) -> BadRequestError:
    """The first complaint of a validation: where, and what is allowed; the value is never repeated."""
    first = errors[0]
    param = ".".join(str(part) for part in first["loc"] if part != "body")[:MAX_NAME_LENGTH] or None
    if first["type"] == "json_invalid" or param is None:
        return BadRequestError("the body must be a JSON object", code="invalid_json")
    return BadRequestError(f"{param}: {what_is_allowed(first)}", param=param, code="invalid_value")


def what_is_allowed(error: Mapping[str, Any]) -> str:
    """A validation error's message. pydantic repeats what came in one of them: a union's unknown tag."""
    if error["type"] == "union_tag_invalid":
        return f"{error['ctx']['discriminator'].strip(chr(39))} must be one of {error['ctx']['expected_tags']}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def install_error_handlers(app: FastAPI) -> None:
    """Every error of a route leaves in our shape."""
    app.add_exception_handler(SouschefError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_error)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    if error_status(error) == 500:
        logger.error("request failed: %s", type(error).__name__, exc_info=error)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(bad_request(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFoundError("no such route", code="not_found"))
    if error.status_code == 405:
        response = error_response(MethodNotAllowedError("this route does not take this method"))
        response.headers.update(error.headers or {})  # `Allow` says which it takes.
        return response
    return error_response(BadRequestError("the body can't be read", code="invalid_body"))


class KeyRing:
    """The API keys, held as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def tenants(self) -> tuple[str, ...]:
        """Whose requests there can be."""
        return tuple(_tenant(digest) for digest in self._digests) or (ANONYMOUS,)

    def tenant(self, authorization: bytes | None) -> str:
        """Whose request this is, a name that tells nothing of the key.

        Raises:
            UnauthorizedError: no key, or a wrong one.
        """
        if not self._digests:
            return ANONYMOUS
        scheme, _, key = (authorization or b"").partition(b" ")
        presented = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        # Every key is compared, so that the time says nothing of which one it was.
        matches = [hmac.compare_digest(presented, known) for known in self._digests]
        if not any(matches):
            raise UnauthorizedError("a valid API key is needed as `Authorization: Bearer KEY`")
        return _tenant(presented)


class KeyCheck:
    """Lets a request through with its tenant in `scope["state"]`, or answers 401."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] == "http":
            try:
                opened = scope["path"] in self._open_paths
                tenant = ANONYMOUS if opened else self._keys.tenant(header(scope, b"authorization"))
            except UnauthorizedError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


class HostCheck:
    """Refuses names that aren't ours (DNS rebinding) and pages of other origins that call without being asked."""

    def __init__(self, app: ASGIApp, *, own_host: str, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        """hosts: names beside our own that a Host header may hold, '*' for any. origins: web origins that may call."""
        self._app = app
        self._hosts = {"localhost", own_host.lower()} | {host.lower() for host in hosts}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] == "http":
            host = (header(scope, b"host") or b"").decode("latin-1")
            origin = (header(scope, b"origin") or b"").decode("latin-1")
            refusal: RequestError | None = None
            if not self._knows(host):
                refusal = BadRequestError(
                    "unknown Host: use localhost, or list the name in allowed_hosts", code="unknown_host"
                )
            elif origin and origin not in self._origins and urlsplit(origin).netloc.lower() != host.lower():
                refusal = ForbiddenError("pages of this origin may not call; list it in cors_origins")
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        # An address can't be rebound, only a name can.
        return "*" in self._hosts or _is_address(name) or name in self._hosts


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class BodyLimit:
    """Takes the body in before the application sees it, up to a limit; past it answers 413."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = header(scope, b"content-length") or b"0"
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                await self._refuse(scope, receive, send)
                return
        await self._app(scope, _replay(bytes(body), receive), send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(PayloadTooLargeError(f"the body is over {self._max_bytes} bytes"))
        response.headers["Connection"] = "close"  # The rest of the body is not read.
        await response(scope, receive, send)


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but no longer than the client is there; when this returns, the work has ended either way.

    Raises:
        ClientLeftError: the client left; the work was cancelled and has cleaned up.
    """
    task = asyncio.create_task(work)
    listener = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def header(scope: Scope, name: bytes) -> bytes | None:
    """A request header, by its lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def _body(message: str, type: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
