"""Fetching a GGUF from the Hugging Face hub, or from a mirror that $HF_ENDPOINT names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.utils.tqdm import tqdm as HubBar

from shared.errors import DownloadError
from shared.models.cache import ModelCache
from shared.models.catalogue import HubFile
from shared.models.progress import ProgressListener


def download_from_hub(source: HubFile, directory: Path, cache: ModelCache, progress: ProgressListener) -> Path:
    """The file below `directory`; one that is there is taken as it is, an unfinished one is gone on with.

    Raises `DownloadError` when the hub can't be reached or has no such file, `DiskSpaceError` before it would not fit.
    """
    path = directory / source.file
    if path.is_file():
        return path
    endpoint = os.environ.get("HF_ENDPOINT")
    stage = f"downloading {source.repository}/{source.file}"
    progress(stage, 0, 0)
    try:
        url = huggingface_hub.hf_hub_url(source.repository, source.file, endpoint=endpoint)
        size = huggingface_hub.get_hf_file_metadata(url, endpoint=endpoint).size or 0
    except Exception as error:  # The hub's client raises its transport library's errors as they are.
        raise _error(source, error) from error
    cache.require_space(size, f"the download of {source.file}")
    try:
        return Path(
            huggingface_hub.hf_hub_download(  # nosec B615 (the caller names the file; what comes is known by its sha256)
                source.repository,
                source.file,
                local_dir=directory,
                endpoint=endpoint,
                tqdm_class=_reporting_to(progress, stage),
            )
        )
    except Exception as error:
        raise _error(source, error) from error


def _error(source: HubFile, error: Exception) -> DownloadError:
    reason = str(error).strip().splitlines()
    return DownloadError(
        f"hf:{source.repository}/{source.file} could not be downloaded: {reason[0] if reason else type(error).__name__}"
    )


def _reporting_to(progress: ProgressListener, stage: str) -> type[Any]:
    """A bar for the hub's client that draws nothing and passes on what it is told."""

    class Reporter(HubBar):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self._num_bytes = options.get("initial") or 0
            self._num_expected = options.get("total") or 0

        def update(self, n: float | None = 1) -> None:
            self._num_bytes += n or 0
            progress(stage, self._num_bytes, self._num_expected)

    return Reporter
