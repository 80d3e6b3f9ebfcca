"""How the device is read: files, commands, an app's pushes, a recording, a simulation."""

from __future__ import annotations

from edge_agent.sensors.base import DeviceSampler, MergedSensors, NullSensors, Sensors
from edge_agent.sensors.choose import choose_sensors
from edge_agent.sensors.psutil_sensors import PsutilSensors
from edge_agent.sensors.push import DevicePush
from edge_agent.sensors.recorder import Recorder
from edge_agent.sensors.replay import ReplaySensors
from edge_agent.sensors.simulated import SimulatedSensors
from edge_agent.sensors.sysfs import SysfsSensors
from edge_agent.sensors.termux import TermuxSensors

__all__ = [
    "DevicePush",
    "DeviceSampler",
    "MergedSensors",
    "NullSensors",
    "PsutilSensors",
    "Recorder",
    "ReplaySensors",
    "Sensors",
    "SimulatedSensors",
    "SysfsSensors",
    "TermuxSensors",
    "choose_sensors",
]
