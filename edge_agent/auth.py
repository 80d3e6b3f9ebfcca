"""Who may call what: Host and Origin checks, API keys, body size. Pure ASGI, so that streams and disconnects pass."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, MutableMapping
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_agent.config import EdgeSettings
from edge_agent.http_errors import error_response
from shared.errors import BadRequestError, ForbiddenError, PayloadTooLargeError, RequestError, UnauthorizedError

ANONYMOUS = "anonymous"
"""The tenant of every caller where no keys are set."""


class Access(StrEnum):
    """What a route asks of its caller."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


OPEN_PATHS = frozenset({"/", "/health"})
OPEN_PREFIX = "/web/"
"""The demo page's own files: they hold no data."""
CALLER_POSTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/device", "/demo/race", "/demo/answer"})


def access_of(method: str, path: str, metrics_open: bool = False) -> Access:
    """Deny by default: what changes something and isn't listed needs the admin key, anything else a key."""
    if method in ("GET", "HEAD"):
        opened = path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or (metrics_open and path == "/metrics")
        return Access.OPEN if opened else Access.KEY
    return Access.KEY if method == "POST" and path in CALLER_POSTS else Access.ADMIN


class KeyRing:
    """The keys, held as digests."""

    def __init__(self, keys: Iterable[str], admin_key: str | None = None) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._admin_digest = _digest(admin_key.encode()) if admin_key else None

    def tenant(self, authorization: bytes | None, access: Access) -> str:
        """Whose request this is, a name that tells nothing of the key.

        Raises:
            UnauthorizedError: no key, or a wrong one.
            ForbiddenError: a caller's key where the admin's is asked for.
        """
        if access is Access.OPEN or not (self._digests or self._admin_digest):
            return ANONYMOUS
        presented = _digest(_bearer(authorization))
        is_caller = sum(hmac.compare_digest(presented, known) for known in self._digests) > 0  # All, to take as long.
        is_admin = self._admin_digest is not None and hmac.compare_digest(presented, self._admin_digest)
        if access is Access.ADMIN and not is_admin:
            if is_caller:
                raise ForbiddenError("this route needs the admin key")
            raise UnauthorizedError("this route needs the admin key as `Authorization: Bearer KEY`")
        if access is Access.KEY and self._digests and not (is_caller or is_admin):
            raise UnauthorizedError("a valid API key is needed as `Authorization: Bearer KEY`")
        return presented.hex()[:16] if is_caller or is_admin else ANONYMOUS


class KeyCheck:
    """Lets a request through with its tenant in `scope["state"]`, or answers 401 or 403."""

    def __init__(self, app: ASGIApp, settings: EdgeSettings) -> None:
        admin_key = settings.admin_key.get_secret_value() if settings.admin_key else None
        self._app = app
        self._keys = KeyRing((key.get_secret_value() for key in settings.api_keys), admin_key)
        self._metrics_open = settings.metrics_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] == "http":
            access = access_of(scope["method"], scope["path"], self._metrics_open)
            try:
                tenant = self._keys.tenant(_header(scope, b"authorization"), access)
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
            state: MutableMapping[str, Any] = scope.setdefault("state", {})
            state["tenant"] = tenant
        await self._app(scope, receive, send)


class HostCheck:
    """Refuses names that aren't ours (DNS rebinding) and pages of other origins that call without being asked."""

    def __init__(self, app: ASGIApp, settings: EdgeSettings) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._own_host = settings.host.lower()
        self._origins = frozenset(settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] == "http":
            host = (_header(scope, b"host") or b"").decode("latin-1")
            origin = (_header(scope, b"origin") or b"").decode("latin-1")
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
        return "*" in self._hosts or _is_address(name) or name in {"localhost", self._own_host} | self._hosts


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
        declared = _header(scope, b"content-length") or b"0"
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
        error = PayloadTooLargeError(f"the body is over {self._max_bytes} bytes")
        response = error_response(error)
        response.headers["Connection"] = "close"  # The rest of the body is not read.
        await response(scope, receive, send)


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def _bearer(authorization: bytes | None) -> bytes:
    scheme, _, key = (authorization or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
