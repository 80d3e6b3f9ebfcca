"""The costs of a model on this machine, for the simulation."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from cloud_service.capacity.plan import Costs
from cloud_service.pass_costs import BatchDecoder, measure
from cloud_service.target import PREFILL_CHUNK, positions_worth_measuring
from shared.causal_lm import CausalLM

PAST = 64
"""Tokens that the sessions hold meanwhile."""


def measure_costs(decoder: BatchDecoder[Any], clock: Callable[[], float] = time.perf_counter) -> Costs:
    """Passes of one session, of several together, and a prompt token: medians of a few."""
    caches = [decoder.new_cache() for _ in range(decoder.max_batch)]
    chunks = [_chunk_ms(cache, clock) for cache in caches]
    for cache in caches:
        cache.forward([0] * (PAST - PREFILL_CHUNK), 0)
    passes = measure(decoder, caches, positions_worth_measuring(decoder.context_length - PAST), clock)
    return Costs(passes.alone_ms, passes.together_ms, median(chunks) / PREFILL_CHUNK)


def _chunk_ms(cache: CausalLM, clock: Callable[[], float]) -> float:
    started = clock()
    cache.forward([0] * PREFILL_CHUNK, 0)
    return (clock() - started) * 1e3
