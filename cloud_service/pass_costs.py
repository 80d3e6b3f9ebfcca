"""What passes of the model cost here, and from that which requests share one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, TypeVar

from shared.causal_lm import CausalLM, Logits

LM = TypeVar("LM", bound=CausalLM)

COST_REPEATS = 3
ROWS_EACH = (2, 4)
"""Of a full batch whose sessions have more than one row: measured points, others lie on lines between and behind."""
MOST_ROWS = 64
LEAST_MS = 0.01


class BatchDecoder(Protocol[LM]):
    """A model whose sequences can share a pass."""

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""

    @property
    def context_length(self) -> int:
        """Most tokens a cache can hold."""

    @property
    def max_batch(self) -> int:
        """Most sequences in a pass."""

    def new_cache(self) -> LM:
        """A new, empty sequence."""

    def forward_batch(
        self, sequences: Sequence[LM], tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> Sequence[Logits]:
        """Append to each of the (different) sequences its tokens: what each one's `forward` would give."""


def pass_cost_ms(cost_ms: Sequence[float], positions: int) -> float:
    """Time of one pass over so many positions; past the measured ones the slope of their second half goes on."""
    if positions <= len(cost_ms):
        return cost_ms[positions - 1]
    if len(cost_ms) == 1:
        return cost_ms[0] * positions
    half = len(cost_ms) // 2
    slope = max(0.0, cost_ms[-1] - cost_ms[half - 1]) / (len(cost_ms) - half)
    return cost_ms[-1] + slope * (positions - len(cost_ms))


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds. alone_ms[m - 1]: a pass over m positions of one session. together_ms[m - 1]: over m positions of
    several, which are shared evenly; `alone_ms` where it isn't known."""

    alone_ms: Sequence[float]
    together_ms: Sequence[float] = ()

    def alone(self, positions: int) -> float:
        """A pass for one session."""
        return pass_cost_ms(self.alone_ms, positions)

    def together(self, positions: int) -> float:
        """A pass for several."""
        return pass_cost_ms(self.together_ms or self.alone_ms, positions)

    def num_together(self, positions: Sequence[int]) -> int:
        """How many of the sessions that wait, the first ones, one pass had better take: so many that it saves most."""
        sums = list(itertools.accumulate(positions))
        apart = itertools.accumulate(map(self.alone, positions))
        saved = [each - self.together(total) for each, total in zip(apart, sums, strict=True)]
        return max(range(len(saved)), key=lambda index: saved[index] if index else 0.0) + 1


def measure(
    decoder: BatchDecoder[Any],
    caches: Sequence[CausalLM],
    max_positions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PassCosts:
    """Medians of a few passes, of one cache over 1 … max_positions positions and of several together.

    caches: as many as a pass can take; they stay as they are. What is measured takes turns, so that a slow spell of the
    machine falls on all alike.
    """

    def pass_ms(sessions: int, rows: int) -> float:
        chosen = caches[:sessions]
        started = clock()
        decoder.forward_batch(chosen, [[0] * rows] * sessions, [rows] * sessions)
        ended = clock()
        for cache in chosen:
            cache.truncate(len(cache.tokens) - rows)
        return (ended - started) * 1e3

    alone = [(1, rows) for rows in range(1, max_positions + 1)]
    together = _shapes(len(caches), max_positions)
    turns = [{shape: pass_ms(*shape) for shape in (*alone, *together)} for _ in range(COST_REPEATS)]
    medians = {shape: max(LEAST_MS, round(median(turn[shape] for turn in turns), 2)) for shape in turns[0]}
    points = {sessions * rows: medians[sessions, rows] for sessions, rows in together}
    return PassCosts([medians[shape] for shape in alone], interpolated({1: medians[1, 1], **points}))


def _shapes(max_sessions: int, max_positions: int) -> list[tuple[int, int]]:
    """(sessions, rows of each): more and more sessions, then more and more rows."""
    doublings = [2**power for power in range(1, max_sessions.bit_length()) if 2**power < max_sessions]
    shapes = [(sessions, 1) for sessions in (*doublings, max_sessions) if sessions > 1]
    most = min(max_positions, MOST_ROWS // max_sessions) if max_sessions > 1 else 0
    return shapes + [(max_sessions, rows) for rows in ROWS_EACH if rows <= most]


def interpolated(points: dict[int, float]) -> list[float]:
    """Values for 1, 2, … from some of them, straight lines between."""
    places = sorted(points)
    values = [points[places[0]]]
    for low, high in itertools.pairwise(places):
        slope = (points[high] - points[low]) / (high - low)
        values += [round(points[low] + slope * (place - low), 2) for place in range(low + 1, high + 1)]
    return values
