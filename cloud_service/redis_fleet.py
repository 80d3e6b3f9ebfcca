"""The fleet as all replicas hear of it. Reports hold no text and no ids of tokens, so they are kept as they are."""

from __future__ import annotations

from pydantic import ValidationError

from cloud_service.fleet import Sighting, fleet_full
from cloud_service.redis_scripts import RedisScripts
from cloud_service.sealer import Sealer
from shared.protocol import DeviceReport

# KEYS[1] is a tenant's sorted set of devices by the time of their report; the reports lie in a hash beside it. Both
# expire with the last device. Devices that went silent are dropped here, a thousand at most: a report stays quick.
NOTE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local reports = KEYS[1] .. ':reports'
local gone = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[4], 'LIMIT', 0, 1000)
if #gone > 0 then
  redis.call('ZREM', KEYS[1], unpack(gone))
  redis.call('HDEL', reports, unpack(gone))
end
local known = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not known and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('HSET', reports, ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', reports, ARGV[4])
return 1
"""

SIGHTINGS = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seen = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now - ARGV[1]), '+inf', 'WITHSCORES')
return {string.format('%.0f', now), seen, redis.call('HGETALL', KEYS[1] .. ':reports')}
"""


class RedisFleet:
    """A `Fleet` on a Redis server."""

    def __init__(
        self, scripts: RedisScripts, sealer: Sealer, ttl_s: float, max_devices: int, prefix: str = "souschef"
    ) -> None:
        self._redis = scripts
        self._sealer = sealer
        self._ttl_ms = int(ttl_s * 1e3)
        self._max_devices = max_devices
        self._prefix = prefix
        self._note, self._sightings = map(scripts.register, (NOTE, SIGHTINGS))

    async def note(self, tenant: str, report: DeviceReport) -> None:
        """See `Fleet.note`."""
        limits = (self._max_devices, self._ttl_ms)
        kept = await self._redis.run(self._note, self._name(tenant), report.device_id, report.encode(), *limits)
        if not int(kept):
            raise fleet_full()

    async def sightings(self, tenant: str) -> list[Sighting]:
        """See `Fleet.sightings`."""
        now, seen, reports = await self._redis.run(self._sightings, self._name(tenant), self._ttl_ms)
        contents = dict(_pairs(reports))
        found = [_sighting(contents.get(key), int(now) - float(at)) for key, at in sorted(_pairs(seen))]
        return [sighting for sighting in found if sighting is not None]

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _name(self, tenant: str) -> str:
        return f"{self._prefix}:fleet:{self._sealer.name(tenant)}"


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _sighting(content: bytes | None, age_ms: float) -> Sighting | None:
    """None where another version's report can't be read."""
    try:
        return Sighting(DeviceReport.model_validate_json(content or b""), age_ms / 1e3)
    except ValidationError:
        return None
