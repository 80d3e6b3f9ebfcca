"""What the policy says of a round: how it is decoded, how many tokens are drafted, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """Who drafts and who verifies."""

    LOCAL_SPECULATIVE = "local_speculative"
    LOCAL_DIRECT = "local_direct"
    CLOUD_VERIFY = "cloud_verify"
    CLOUD_GENERATE = "cloud_generate"

    @property
    def on_device(self) -> bool:
        """Whether no token leaves the device."""
        return self in ON_DEVICE


ON_DEVICE = frozenset({Mode.LOCAL_SPECULATIVE, Mode.LOCAL_DIRECT})
DRAFTLESS = frozenset({Mode.LOCAL_DIRECT, Mode.CLOUD_GENERATE})


class Reason(StrEnum):
    """Why a decision was taken; the same word stands in the log, the metric, the response and the handoff."""

    NOMINAL = "nominal"
    REQUESTED = "requested"
    PRIVACY = "privacy"
    STRUCTURED = "structured"
    PROBE = "probe"
    DEVICE_WARM = "device_warm"
    DEVICE_HOT = "device_hot"
    DEVICE_CRITICAL = "device_critical"
    BATTERY_LOW = "battery_low"
    BATTERY_CRITICAL = "battery_critical"
    POWER_SAVER = "power_saver"
    ACCEPTANCE_LOW = "acceptance_low"
    BENEFIT_SMALL = "benefit_small"
    ENERGY = "energy"
    CONTEXT_FULL = "context_full"
    QUEUE_PRESSURE = "queue_pressure"
    CLOUD_FASTER = "cloud_faster"
    CLOUD_SATURATED = "cloud_saturated"
    CLOUD_UNAVAILABLE = "cloud_unavailable"
    RECOVERED = "recovered"


@dataclass(frozen=True)
class Decision:
    """One round's orders.

    gamma: draft tokens asked for (0 in direct modes). pace_s: the fewest seconds a committed token may take, a rate cap
    for a hot device (0: as fast as it goes). goes_on: as far as is known the next round will be direct as well, so its
    pass may begin behind this one's; it changes when things are done, not what, and so isn't compared.
    """

    mode: Mode
    gamma: int
    reason: Reason
    pace_s: float = 0.0
    goes_on: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError(f"gamma must not be negative, got {self.gamma}")
        if self.gamma and self.mode in DRAFTLESS:
            raise ValueError(f"{self.mode} drafts nothing, got gamma {self.gamma}")
        if self.goes_on and (self.pace_s or self.mode is not Mode.LOCAL_DIRECT):
            raise ValueError("only direct rounds on the device without a pace go on behind one another")
        if not 0 <= self.pace_s < math.inf:
            raise ValueError(f"pace_s must be finite and not negative, got {self.pace_s}")
