"""Readings that an app on the phone sends to `POST /v1/device`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator

from edge_agent.device_state import DeviceReading, Network, ThermalStatus


class DevicePush(BaseModel):
    """The body of a push. All fields are optional: what isn't known is left out.

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
    """The last push as a sensor of its own: it stands over other sensors until it is released or old."""

    source = "push"

    def __init__(self, hold_s: float = 300.0) -> None:
        self._hold_s = hold_s
        self._reading: DeviceReading | None = None

    def hold(self, reading: DeviceReading) -> None:
        """Keep this one."""
        self._reading = reading

    def release(self) -> None:
        """Keep none."""
        self._reading = None

    def read(self, now: float) -> DeviceReading | None:
        """The held reading, as of now."""
        if self._reading is None or now - self._reading.at > self._hold_s:
            return None
        return replace(self._reading, at=now)
