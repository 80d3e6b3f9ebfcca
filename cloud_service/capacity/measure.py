"""The costs of a model on this machine, for the simulation."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from cloud_service.batcher import BatchDecoder
from cloud_service.capacity.plan import Costs
from cloud_service.target import COST_REPEATS, PREFILL_CHUNK, measure_cost_ms, positions_worth_measuring
from shared.causal_lm import CausalLM

SIZES = (1, 2, 4, 8)
"""Sessions of a measured step; the sizes between are interpolated."""
PAST = 64
"""Tokens that the sessions hold meanwhile."""


def measure_costs(decoder: BatchDecoder[Any], clock: Callable[[], float] = time.perf_counter) -> Costs:
    """Passes of one session, steps of several, and a prompt token: medians of a few."""
    caches = [decoder.new_cache() for _ in range(max(SIZES))]
    verify = measure_cost_ms(caches[0], positions_worth_measuring(decoder.context_length), clock)
    chunks = [_timed_ms(functools.partial(_fill, cache, PREFILL_CHUNK), clock) for cache in caches]
    for cache in caches:
        _fill(cache, PAST - PREFILL_CHUNK)
    steps = {size: median(_step_ms(decoder, caches[:size], clock) for _ in range(COST_REPEATS)) for size in SIZES}
    return Costs(verify, interpolated(steps), median(chunks) / PREFILL_CHUNK)


def interpolated(steps: dict[int, float]) -> list[float]:
    """Values for 1, 2, … from some of them, straight lines between."""
    sizes = sorted(steps)
    values = [steps[sizes[0]]]
    for low, high in itertools.pairwise(sizes):
        slope = (steps[high] - steps[low]) / (high - low)
        values += [steps[low] + slope * (size - low) for size in range(low + 1, high + 1)]
    return values


def _fill(cache: CausalLM, num_tokens: int) -> None:
    cache.forward([0] * num_tokens, 0)


def _step_ms(decoder: BatchDecoder[Any], caches: Sequence[CausalLM], clock: Callable[[], float]) -> float:
    return _timed_ms(lambda: decoder.decode_batch(caches, [0] * len(caches)), clock)


def _timed_ms(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return (clock() - started) * 1e3
