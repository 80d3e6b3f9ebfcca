"""What a loaded model keeps in memory, and what it gives back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.memory import MODELS, resident_by_kind
from shared.memory import mapped_while, release_freed_memory, untouched_zeros
from shared.onnx_lm import KEPT_ROWS, OnnxModel

MB = 2**20

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this kernel has no /proc")


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def mapped(folder: Path) -> int:
    """Bytes of the folder's files that are in this process's memory."""
    return resident_by_kind(os.getpid(), folder)[MODELS]


def test_packed_weights_do_not_stay_as_the_files_pages_too(smollm2_directory: Path) -> None:
    loaded = OnnxModel(smollm2_directory, context_length=1024)

    files = sum(path.stat().st_size for path in smollm2_directory.iterdir())
    assert mapped(smollm2_directory) < 0.03 * files
    del loaded


def test_the_rows_looked_up_do_not_become_the_embedding(smollm2_directory: Path) -> None:
    """Tokens far from each other in the vocabulary, so that each brings pages of its own."""
    model = OnnxModel(smollm2_directory, context_length=1024)
    lm, seen = model.new_cache(), []
    few = KEPT_ROWS // 4
    for start in range(0, KEPT_ROWS, few):
        lm.forward([(start + index) * 761 % model.vocab_size for index in range(few)], 0)
        seen.append(mapped(smollm2_directory))

    assert seen == [*sorted(seen[:-1]), seen[-1]]
    assert seen[-1] < 0.2 * seen[-2]


def test_what_a_large_pass_needed_goes_back(smollm2_directory: Path) -> None:
    model = OnnxModel(smollm2_directory, context_length=1024)
    lm = model.new_cache()
    for _ in range(16):
        lm.forward([5] * 32, 17)
    lm.truncate(0)
    release_freed_memory()
    before = resident()

    lm.forward([5] * 512, 17)  # The pages of its keys, values and logits were there before.
    release_freed_memory()

    assert resident() - before < 8 * MB


def test_zeros_take_memory_as_they_are_written_and_give_it_back() -> None:
    before = resident()
    array = untouched_zeros((64, MB), np.uint8)
    assert array.shape == (64, MB)
    assert resident() - before < 2 * MB
    array[:32] = 7
    assert 30 * MB < resident() - before < 36 * MB
    assert array[31].min() == 7
    assert not array[32:].any()
    del array
    assert resident() - before < 2 * MB


def read_through(path: Path) -> Callable[[], np.memmap[tuple[int], np.dtype[np.uint8]]]:
    """Maps the file and has all of it in memory."""

    def load() -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        array: np.memmap[tuple[int], np.dtype[np.uint8]] = np.memmap(path, np.uint8, "c")
        array.sum()
        return array

    return load


def test_only_what_was_mapped_by_the_load_is_released(tmp_path: Path) -> None:
    content = np.arange(8 * MB, dtype=np.uint8)
    content.tofile(tmp_path / "weights")
    earlier = read_through(tmp_path / "weights")()
    array, pages = mapped_while(tmp_path, read_through(tmp_path / "weights"))
    both = mapped(tmp_path)

    pages.release()

    assert both >= 16 * MB
    assert 8 * MB <= mapped(tmp_path) < 9 * MB
    assert np.array_equal(array, content)
    assert np.array_equal(earlier, content)


def test_pages_that_were_written_are_left_alone(tmp_path: Path) -> None:
    np.zeros(MB, np.uint8).tofile(tmp_path / "weights")

    def load() -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        array = read_through(tmp_path / "weights")()
        array[5] = 9
        return array

    array, pages = mapped_while(tmp_path, load)
    pages.release()

    assert array[5] == 9
