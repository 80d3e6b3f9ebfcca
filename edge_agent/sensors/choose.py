"""From the setting `sensors` to sensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge_agent.sensors.base import MergedSensors, NullSensors, Sensors
from edge_agent.sensors.psutil_sensors import PsutilSensors
from edge_agent.sensors.replay import ReplaySensors
from edge_agent.sensors.simulated import SimulatedSensors
from edge_agent.sensors.sysfs import SYS_CLASS, SysfsSensors
from edge_agent.sensors.termux import TermuxSensors
from edge_agent.simulated_phone import PROFILES, SimulatedPhone, find_profile
from shared.errors import ConfigError

ALLOWED = f"auto, push, simulated:PROFILE ({', '.join(PROFILES)}) or replay:FILE"


def choose_sensors(spec: str, open_phone: Callable[[str], SimulatedPhone] | None = None) -> Sensors:
    """The sensors that the setting asks for. `push` reads nothing itself: the app's readings come in by the API.

    open_phone: makes the simulated device of a profile, where it is shared with the inference thread.

    Raises:
        ConfigError: no such kind, profile or file; says what there is.
    """
    kind, _, argument = spec.partition(":")
    if spec == "auto":
        return _machine_sensors()
    if spec == "push":
        return NullSensors()
    if kind == "simulated" and argument:
        find_profile(argument)
        phone = open_phone(argument) if open_phone else SimulatedPhone(find_profile(argument))
        return SimulatedSensors(phone)
    if kind == "replay" and argument:
        return ReplaySensors.from_file(Path(argument))
    raise ConfigError(f"sensors {spec!r} is not one of {ALLOWED}")


def _machine_sensors() -> Sensors:
    """Everything that this machine has, the most direct first."""
    parts: list[Sensors] = []
    if TermuxSensors.is_available():
        parts.append(TermuxSensors())
    if SYS_CLASS.is_dir():
        parts.append(SysfsSensors())
    parts.append(PsutilSensors())
    return MergedSensors(parts)
