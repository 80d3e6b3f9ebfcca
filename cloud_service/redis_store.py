"""The session store that replicas share.

Every change is one script, so that it happens whole and with its expiry, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pydantic import ValidationError

from cloud_service.redis_scripts import RedisScripts
from cloud_service.sealer import Sealer
from cloud_service.session_store import (
    TOMBSTONE_S,
    Claim,
    ClaimLostError,
    SessionKey,
    SessionState,
    ended,
)

# A new fence is above the old one and not below the server's clock in milliseconds, so that it grows even over a flush.
_NEXT_FENCE = """
local function next_fence(key)
  local now = redis.call('TIME')
  local clock = now[1] * 1000 + math.floor(now[2] / 1000)
  local old = tonumber(redis.call('HGET', key, 'fence') or '0')
  return string.format('%.0f', math.max(old + 1, clock))
end
"""

OPEN = (
    _NEXT_FENCE
    + """
if redis.call('HGET', KEYS[1], 'ended') then return false end
local fence = next_fence(KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'fence', fence, 'owner', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return fence
"""
)

CLAIM = (
    _NEXT_FENCE
    + """
local entry = redis.call('HMGET', KEYS[1], 'fence', 'owner', 'state', 'ended')
if not entry[1] or entry[4] then return false end
local fence = entry[1]
if entry[2] ~= ARGV[1] then
  fence = next_fence(KEYS[1])
  redis.call('HSET', KEYS[1], 'fence', fence, 'owner', ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {fence, entry[3] or ''}
"""
)

ADVANCE = """
local entry = redis.call('HMGET', KEYS[1], 'fence', 'owner', 'ended')
if entry[3] then return 'ended' end
if entry[1] then
  local held, mine = tonumber(entry[1]), tonumber(ARGV[2])
  if held > mine or (held == mine and entry[2] ~= ARGV[1]) then return 'lost' end
end
redis.call('HSET', KEYS[1], 'fence', ARGV[2], 'owner', ARGV[1], 'state', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 'done'
"""

END = (
    _NEXT_FENCE
    + """
local fence = next_fence(KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'fence', fence, 'ended', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return fence
"""
)

# Count and expiry in one step: a counter without an expiry would lock its tenant out for good.
ALLOW = """
local count = redis.call('INCR', KEYS[1])
local left = redis.call('PTTL', KEYS[1])
if left < 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  left = tonumber(ARGV[2])
end
if count > tonumber(ARGV[1]) then return left end
return 0
"""


class RedisStore:
    """A `SessionStore` on a Redis server."""

    name = "redis"

    def __init__(
        self,
        url: str,
        sealer: Sealer,
        *,
        ttl_s: float,
        timeout_s: float = 0.25,
        prefix: str = "souschef",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sealer = sealer
        self._ttl_ms = int(ttl_s * 1e3)
        self._prefix = prefix
        self._redis = RedisScripts(url, timeout_s, clock)
        self._open, self._claim, self._advance, self._end, self._allow = map(
            self._redis.register, (OPEN, CLAIM, ADVANCE, END, ALLOW)
        )

    async def open(self, key: SessionKey, owner: str) -> Claim:
        """See `SessionStore.open`."""
        fence = await self._redis.run(self._open, self._name(key), owner, self._ttl_ms)
        if fence is None:
            raise ended()
        return Claim(int(fence))

    async def claim(self, key: SessionKey, owner: str) -> Claim | None:
        """See `SessionStore.claim`."""
        name = self._name(key)
        found = await self._redis.run(self._claim, name, owner, self._ttl_ms)
        if found is None:
            return None
        fence, sealed = found
        content = self._sealer.unseal(sealed, name)
        try:
            state = SessionState.model_validate_json(content) if content is not None else None
        except ValidationError:
            state = None  # Another version's: its tokens come again with an opening.
        return Claim(int(fence), state)

    async def advance(self, key: SessionKey, owner: str, fence: int, state: SessionState) -> None:
        """See `SessionStore.advance`."""
        name = self._name(key)
        sealed = self._sealer.seal(state.model_dump_json().encode(), name)
        outcome = await self._redis.run(self._advance, name, owner, fence, sealed, self._ttl_ms)
        if outcome == b"ended":
            raise ended()
        if outcome == b"lost":
            raise ClaimLostError("another replica serves this session now; send its tokens again")

    async def end(self, key: SessionKey) -> None:
        """See `SessionStore.end`."""
        await self._redis.run(self._end, self._name(key), int(TOMBSTONE_S * 1e3))

    async def allow(self, tenant: str, limit: int, window_s: float) -> float:
        """See `SessionStore.allow`."""
        name = f"{self._prefix}:rate:{self._sealer.name(tenant)}"
        wait_ms = await self._redis.run(self._allow, name, limit, int(window_s * 1e3))
        return int(wait_ms) / 1e3

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _name(self, key: SessionKey) -> str:
        return f"{self._prefix}:session:{self._sealer.name(key.tenant, key.session_id)}"
