"""Writing a directory all or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to write to; `directory` appears, or is replaced, only when the block ends well.

    Everything is written beside it, flushed and renamed. An interrupted block leaves nothing under the directory's
    name, and the next one sweeps up. Of two processes the second waits for the first.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.parent / f".{directory.name}.lock"):
        working = directory.parent / f".{directory.name}.building"
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir()
        try:
            yield working
            _flush(working)
            _put_in_place(working, directory)
        finally:
            shutil.rmtree(working, ignore_errors=True)


def _flush(working: Path) -> None:
    """Force every file, then the directory's entries, to the disk."""
    for path in [*working.iterdir(), working]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(working: Path, directory: Path) -> None:
    """Rename the finished directory; an older one steps aside first and is removed after."""
    former = directory.parent / f".{directory.name}.former"
    shutil.rmtree(former, ignore_errors=True)
    if directory.exists():
        directory.rename(former)
    working.rename(directory)
    shutil.rmtree(former, ignore_errors=True)
