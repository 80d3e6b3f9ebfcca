"""Giving memory back to the system."""

from __future__ import annotations

import ctypes
import gc


def release_freed_memory() -> None:
    """Returns what has been freed to the system, after work that needed much for a moment (loading, building).

    glibc keeps freed pages for itself: 150 MB of them after a tokenizer of 150,000 tokens has been read. Where there is
    another C library it does nothing.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
