"""Measuring what a pass costs on this machine: the curve c(m) that every decision rests on."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from shared.causal_lm import CausalLM
from shared.draft_head import DraftHead

CURVE_POSITIONS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
"""Positions m that are measured; the ones between are interpolated."""


def measure_curve(
    lm: CausalLM,
    *,
    positions: Sequence[int] = CURVE_POSITIONS,
    repeats: int = 3,
    past: int = 64,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Median seconds of one pass over m positions with logits for all, for m = 1..max(positions).

    The repeats go round the positions, so that a slow spell of the machine falls on all of them. A first round isn't
    counted: it pays for pages and buffers. The cache is left empty. A pass with few positions costs the same whatever
    the tokens are, so any will do.
    """
    tokens = [1 + index % 100 for index in range(past + max(positions))]
    lm.truncate(0)
    try:
        lm.forward(tokens[:past], 0)
        times: dict[int, list[float]] = {m: [] for m in positions}
        for number in range(1 + repeats):
            for m in positions:
                lm.truncate(past)
                started = clock()
                lm.forward(tokens[past : past + m], m)
                if number:
                    times[m].append(clock() - started)
    finally:
        lm.truncate(0)
    return interpolate({m: statistics.median(values) for m, values in times.items()})


def measure_prefill(
    lm: CausalLM, *, positions: int = 128, repeats: int = 2, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds a token of taking a text in without reading logits; the best of the repeats. The cache is left empty."""
    tokens = [1 + index % 100 for index in range(min(positions, lm.context_length))]
    times = []
    for _ in range(repeats):
        lm.truncate(0)
        started = clock()
        lm.forward(tokens, 0)
        times.append((clock() - started) / len(tokens))
    lm.truncate(0)
    return min(times)


def measure_head(
    head: DraftHead,
    feature_size: int,
    *,
    past: int = 128,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Seconds of a draft token (the median), and seconds a token of catching up. The cache is left empty."""
    past = min(past, head.context_length - 1)
    tokens = [1 + index % 100 for index in range(past + 1)]
    features = np.ones((past, feature_size), np.float32)
    times, catch_ups = [], []
    for _ in range(repeats):
        head.truncate(0)
        started = clock()
        head.forward(tokens[:past], features[1:])
        read = clock()
        head.forward(tokens[past:], features[:1])
        times.append(clock() - read)
        catch_ups.append((read - started) / past)
    head.truncate(0)
    return statistics.median(times), min(catch_ups)


def interpolate(points: dict[int, float]) -> list[float]:
    """Values for 1..max from some of them, straight lines between, and never falling: more positions cost no less."""
    known = sorted(points)
    if not known or known[0] != 1:
        raise ValueError(f"the curve has to begin at 1 position, got {known}")
    curve = [points[1]]
    for low, high in itertools.pairwise(known):
        for m in range(low + 1, high + 1):
            value = points[low] + (points[high] - points[low]) * (m - low) / (high - low)
            curve.append(max(value, curve[-1]))
    return curve
