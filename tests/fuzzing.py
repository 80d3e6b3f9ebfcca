"""How long to fuzz: briefly in every run, longer by `make fuzz`."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))
"""How many times as many examples as a normal run tries; over 1, other ones in every run."""


def examples(count: int) -> dict[str, object]:
    """Settings for hypothesis: so many examples in a normal run."""
    return {"max_examples": count * FACTOR, "derandomize": FACTOR == 1, "deadline": None}
