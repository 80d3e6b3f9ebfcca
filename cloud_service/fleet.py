"""The fleet: how edges fare that were told to say so. Kept for a while only, and for their own tenant's eyes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from pydantic import BaseModel, ConfigDict

from shared.errors import OverloadedError
from shared.protocol import DeviceId, DeviceReport, ModeName

HOT = frozenset({"offload", "critical"})
"""Rungs of heat on which a device hands its work over, or is slowed down."""
NO_MODE = "none"
"""Mode of a device that has decoded nothing that it may speak of."""
MODES = (*get_args(ModeName), NO_MODE)
RETRY_AFTER_S = 60.0


class FleetFullError(OverloadedError):
    """The tenant has as many devices as are kept."""

    code = "fleet_full"


def fleet_full() -> FleetFullError:
    """A report of a device too many."""
    return FleetFullError("no more devices are kept for this key", retry_after_s=RETRY_AFTER_S)


@dataclass(frozen=True)
class Sighting:
    """A device's latest report, and the seconds since."""

    report: DeviceReport
    age_s: float


class Fleet(Protocol):
    """Where reports are kept: a tenant's devices, each until it has been silent for a while."""

    async def note(self, tenant: str, report: DeviceReport) -> None:
        """Keep a device's report in place of its last.

        Raises:
            FleetFullError: it would be one device too many.
            StoreUnavailableError: there is no reaching them.
        """

    async def sightings(self, tenant: str) -> list[Sighting]:
        """A tenant's devices by their ids.

        Raises:
            StoreUnavailableError: there is no reaching them.
        """

    async def close(self) -> None:
        """Give connections back."""


class MemoryFleet:
    """The fleet as this process alone hears of it."""

    def __init__(self, ttl_s: float, max_devices: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_devices = max_devices
        self._clock = clock
        self._reports: dict[str, dict[str, tuple[float, DeviceReport]]] = {}  # tenant -> id -> (when, report)

    async def note(self, tenant: str, report: DeviceReport) -> None:
        """See `Fleet.note`."""
        devices = self._present(tenant)
        if report.device_id not in devices and len(devices) >= self._max_devices:
            raise fleet_full()
        devices[report.device_id] = (self._clock(), report)
        self._reports[tenant] = devices

    async def sightings(self, tenant: str) -> list[Sighting]:
        """See `Fleet.sightings`."""
        now = self._clock()
        return [Sighting(report, now - at) for _, (at, report) in sorted(self._present(tenant).items())]

    async def close(self) -> None:
        """Nothing to give back."""

    def _present(self, tenant: str) -> dict[str, tuple[float, DeviceReport]]:
        oldest = self._clock() - self._ttl_s
        return {key: seen for key, seen in self._reports.get(tenant, {}).items() if seen[0] > oldest}


@dataclass(frozen=True)
class FleetSummary:
    """Counts of devices. undrafted: those that decode without drafts. acceptance: the mean of those that draft.

    NaN: not known, which is not 0.
    """

    by_mode: Mapping[str, float]
    hot: float
    undrafted: float
    acceptance: float


UNKNOWN_FLEET = FleetSummary(dict.fromkeys(MODES, math.nan), math.nan, math.nan, math.nan)


def summarise(sightings: Sequence[Sighting]) -> FleetSummary:
    """What an operator watches."""
    reports = [sighting.report for sighting in sightings]
    rates = [report.acceptance_rate for report in reports if report.acceptance_rate is not None]
    modes = [report.mode or NO_MODE for report in reports]
    return FleetSummary(
        by_mode={mode: modes.count(mode) for mode in MODES},
        hot=sum(report.heat in HOT for report in reports),
        undrafted=sum(report.tokens_per_second is not None and report.acceptance_rate is None for report in reports),
        acceptance=sum(rates) / len(rates) if rates else math.nan,
    )


class FleetDevice(BaseModel):
    """One device of `GET /v1/fleet`. What isn't known is null."""

    model_config = ConfigDict(frozen=True)

    device_id: DeviceId
    age_s: float
    model: str
    heat: str | None
    temperature_c: float | None
    battery_percent: float | None
    charging: bool | None
    mode: str | None
    gamma: int | None
    reason: str | None
    acceptance_rate: float | None
    tokens_per_second: float | None


class FleetPage(BaseModel):
    """The answer of `GET /v1/fleet`. total: devices in all. next: the next page's `after`; null at the end."""

    total: int
    devices: list[FleetDevice]
    next: DeviceId | None


def page(sightings: Sequence[Sighting], after: str, limit: int) -> FleetPage:
    """The first `limit` devices with ids above `after`; sightings: by their ids."""
    rest = [sighting for sighting in sightings if sighting.report.device_id > after]
    devices = [
        FleetDevice(age_s=round(sighting.age_s, 1), **sighting.report.model_dump(exclude={"protocol"}))
        for sighting in rest[:limit]
    ]
    return FleetPage(
        total=len(sightings), devices=devices, next=devices[-1].device_id if len(rest) > len(devices) > 0 else None
    )
