"""A model's directory, in ONNX Runtime GenAI's layout: what is in it, and whether it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ModelFileError, UnsupportedModelError
from shared.models.gguf_source import Architecture

MANIFEST_FILE = "manifest.json"
CONFIG_FILE = "genai_config.json"
MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"
CHECKED_FILE = ".checked.json"  # sizes and times of the files when their hashes were last found right


class FileRecord(BaseModel):
    """What a file of the directory must be."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str


class PrecisionRecord(BaseModel):
    """How the matrices of one class are stored."""

    model_config = ConfigDict(frozen=True)

    bits: int
    block: int
    symmetric: bool
    matrices: int = Field(description="how many matrices are stored so")


class ArchitectureRecord(BaseModel):
    """The decoder's dimensions."""

    model_config = ConfigDict(frozen=True)

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int


class Manifest(BaseModel):
    """What a built model is made of and from."""

    model_config = ConfigDict(frozen=True)

    builder_version: int
    source_name: str
    source_file: str
    source_sha256: str
    source_bytes: int
    scheme: str
    accuracy_level: int
    precisions: dict[str, list[PrecisionRecord]]
    architecture: ArchitectureRecord
    context_length: int
    tokenizer_fingerprint: str | None
    files: dict[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files the manifest names."""
        return sum(record.bytes for record in self.files.values())


@dataclass(frozen=True)
class ModelDirectory:
    """A directory that was found whole. `manifest` is None when somebody else made it."""

    path: Path
    config: dict[str, Any]
    manifest: Manifest | None

    @property
    def model_path(self) -> Path:
        """The ONNX graph, with symbolic links resolved (a hub's cache keeps its weights beside the real file)."""
        return _member(self.path, str(self.config["model"]["decoder"]["filename"]))

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_FILE

    @property
    def context_length(self) -> int:
        """The longest sequence in tokens."""
        return int(self.config["model"]["context_length"])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the graph and its weights on disk."""
        return sum(path.stat().st_size for path in [self.model_path, *_external_files(self.path, self.model_path)])


def genai_config(
    architecture: Architecture, context_length: int, bos: int | None, eos: list[int], pad: int | None
) -> dict[str, Any]:
    """The `genai_config.json` of a decoder of ours."""
    a = architecture
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": MODEL_FILE,
        "head_size": a.head_size,
        "hidden_size": a.hidden_size,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": a.num_heads,
        "num_hidden_layers": a.num_layers,
        "num_key_value_heads": a.num_kv_heads,
    }
    model: dict[str, Any] = {
        "context_length": context_length,
        "decoder": decoder,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": pad if pad is not None else eos[0],
        "type": a.name,
        "vocab_size": a.vocab_size,
    }
    if bos is not None:
        model["bos_token_id"] = bos
    search = {"do_sample": False, "max_length": context_length, "past_present_share_buffer": False, "top_k": 1}
    return {"model": model, "search": search}


def open_model_directory(path: Path, *, verify: bool = True) -> ModelDirectory:
    """Read a model's directory and check that it is whole.

    With a manifest every file must exist with its size; its sha256 is checked when `verify` and it wasn't found right
    before with the same size and time of change. Without one (a directory made by others) the graph, the tokenizer and
    the weights that the graph names must exist.

    Raises ModelFileError naming the file that is missing, truncated, altered or outside the directory, and
    UnsupportedModelError for a layout that isn't ONNX Runtime GenAI's.
    """
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a directory")
    manifest = _read_manifest(path)
    config = _read_config(path)
    directory = ModelDirectory(path, config, manifest)
    _require_file(path / TOKENIZER_FILE)
    _require_file(directory.model_path)
    if manifest is None:
        for file in _external_files(path, directory.model_path):
            _require_file(file)
        return directory
    _check_sizes(path, manifest.files)
    if verify:
        _check_hashes(path, manifest.files)
    return directory


def check_files(path: Path, files: Mapping[str, FileRecord]) -> None:
    """Hash every file of a directory that remembers nothing (it may be part of an installed package).

    Raises ModelFileError naming the file that is missing, truncated, altered or outside the directory.
    """
    _check_sizes(path, files)
    for name, record in files.items():
        _check_hash(_member(path, name), record)


def file_record(path: Path) -> FileRecord:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(bytes=path.stat().st_size, sha256=digest)


def _read_manifest(path: Path) -> Manifest | None:
    file = path / MANIFEST_FILE
    if not file.exists():
        return None
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ModelFileError(f"{file} is not a manifest of this version: {error.errors()[0]['msg']}") from error


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    _require_file(file)
    try:
        config = json.loads(file.read_bytes())
        filename = config["model"]["decoder"]["filename"]
        int(config["model"]["context_length"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModelError(f"{file} does not describe a decoder: {error!r}") from error
    _member(path, str(filename))
    return dict(config)


def _member(directory: Path, name: str) -> Path:
    """The file `name` of the directory. A link may lead elsewhere (a hub's cache), the name itself may not."""
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelFileError(f"{directory}: file name {name!r} leads outside the directory")
    return directory / relative


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ModelFileError(f"{path} is missing")


def _external_files(directory: Path, model_path: Path) -> list[Path]:
    """The weights' files that the graph refers to."""
    model = ModelProto()
    try:
        model.ParseFromString(model_path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no public name of its own across its implementations
        raise ModelFileError(f"{model_path} is not an ONNX graph: {error}") from error
    names = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return [_member(directory, name) for name in sorted(names)]


def _check_sizes(path: Path, files: Mapping[str, FileRecord]) -> None:
    for name, record in files.items():
        file = _member(path, name)
        _require_file(file)
        size = file.stat().st_size
        if size != record.bytes:
            raise ModelFileError(f"{file} has {size} bytes instead of {record.bytes}: truncated or altered")


def _check_hash(file: Path, record: FileRecord) -> None:
    if file_record(file).sha256 != record.sha256:
        raise ModelFileError(f"{file} is altered: its sha256 is not the manifest's")


def _check_hashes(path: Path, files: Mapping[str, FileRecord]) -> None:
    """Hash the files that aren't known to be right, and remember those that are."""
    known = _read_checked(path)
    found: dict[str, list[int]] = {}
    for name, record in files.items():
        file = _member(path, name)
        stamp = [file.stat().st_size, file.stat().st_mtime_ns]
        if known.get(name) != stamp:
            _check_hash(file, record)
        found[name] = stamp
    if found != known:
        _write_checked(path, found)


def _read_checked(path: Path) -> dict[str, Any]:
    try:
        read = json.loads((path / CHECKED_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _write_checked(path: Path, found: dict[str, list[int]]) -> None:
    """A directory that can't be written to is simply hashed at each start."""
    try:
        (path / CHECKED_FILE).write_text(json.dumps(found))
    except OSError:
        return
