"""When the policy acts. Presets for a phone (skin temperatures), a board (die temperatures) and a server.

Where the numbers come from is in docs/policy.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from edge_agent.config import Objective
from shared.errors import BadRequestError, ConfigError


class Preset(StrEnum):
    """A kind of device."""

    PHONE = "phone"
    BOARD = "board"
    SERVER = "server"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rising(_Frozen):
    """Entered at or above `enter`, left below `exit`."""

    enter: float
    exit: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.exit >= self.enter:
            raise ValueError(f"exit must lie under enter, got {self.exit} and {self.enter}")
        return self


class Falling(_Frozen):
    """Entered at or below `enter`, left above `exit`."""

    enter: float
    exit: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.exit <= self.enter:
            raise ValueError(f"exit must lie over enter, got {self.exit} and {self.enter}")
        return self


RisingLadder = tuple[Rising, Rising, Rising, Rising]
FallingLadder = tuple[Falling, Falling, Falling, Falling]


def rising(*pairs: tuple[float, float]) -> RisingLadder:
    """Four rungs from (enter, exit) pairs, the mildest first."""
    eased, direct, offload, critical = (Rising(enter=enter, exit=leave) for enter, leave in pairs)
    return eased, direct, offload, critical


def falling(*pairs: tuple[float, float]) -> FallingLadder:
    """Four rungs from (enter, exit) pairs, the mildest first."""
    eased, direct, offload, critical = (Falling(enter=enter, exit=leave) for enter, leave in pairs)
    return eased, direct, offload, critical


Share = Annotated[float, Field(ge=0, le=1)]
Stretch = Annotated[float, Field(ge=1, le=10)]


class Thresholds(_Frozen):
    """All of the policy's numbers. The four rungs are: smaller gamma, no speculation, cloud or rate cap, critical.

    temperature_c, battery_percent: None leaves that signal out. stretch: at each rung, how many times as long as a
    direct token a token takes at least, where there is no cloud to hand over to.
    """

    temperature_c: RisingLadder | None = rising((37, 35.5), (39.5, 38), (42, 40), (45, 43))
    headroom: RisingLadder = rising((0.73, 0.68), (0.82, 0.77), (0.9, 0.83), (1.0, 0.93))
    battery_percent: FallingLadder | None = falling((30, 33), (20, 23), (10, 13), (5, 8))
    stretch: tuple[Stretch, Stretch, Stretch, Stretch] = (1.0, 1.0, 1.15, 1.5)
    forecast_s: Annotated[float, Field(ge=0, le=600)] = 10.0
    most_ahead_c: Annotated[float, Field(ge=0, le=20)] = 1.5
    min_dwell_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    stale_after_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    objective: Objective = Objective.BALANCED
    max_gamma: Annotated[int, Field(ge=0, le=16)] = 16
    benefit_gate_s: Annotated[float, Field(ge=0, le=10)] = 0.150
    gate_free_drafts: bool = False
    probe_every: Annotated[int, Field(ge=1, le=1000)] = 16
    probe_share: Share = 0.01
    max_waiting: Annotated[int, Field(ge=1, le=4096)] = 8
    max_queue_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    min_cloud_speed: Share = 0.5
    cloud_retry_s: Annotated[float, Field(ge=0, le=600)] = 10.0

    @model_validator(mode="after")
    def _harder_rungs_come_later(self) -> Self:
        for name in ("temperature_c", "headroom"):
            ladder = getattr(self, name)
            if ladder and [rung.enter for rung in ladder] != sorted(rung.enter for rung in ladder):
                raise ValueError(f"{name} must rise from rung to rung")
        if self.battery_percent:
            enters = [rung.enter for rung in self.battery_percent]
            if enters != sorted(enters, reverse=True):
                raise ValueError("battery_percent must fall from rung to rung")
        if list(self.stretch) != sorted(self.stretch):
            raise ValueError("stretch must not fall from rung to rung")
        return self

    def updated(self, changes: Mapping[str, Any]) -> Thresholds:
        """With some values changed, as the policy's route takes them.

        Raises:
            BadRequestError: an unknown name, or a value that isn't allowed; says which.
        """
        try:
            return Thresholds.model_validate({**self.model_dump(), **changes})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            name = ".".join(str(part) for part in first["loc"]) or "thresholds"
            raise BadRequestError(f"{name}: {first['msg']}", param=name) from None


PRESETS: Mapping[Preset, Thresholds] = {
    Preset.PHONE: Thresholds(),
    Preset.BOARD: Thresholds(
        temperature_c=rising((70, 66), (76, 72), (80, 76), (84, 80)),
    ),
    Preset.SERVER: Thresholds(
        temperature_c=rising((88, 84), (93, 89), (97, 93), (100, 96)),
        objective=Objective.LATENCY,
    ),
}


def choose_preset(spec: str, *, has_battery: bool = False, is_arm: bool = False) -> Preset:
    """The preset by name; `auto` takes what the machine looks like.

    Raises:
        ConfigError: no such preset.
    """
    if spec == "auto":
        return Preset.PHONE if has_battery and is_arm else Preset.BOARD if is_arm else Preset.SERVER
    try:
        return Preset(spec)
    except ValueError:
        raise ConfigError(f"policy {spec!r} is not one of auto, {', '.join(Preset)}") from None
