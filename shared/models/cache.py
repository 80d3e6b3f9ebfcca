"""Where models are kept on this machine, who may write there, and whether there is room."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import platformdirs
from filelock import FileLock, Timeout

from shared.errors import DiskSpaceError
from shared.models.progress import ProgressListener

CACHE_DIR_VARIABLE: Final = "SOUSCHEF_CACHE_DIR"
_CHUNK_BYTES: Final = 1 << 20


class ModelCache:
    """A directory of models.

    gguf/NAME.gguf        source files, whole and checked
    gguf/NAME.parts/      wheels of a download that isn't finished
    onnx/NAME-SCHEME-bN/  models built from them by version N of the builder
    hashes/               hashes of files, by path, size and time of change, so that none is read twice
    locks/                one lock a model
    """

    def __init__(self, root: Path | None = None) -> None:
        """`root` defaults to $SOUSCHEF_CACHE_DIR, else to the user's cache directory."""
        self.root = (root or _default_root()).expanduser().absolute()

    def gguf_path(self, name: str) -> Path:
        """Where a model's source file belongs."""
        return self.root / "gguf" / f"{name}.gguf"

    def parts_path(self, name: str) -> Path:
        """Where what has been downloaded of a source file waits for the rest."""
        return self.root / "gguf" / f"{name}.parts"

    def model_path(self, name: str, scheme: str, builder_version: int) -> Path:
        """Where a built model belongs."""
        return self.root / "onnx" / f"{name}-{scheme}-b{builder_version}"

    @contextmanager
    def locked(self, name: str, progress: ProgressListener) -> Iterator[None]:
        """Holds the model's lock: of two processes that want it made, the second waits and then finds it."""
        path = self.root / "locks" / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"waiting for another process that prepares {name}", 0, 0)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def require_space(self, needed_bytes: int, purpose: str) -> None:
        """Raises `DiskSpaceError` unless so many bytes are free."""
        self.root.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(self.root).free
        if free_bytes < needed_bytes:
            raise DiskSpaceError(
                f"{purpose} needs {needed_bytes:,} bytes in {self.root}, {free_bytes:,} are free; "
                f"make room or set {CACHE_DIR_VARIABLE}"
            )

    def sha256(self, path: Path, progress: ProgressListener) -> str:
        """The file's hash: read once, then remembered until its size or its time of change differ."""
        remembered = _read_record(self._hash_record(path))
        if remembered is not None and remembered[0] == _stamp(path):
            return str(remembered[1])
        digest = _hash_file(path, progress)
        self.remember_sha256(path, digest)
        return digest

    def remember_sha256(self, path: Path, digest: str) -> None:
        """Keeps the hash of a file that has just been read whole."""
        record = self._hash_record(path)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps([_stamp(path), digest]).encode())

    def _hash_record(self, path: Path) -> Path:
        return self.root / "hashes" / f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]}.json"


def write_atomically(path: Path, content: bytes) -> None:
    """The whole content or nothing, also when the machine stops."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _default_root() -> Path:
    return Path(os.environ.get(CACHE_DIR_VARIABLE) or platformdirs.user_cache_dir("souschef", appauthor=False))


def _read_record(path: Path) -> list[object] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, list) and len(content) == 2 else None


def _stamp(path: Path) -> list[object]:
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def _hash_file(path: Path, progress: ProgressListener) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress(f"checking {path.name}", file.tell(), size)
    return digest.hexdigest()
