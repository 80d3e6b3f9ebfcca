"""Who may call what: API keys of callers and of the admin. Pure ASGI, so that streams and disconnects pass."""

from __future__ import annotations

from collections.abc import MutableMapping
from enum import StrEnum
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from edge_agent.config import EdgeSettings
from shared.errors import ForbiddenError, RequestError, UnauthorizedError
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
