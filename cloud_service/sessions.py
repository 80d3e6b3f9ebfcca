"""The sessions that this replica serves: one round of each at a time, and a copy of its state that needs no store."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cloud_service.session_store import SessionKey, SessionState

ACTIVE_S = 2.0
"""How long after a reply a session still counts as at work: drafting and the network take less."""


@dataclass
class LiveSession:
    """state None: nothing is held (yet, or any more). fence: of this replica's claim. replied_at: by the clock."""

    state: SessionState | None = None
    fence: int = 0
    replied_at: float | None = None
    num_users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)


class LiveSessions:
    """At most `max_sessions`, each until it has been idle for `ttl_s`; whatever is dropped can be opened anew."""

    def __init__(self, ttl_s: float, max_sessions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._sessions: OrderedDict[SessionKey, LiveSession] = OrderedDict()  # Least recently used first.

    def __len__(self) -> int:
        """Sessions whose state is held."""
        return sum(session.state is not None for session in self._sessions.values())

    def now(self) -> float:
        """The clock that `replied_at` is read from."""
        return self._clock()

    @asynccontextmanager
    async def hold(self, key: SessionKey) -> AsyncIterator[LiveSession]:
        """One session for one round; another round of the same session waits."""
        session = self._sessions.setdefault(key, LiveSession())
        self._sessions.move_to_end(key)
        session.num_users += 1
        try:
            async with session.lock:
                yield session
        finally:
            session.num_users -= 1
            if session.state is None and not session.num_users:
                del self._sessions[key]
            self._evict()

    def num_active(self) -> int:
        """Sessions in a round, or so short after one that the next is on its way."""
        recent = self._clock() - ACTIVE_S
        active = 0
        for session in reversed(self._sessions.values()):
            if not session.num_users and (session.replied_at is None or session.replied_at < recent):
                break
            active += session.state is not None or session.num_users > 0
        return active

    def expire(self) -> None:
        """Drop what has been idle too long."""
        oldest_allowed = self._clock() - self._ttl_s
        for key, session in list(self._sessions.items()):
            if not session.num_users and (session.replied_at is None or session.replied_at < oldest_allowed):
                del self._sessions[key]

    def _evict(self) -> None:
        excess = len(self._sessions) - self._max_sessions
        if excess > 0:
            idle = [key for key, session in self._sessions.items() if not session.num_users]
            for key in idle[:excess]:
                del self._sessions[key]
