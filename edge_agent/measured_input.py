"""Measured numbers as the simulator takes them: written out, or in the files that our other commands write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge_agent.cost_model import CostCurve
from shared.errors import ConfigError

CURVE_KEYS = ("verify_ms", "verify_cost_ms", "curve_ms")
RATE_KEYS = ("acceptance_by_position",)


def read_curve(text: str) -> CostCurve:
    """c(1), c(2), … from `10.5,14,18.5` or from a JSON file: a list, or an object that holds `verify_ms`, as the answer
    of `GET /v1/policy` does.

    Raises:
        ConfigError: neither of these.
    """
    values = _numbers(text, CURVE_KEYS, "--curve")
    try:
        return CostCurve(tuple(values))
    except ValueError as error:
        raise ConfigError(f"--curve: {error}") from error


def read_rates(text: str) -> list[float]:
    """Acceptance rates by draft position from `0.8,0.7` or from a JSON file: a list, or what `bench --json` wrote.

    Raises:
        ConfigError: neither of these, or a rate that isn't in 0..1.
    """
    rates = _numbers(text, RATE_KEYS, "--rates")
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(f"--rates: every rate must be in 0..1, got {rates}")
    return rates


def _numbers(text: str, keys: tuple[str, ...], option: str) -> list[float]:
    found = _split(text)
    if found is None:
        try:
            found = _find(json.loads(Path(text).read_text(encoding="utf-8")), keys)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{option} takes numbers parted by commas or a JSON file: {error}") from error
    if not found:
        raise ConfigError(f"{option} {text}: no list of numbers in it, and none named {', '.join(keys)}")
    return found


def _split(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return None


def _find(value: Any, keys: tuple[str, ...]) -> list[float] | None:
    """The list itself, or the first one under one of the keys, however deep."""
    if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        return [float(item) for item in value]
    inner = [value[key] for key in keys if key in value] if isinstance(value, dict) else []
    nested = [v for v in value.values() if isinstance(v, dict | list)] if isinstance(value, dict) else []
    items = [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []
    for candidate in (*inner, *(v for v in nested if isinstance(v, dict) or _is_objects(v)), *items):
        found = _find(candidate, keys)
        if found:
            return found
    return None


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
