"""Where models are kept, and how often a file is read to know that it is whole."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from shared.models.cache import ModelCache, write_atomically
from shared.models.progress import NullProgress


class Reads:
    """Counts how often a file was read for its hash."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, stage: str, done: float, total: float) -> None:
        self.count += done == total


def test_the_root_is_the_argument_the_variable_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOUSCHEF_CACHE_DIR", str(tmp_path / "variable"))
    assert ModelCache().root == tmp_path / "variable"
    assert ModelCache(tmp_path / "argument").root == tmp_path / "argument"
    monkeypatch.delenv("SOUSCHEF_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert ModelCache().root.name == "souschef"


def test_a_hash_is_computed_once_and_again_when_the_file_changed(tmp_path: Path) -> None:
    cache, reads, path = ModelCache(tmp_path / "cache"), Reads(), tmp_path / "m.gguf"
    path.write_bytes(b"one")
    for _ in range(2):
        assert cache.sha256(path, reads) == hashlib.sha256(b"one").hexdigest()
    assert ModelCache(tmp_path / "cache").sha256(path, reads) == hashlib.sha256(b"one").hexdigest()
    assert reads.count == 1
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert cache.sha256(path, reads) == hashlib.sha256(b"two").hexdigest()
    path.write_bytes(b"three")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert cache.sha256(path, reads) == hashlib.sha256(b"three").hexdigest()
    assert reads.count == 3


def test_a_damaged_record_is_no_hash(tmp_path: Path) -> None:
    cache, path = ModelCache(tmp_path / "cache"), tmp_path / "m.gguf"
    path.write_bytes(b"one")
    cache.sha256(path, NullProgress())
    (record,) = (tmp_path / "cache" / "hashes").iterdir()
    record.write_text("[")
    assert cache.sha256(path, NullProgress()) == hashlib.sha256(b"one").hexdigest()


def test_an_atomic_write_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    with pytest.raises(RuntimeError), cache.locked("m", NullProgress()):
        raise RuntimeError
    with cache.locked("m", lambda *_: pytest.fail("nobody holds it")):
        pass
