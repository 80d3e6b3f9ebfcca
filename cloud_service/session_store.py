"""What a session is beyond one process: its tokens, its last reply, and which replica may advance it.

A *fence* is a number that grows with every change of owner. A replica advances a session only with the fence of its
own claim, so that of two replicas that hold the same session exactly one can.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from shared.errors import ConflictError, GoneError, SouschefError
from shared.protocol import VerifyReply
from shared.sampling import SamplingParams

TOMBSTONE_S = 60.0
"""How long an ended session stays known as such: a request that was overtaken by its own end must not revive it."""


class StoreUnavailableError(SouschefError):
    """The store did not answer in time."""


class ClaimLostError(GoneError):
    """Another replica has taken the session over."""

    code = "claim_lost"


@dataclass(frozen=True)
class SessionKey:
    """Sessions of different tenants never meet, even under one id."""

    tenant: str
    session_id: str


class SessionState(BaseModel):
    """All that another replica needs to go on. `round` is the last one done, `request_hash` and `reply` are its own."""

    model_config = ConfigDict(frozen=True)

    tokens: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    num_top_logprobs: int | None = None
    round: int = -1
    request_hash: str = ""
    reply: VerifyReply | None = None


@dataclass(frozen=True)
class Claim:
    """The right to advance a session. state: None where the store knows of the session, but not its tokens."""

    fence: int
    state: SessionState | None = None


class SessionStore(Protocol):
    """Where sessions live beside the replica that serves them. Every method may raise `StoreUnavailableError`."""

    @property
    def name(self) -> str:
        """Its name in /ready and logs."""

    async def open(self, key: SessionKey, owner: str) -> Claim:
        """Take a session that starts here with all its tokens, known before or not.

        Raises:
            ConflictError: it has ended.
        """

    async def claim(self, key: SessionKey, owner: str) -> Claim | None:
        """Take over a session that another replica served; None if it is unknown."""

    async def advance(self, key: SessionKey, owner: str, fence: int, state: SessionState) -> None:
        """Record a round that was done under a claim.

        Raises:
            ClaimLostError: another replica holds the session now.
            ConflictError: it has ended.
        """

    async def end(self, key: SessionKey) -> None:
        """Forget a session; refuse it for a while."""

    async def allow(self, tenant: str, limit: int, window_s: float) -> float:
        """Count one request of a tenant. Returns 0.0 if it is within `limit` a window, else the seconds to wait."""

    async def close(self) -> None:
        """Give connections back."""


def ended() -> ConflictError:
    """A request for a session after its end."""
    return ConflictError("this session has ended", code="session_ended")


@dataclass
class _Entry:
    expires_at: float
    fence: int
    owner: str
    state: SessionState | None = None
    ended: bool = False


class MemoryStore:
    """A store for one process."""

    name = "memory"

    def __init__(self, ttl_s: float, max_sessions: int = 10_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._entries: OrderedDict[SessionKey, _Entry] = OrderedDict()  # Least recently used first.
        self._windows: OrderedDict[str, tuple[float, int]] = OrderedDict()  # tenant -> (end of its window, count)

    @property
    def num_sessions(self) -> int:
        """Sessions that haven't ended or expired."""
        now = self._clock()
        return sum(not entry.ended and entry.expires_at > now for entry in self._entries.values())

    async def open(self, key: SessionKey, owner: str) -> Claim:
        """See `SessionStore.open`."""
        entry = self._find(key)
        if entry is not None and entry.ended:
            raise ended()
        fence = entry.fence + 1 if entry else 1
        self._put(key, _Entry(self._clock() + self._ttl_s, fence, owner))
        return Claim(fence)

    async def claim(self, key: SessionKey, owner: str) -> Claim | None:
        """See `SessionStore.claim`."""
        entry = self._find(key)
        if entry is None or entry.ended:
            return None
        if entry.owner != owner:
            entry = _Entry(entry.expires_at, entry.fence + 1, owner, entry.state)
            self._put(key, entry)
        return Claim(entry.fence, entry.state)

    async def advance(self, key: SessionKey, owner: str, fence: int, state: SessionState) -> None:
        """See `SessionStore.advance`."""
        entry = self._find(key)
        if entry is not None and entry.ended:
            raise ended()
        if entry is not None and (entry.fence > fence or (entry.fence == fence and entry.owner != owner)):
            raise ClaimLostError("another replica serves this session now; send its tokens again")
        self._put(key, _Entry(self._clock() + self._ttl_s, fence, owner, state))

    async def end(self, key: SessionKey) -> None:
        """See `SessionStore.end`."""
        entry = self._find(key)
        fence = entry.fence + 1 if entry else 1
        self._put(key, _Entry(self._clock() + TOMBSTONE_S, fence, "", ended=True))

    async def allow(self, tenant: str, limit: int, window_s: float) -> float:
        """See `SessionStore.allow`."""
        now = self._clock()
        ends_at, count = self._windows.get(tenant, (0.0, 0))
        if ends_at <= now:
            ends_at, count = now + window_s, 0
        self._windows[tenant] = (ends_at, count + 1)
        while len(self._windows) > self._max_sessions:
            self._windows.popitem(last=False)
        return 0.0 if count < limit else ends_at - now

    async def close(self) -> None:
        """Nothing to give back."""

    def _find(self, key: SessionKey) -> _Entry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and entry.expires_at > self._clock() else None

    def _put(self, key: SessionKey, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        self._expire()
        while len(self._entries) > self._max_sessions:
            self._entries.popitem(last=False)

    def _expire(self) -> None:
        """Drop what has expired at the old end; what hides behind a younger entry is bounded by `max_sessions`."""
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).expires_at <= now:
            self._entries.popitem(last=False)
