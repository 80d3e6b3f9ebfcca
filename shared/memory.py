"""Taking memory that costs nothing until it is used, and giving it back to the system."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

SMAPS = Path("/proc/self/smaps")

T = TypeVar("T")
Range = tuple[int, int]
"""Addresses: the first, and the first one after."""

_LOADING = threading.Lock()
"""Two loads at a time couldn't tell whose a mapping is."""


def release_freed_memory() -> None:
    """Returns what has been freed to the system, after work that needed much for a moment (loading, building).

    glibc keeps freed pages for itself: 150 MB of them after a tokenizer of 150,000 tokens has been read. Where there is
    another C library it does nothing.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def untouched_zeros(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Zeros in pages of their own: they take memory as they are written, and give it back with the array.

    `numpy.zeros` promises neither: it may hand out pages that something else has used and freed, cleared anew.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, access=mmap.ACCESS_COPY), dtype).reshape(shape)


class MappedPages:
    """Pages of files that a library has mapped for an object of its own. Valid while that object lives."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = tuple(ranges)

    def release(self) -> None:
        """Give them back to the system; one that is read again comes from the file."""
        for start, stop in self._ranges:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def mapped_while(folder: Path, load: Callable[[], T]) -> tuple[T, MappedPages]:
    """What `load` returns, and what it has mapped of the folder's files. Where there is no /proc that is nothing.

    ONNX Runtime maps a model's weights and packs most of them into buffers of its own. The pages that it read for that
    stay in memory though nobody reads them again: a twelfth of the model.
    """
    with _LOADING:
        files = {str(path.resolve()) for path in folder.iterdir()}
        before = set(_unwritten_ranges(files))
        loaded = load()
        return loaded, MappedPages(set(_unwritten_ranges(files)) - before)


def _unwritten_ranges(files: set[str]) -> Iterator[Range]:
    """Each mapping of one of the files that still is what the file holds."""
    if not SMAPS.exists():
        return
    found: Range | None = None
    for line in SMAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        first, *others = line.split(maxsplit=5)
        if not first.endswith(":"):
            start, stop = (int(end, 16) for end in first.split("-"))
            found = (start, stop) if others[-1] in files else None
        elif found is not None and first == "Anonymous:" and others[0] == "0":
            yield found
