"""Reading the kernel's one-value files, which may be absent, unreadable or empty."""

from __future__ import annotations

import math
from pathlib import Path


def read_text(path: Path) -> str | None:
    """The file's text without its line end; None if it can't be read or is empty."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None


def read_number(path: Path) -> float | None:
    """The file's value; None if it can't be read or is no finite number."""
    text = read_text(path)
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) else None
