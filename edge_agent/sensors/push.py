"""Readings that an app on the phone sends to `POST /v1/device`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator

from edge_agent.device_state import DeviceReading, Network, ThermalStatus


class DevicePush(BaseModel):
    """The body of a push. All fields are optional: what isn't known is left out; null takes back what was pushed.

    thermal_status: Android's number 0 to 6, or its name in lower case.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature_c: Annotated[float, Field(ge=-60, le=150, strict=True)] | None = None
    battery_percent: Annotated[float, Field(ge=0, le=100, strict=True)] | None = None
    charging: StrictBool | None = None
    power_saver: StrictBool | None = None
    thermal_status: ThermalStatus | None = None
    headroom: Annotated[float, Field(ge=0, le=10, strict=True)] | None = None
    network: Network | None = None

    @field_validator("thermal_status", mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                return ThermalStatus[value.upper()]
            except KeyError:
                names = ", ".join(status.name.lower() for status in ThermalStatus)
                raise ValueError(f"must be 0 to 6 or one of {names}") from None
        if isinstance(value, bool):
            raise ValueError("must be 0 to 6, not a boolean")
        return value

    def reading(self, now: float) -> DeviceReading:
        """As a reading of this moment."""
        return DeviceReading(now, "push", **self.model_dump())


class HeldPush:
    """What was pushed, as a sensor of its own: each value stands over those of other sensors until it is old, or taken
    back by a push of null."""

    source = "push"

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._values: dict[str, tuple[float, Any]] = {}

    def hold(self, push: DevicePush, now: float) -> None:
        """Keep what this one names; what it doesn't stays as it was."""
        # A new mapping: the sampler's thread may be reading the old one.
        self._values = self._values | {name: (now, getattr(push, name)) for name in push.model_fields_set}

    def release(self) -> None:
        """Keep nothing."""
        self._values = {}

    def read(self, now: float) -> DeviceReading | None:
        """What is held, as of now."""
        held = {name: value for name, (at, value) in self._values.items() if now - at <= self._hold_s}
        return DeviceReading(now, self.source, **held) if held else None
