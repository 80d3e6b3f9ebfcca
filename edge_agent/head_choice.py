"""Which draft head a target gets: one that the settings name, or the one that is shipped for it."""

from __future__ import annotations

from pathlib import Path

from edge_agent.config import AUTO_HEAD, NO_HEAD
from shared.models.directory import open_model_directory
from shared.models.head import HeadDirectory, open_head, read_head_manifest

PACKAGED_HEADS = Path(__file__).parent / "heads"
"""A directory a head, named like the catalogue's model that it was trained for."""


def choose_head(setting: str, target: Path) -> HeadDirectory | None:
    """The head for the target built in a directory; None for no head.

    setting: `auto` for the one that is shipped, if there is one; `none`; or a head's directory.

    Raises:
        ModelFileError: the head's directory is not whole.
        TokenizerMismatchError: the named head counts in other tokens than the target.
        UnsupportedModelError: the named head was trained for another target.
    """
    if setting == NO_HEAD:
        return None
    if setting != AUTO_HEAD:
        return open_head(Path(setting).expanduser(), target=target)
    manifest = open_model_directory(target, verify=False).manifest
    path = packaged_head(manifest.source_sha256) if manifest is not None else None
    return None if path is None else open_head(path, target=target)


def packaged_head(target_sha256: str, heads: Path = PACKAGED_HEADS) -> Path | None:
    """The directory of the head that is shipped for the GGUF of this hash.

    Raises:
        ModelFileError: a shipped head's manifest can't be read.
    """
    paths = sorted(path for path in heads.glob("*") if path.is_dir())
    return next((path for path in paths if read_head_manifest(path).target_sha256 == target_sha256), None)
