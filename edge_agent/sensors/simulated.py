"""The sensors of a simulated device."""

from __future__ import annotations

from edge_agent.device_state import DeviceReading
from edge_agent.simulated_phone import SimulatedPhone


class SimulatedSensors:
    """Reads a `SimulatedPhone`."""

    def __init__(self, phone: SimulatedPhone) -> None:
        self.phone = phone

    @property
    def source(self) -> str:
        """`simulated:` and the profile's name."""
        return f"simulated:{self.phone.profile.name}"

    def read(self, now: float) -> DeviceReading | None:
        """What it says now."""
        return self.phone.reading(now)
