"""How fast this machine reads its memory: what bounds decoding, where every weight is read once a token."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

BUFFER_BYTES = 256 * 2**20
"""A thread's share: several times the last-level cache of the largest machines this is meant for."""


def measure_bandwidth(
    *,
    num_threads: int = 2,
    buffer_bytes: int = BUFFER_BYTES,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes a second that `num_threads` read together; the best of the repeats, as only disturbance makes it less."""
    buffers = [np.ones(buffer_bytes // 8, np.int64) for _ in range(num_threads)]
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(repeats):
            started = clock()
            list(pool.map(_read, buffers))
            best = max(best, num_threads * buffer_bytes / (clock() - started))
    return best


def _read(buffer: NDArray[np.int64]) -> int:
    return int(buffer.sum())  # numpy lets go of the interpreter meanwhile
