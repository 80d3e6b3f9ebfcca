"""Measured numbers as the simulator takes them: written out, or in the files that our other commands write."""

from __future__ import annotations

from edge_agent.cost_model import CostCurve
from shared.errors import ConfigError
from shared.measured_numbers import read_numbers

CURVE_KEYS = ("verify_ms", "verify_cost_ms", "curve_ms")
RATE_KEYS = ("acceptance_by_position",)


def read_curve(text: str) -> CostCurve:
    """c(1), c(2), … from `10.5,14,18.5` or from a JSON file: a list, or an object that holds `verify_ms`, as the answer
    of `GET /v1/policy` does.

    Raises:
        ConfigError: neither of these.
    """
    values = read_numbers(text, CURVE_KEYS, "--curve")
    try:
        return CostCurve(tuple(values))
    except ValueError as error:
        raise ConfigError(f"--curve: {error}") from error


def read_rates(text: str) -> list[float]:
    """Acceptance rates by draft position from `0.8,0.7` or from a JSON file: a list, or what `bench --json` wrote.

    Raises:
        ConfigError: neither of these, or a rate that isn't in 0..1.
    """
    rates = read_numbers(text, RATE_KEYS, "--rates")
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(f"--rates: every rate must be in 0..1, got {rates}")
    return rates
