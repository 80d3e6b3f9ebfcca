"""Measured numbers as commands take them: written out, or in the files that other commands and routes write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError


def read_numbers(text: str, keys: Sequence[str], option: str) -> list[float]:
    """Numbers from `10.5,14,18.5` or from a JSON file: a list, or an object that holds one under one of the keys.

    Raises:
        ConfigError: neither of these; names the option.
    """
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


def _find(value: Any, keys: Sequence[str]) -> list[float] | None:
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
