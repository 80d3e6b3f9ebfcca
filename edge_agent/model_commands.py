"""`edge-agent models`: the catalogue, fetching, and what is known of a model."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from edge_agent.head_choice import packaged_head
from shared.errors import ConfigError
from shared.models.build import BUILDER_VERSION, default_scheme
from shared.models.cache import ModelCache
from shared.models.catalogue import CATALOGUE, CatalogueModel, ReadyDirectory, Role, parse_reference
from shared.models.directory import open_model_directory
from shared.models.head import is_head, open_head
from shared.models.progress import RichProgress
from shared.models.pull import pull

ROLES: tuple[Role, ...] = ("target", "draft")


def print_models(cache_dir: Path | None) -> None:
    """The catalogue, and what of it is on this machine."""
    cache = ModelCache(cache_dir)
    table = Table("name", "family", "GGUF", "licence", "roles", "here")
    for model in CATALOGUE.values():
        here = [role for role in model.roles if _built_path(model, role, cache).is_dir()]
        state = f"built as {', '.join(here)}" if here else "fetched" if cache.gguf_path(model.name).exists() else "-"
        roles = ", ".join(model.roles)
        table.add_row(model.name, model.family, f"{model.size / 1e6:,.0f} MB", model.licence, roles, state)
    console = Console()
    console.print(table)
    console.print(
        f"Kept in {cache.root}. Others: file:PATH, or hf:ORG/REPO/FILE.gguf (llama, qwen2, qwen3).", soft_wrap=True
    )


def pull_with_progress(reference: str, role: str, cache_dir: Path | None) -> Path:
    """Fetch and build a model; where it is.

    Raises:
        ConfigError: the role or the reference means nothing.
        ModelError: it can't be had.
    """
    for known in ROLES:
        if role == known:
            with RichProgress() as progress:
                return pull(reference, ModelCache(cache_dir), role=known, progress=progress)
    raise ConfigError(f"role {role!r} is not known; known: {', '.join(ROLES)}")


def print_model(reference: str, cache_dir: Path | None) -> None:
    """What is known of a model.

    Raises:
        ConfigError: the reference means nothing.
        ModelFileError: a built model is not whole.
    """
    cache = ModelCache(cache_dir)
    source = parse_reference(reference)
    table = Table(show_header=False)
    directories: list[Path] = []
    if isinstance(source, CatalogueModel):
        rows = {
            "name": source.name,
            "family": source.family,
            "licence": source.licence,
            "GGUF": f"{source.size:,} bytes, sha256 {source.sha256}",
            "trained for": f"{source.context_length:,} tokens",
            "from": ", ".join(source.wheels),
        }
        for name, value in rows.items():
            table.add_row(name, value)
        directories = [_built_path(source, role, cache) for role in source.roles]
        _add_packaged_head(table, source.sha256)
    elif isinstance(source, ReadyDirectory) and is_head(source.path):
        _add_head(table, source.path)
    elif isinstance(source, ReadyDirectory):
        directories = [source.path]
    else:
        raise ConfigError(f"model {reference!r} is not built yet: `edge-agent models pull {reference}` builds it")
    for path in dict.fromkeys(directories):
        if path.is_dir():
            _add_directory(table, path)
    Console().print(table)


def _add_packaged_head(table: Table, target_sha256: str) -> None:
    path = packaged_head(target_sha256)
    if path is not None:
        table.add_section()
        _add_head(table, path)


def _add_head(table: Table, path: Path) -> None:
    manifest = open_head(path).manifest
    table.add_row("draft head", str(path))
    table.add_row("of", f"{manifest.target_name}, GGUF sha256 {manifest.target_sha256}")
    table.add_row("head's size", f"{manifest.total_bytes:,} bytes, {manifest.bits} bits, blocks of {manifest.block}")
    table.add_row("head's words", f"{manifest.num_ids:,} of {manifest.vocab_size:,} ids")


def _add_directory(table: Table, path: Path) -> None:
    directory = open_model_directory(path)
    table.add_section()
    table.add_row("directory", str(directory.path))
    table.add_row("context", f"{directory.context_length:,} tokens")
    table.add_row("weights", f"{directory.weight_bytes:,} bytes")
    if directory.manifest is not None:
        table.add_row("scheme", f"{directory.manifest.scheme}, accuracy level {directory.manifest.accuracy_level}")
        table.add_row("source", f"{directory.manifest.source_file}, sha256 {directory.manifest.source_sha256}")
        table.add_row("tokenizer", directory.manifest.tokenizer_fingerprint or "unknown")


def _built_path(model: CatalogueModel, role: Role, cache: ModelCache) -> Path:
    return cache.model_path(model.name, default_scheme(role).name, BUILDER_VERSION)
