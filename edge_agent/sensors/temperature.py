"""Which of a machine's many temperature sensors is the processor's, and in which unit it speaks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from edge_agent.device_state import PLAUSIBLE_C

PREFERRED_CHIPS = (
    "coretemp",  # Intel
    "k10temp",  # AMD
    "zenpower",
    "cpu_thermal",  # Raspberry Pi and most device trees
    "cpu-thermal",
    "soc_thermal",
    "soc-thermal",
    "x86_pkg_temp",
    "cpu0_thermal",
    "bigcore_thermal",  # Rockchip
    "cpuss-0",  # Qualcomm
    "mtktscpu",  # MediaTek
    "apple_cpu",
)
"""By name, the best first. Never the hottest of all: disks, chargers and unconnected pins are among them."""

PREFERRED_LABELS = ("Package id 0", "Tdie", "Tctl", "Tccd1")
"""Within a chip: the value for the whole package."""


def celsius(raw: float) -> float | None:
    """Kernel files say 65000 where boards' own drivers say 65, and both mean 65 °C. None if it can't be one."""
    if not math.isfinite(raw):
        return None
    value = raw / 1000.0 if abs(raw) >= 1000.0 else raw
    return value if PLAUSIBLE_C[0] <= value <= PLAUSIBLE_C[1] else None


def processor_temperature(chips: Mapping[str, Sequence[tuple[str, float]]]) -> float | None:
    """°C of the processor. chips: for each chip its (label, raw value) pairs. None if no known chip has a sane one."""
    for name in PREFERRED_CHIPS:
        values = list(_sane(chips.get(name, ())))
        if not values:
            continue
        labelled = dict(values)
        for label in PREFERRED_LABELS:
            if label in labelled:
                return labelled[label]
        return max(value for _, value in values)
    return None


def _sane(pairs: Iterable[tuple[str, float]]) -> Iterable[tuple[str, float]]:
    for label, raw in pairs:
        value = celsius(raw)
        if value is not None and value > 0.0:  # A die at 0 °C or less is a pin that nothing is connected to.
            yield label, value
