"""Who may call what: Host and Origin checks, API keys. Pure ASGI, so that streams and disconnects pass."""

from __future__ import annotations

import ipaddress
from collections.abc import MutableMapping
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from edge_agent.config import EdgeSettings
from shared.errors import BadRequestError, ForbiddenError, RequestError, UnauthorizedError
from shared.http import ANONYMOUS, KeyRing, error_response, header


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


class Keys:
    """The callers' keys and the admin's. Without any, every caller is let in; the settings allow that on loopback."""

    def __init__(self, settings: EdgeSettings) -> None:
        self._callers = KeyRing(key.get_secret_value() for key in settings.api_keys)
        self._admin = KeyRing([settings.admin_key.get_secret_value()]) if settings.admin_key else None
        self._any = bool(settings.api_keys or settings.admin_key)

    def tenant(self, authorization: bytes | None, access: Access) -> str:
        """Whose request this is, a name that tells nothing of the key.

        Raises:
            UnauthorizedError: no key, or a wrong one.
            ForbiddenError: a caller's key where the admin's is asked for.
        """
        if access is Access.OPEN or not self._any:
            return ANONYMOUS
        if access is Access.ADMIN:
            return self._admin_tenant(authorization)
        try:
            return self._callers.tenant(authorization)
        except UnauthorizedError:
            if self._admin is None:
                raise
            return self._admin.tenant(authorization)

    def _admin_tenant(self, authorization: bytes | None) -> str:
        if self._admin is not None:
            try:
                return self._admin.tenant(authorization)
            except UnauthorizedError:
                pass  # Which of the two it is, the callers' keys decide.
        self._callers.tenant(authorization)
        raise ForbiddenError("this route needs the admin key")


class KeyCheck:
    """Lets a request through with its tenant in `scope["state"]`, or answers 401 or 403."""

    def __init__(self, app: ASGIApp, settings: EdgeSettings) -> None:
        self._app = app
        self._keys = Keys(settings)
        self._metrics_open = settings.metrics_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] == "http":
            access = access_of(scope["method"], scope["path"], self._metrics_open)
            try:
                tenant = self._keys.tenant(header(scope, b"authorization"), access)
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
        return "*" in self._hosts or _is_address(name) or name in {"localhost", self._own_host} | self._hosts


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
