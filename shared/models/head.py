"""A draft head's directory: writing one out of trained weights, and opening one for its target.

Files: manifest.json, model.onnx and model.onnx.data (`shared/models/head_graph.py`), vocabulary.npy: int32, the
target's id of each row of logits, ascending.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.errors import ModelFileError, TokenizerMismatchError, UnsupportedModelError
from shared.models.blocks import DATA_FILE, ROTARY_COSINES, ROTARY_SINES, ExternalData, LayerWeights, RotaryTables
from shared.models.directory import (
    MANIFEST_FILE,
    MODEL_FILE,
    FileRecord,
    Manifest,
    check_files,
    file_record,
    open_model_directory,
)
from shared.models.gguf_source import FloatArray
from shared.models.head_graph import HeadGraph
from shared.models.quantise import Precision, QuantisedMatrix, quantise
from shared.models.stored_graph import StoredGraph
from shared.models.whole_directory import whole_directory

VOCABULARY_FILE = "vocabulary.npy"
HEAD_BUILDER_VERSION = 1
HEAD_PRECISION = Precision(4, 32, False)
"""Blocks of 128 make a step a fifth quicker and cost about as much in acceptance (docs/head.md)."""


@dataclass(frozen=True)
class HeadSpec:
    """Whose a head is, its sizes and its rotary tables.

    feature_size: numbers in the target's hidden states and embeddings. hidden_size: in the head's own. A moved head was
    first made for another model: its features are like that one's, and may have another size.
    """

    target_name: str
    target_sha256: str
    tokenizer_fingerprint: str | None
    feature_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rms_epsilon: float
    rotary: RotaryTables
    is_moved: bool = False

    @staticmethod
    def of_target(directory: Path) -> HeadSpec:
        """The spec of a head of the sizes of the target built in `directory`.

        Raises:
            ModelFileError: the directory is not whole.
            UnsupportedModelError: another maker built it: nothing tells which weights it was built from.
        """
        manifest = _target_manifest(directory)
        graph = StoredGraph(directory / MODEL_FILE)
        architecture = manifest.architecture
        return HeadSpec(
            target_name=manifest.source_name,
            target_sha256=manifest.source_sha256,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            feature_size=architecture.hidden_size,
            hidden_size=architecture.hidden_size,
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_size=architecture.head_size,
            vocab_size=architecture.vocab_size,
            rms_epsilon=float(graph.attribute("output_norm", "epsilon")),
            rotary=RotaryTables(graph.array(ROTARY_COSINES), graph.array(ROTARY_SINES)),
        )

    @staticmethod
    def of_head(head: HeadDirectory, target: Path) -> HeadSpec:
        """The spec of a head of this one's sizes for the target built in `target`, whatever it was made for.

        Raises:
            ModelFileError, UnsupportedModelError: see `of_target`.
            TokenizerMismatchError: the target counts in other tokens.
        """
        manifest, spec = head.manifest, HeadSpec.of_target(target)
        manifest.require_tokens(spec.tokenizer_fingerprint, spec.target_name, head.path)
        graph = StoredGraph(head.model_path)
        return replace(
            spec,
            hidden_size=manifest.hidden_size,
            num_heads=manifest.num_heads,
            num_kv_heads=manifest.num_kv_heads,
            head_size=manifest.head_size,
            rms_epsilon=float(graph.attribute("output_norm", "epsilon")),
            rotary=RotaryTables(graph.array(ROTARY_COSINES), graph.array(ROTARY_SINES)),
            is_moved=manifest.is_moved or manifest.target_sha256 != spec.target_sha256,
        )


@dataclass(frozen=True)
class HeadWeights:
    """A head's trained weights, float32; matrices [rows, columns], y = x @ W.T as in torch.nn.Linear, no biases.

    T: the target's hidden size; H: the head's; Q: heads * head size; K: key heads * head size; F: the feed-forward's
    width; V: ids kept.
    """

    embedding_norm: FloatArray  # [T]
    feature_norm: FloatArray  # [T]
    fusion: FloatArray  # [H, 2 T], the embedding's columns first
    attention_norm: FloatArray  # [H]
    query: FloatArray  # [Q, H]
    key: FloatArray  # [K, H]
    value: FloatArray  # [K, H]
    attention_output: FloatArray  # [H, Q]
    ffn_norm: FloatArray  # [H]
    gate: FloatArray  # [F, H]
    up: FloatArray  # [F, H]
    ffn_down: FloatArray  # [H, F]
    output_norm: FloatArray  # [H]
    lm_head: FloatArray  # [V, H]
    vocabulary: npt.NDArray[np.int32]  # [V], ascending: the target's id of each row of lm_head
    expansion: FloatArray | None = None  # [T, H], of a moved head: what it says of the next feature, as the target's

    @staticmethod
    def shapes(spec: HeadSpec, ffn_size: int, num_ids: int) -> dict[str, tuple[int, ...]]:
        """The shape of each array of a head of this spec."""
        hidden, queries = spec.hidden_size, spec.num_heads * spec.head_size
        keys = spec.num_kv_heads * spec.head_size
        return {
            **dict.fromkeys(("embedding_norm", "feature_norm"), (spec.feature_size,)),
            **dict.fromkeys(("attention_norm", "ffn_norm", "output_norm"), (hidden,)),
            "fusion": (hidden, 2 * spec.feature_size),
            "query": (queries, hidden),
            "key": (keys, hidden),
            "value": (keys, hidden),
            "attention_output": (hidden, queries),
            "gate": (ffn_size, hidden),
            "up": (ffn_size, hidden),
            "ffn_down": (hidden, ffn_size),
            "lm_head": (num_ids, hidden),
            "vocabulary": (num_ids,),
            **({"expansion": (spec.feature_size, hidden)} if spec.is_moved else {}),
        }

    def check(self, spec: HeadSpec) -> None:
        """Raises ValueError naming the array that doesn't fit the spec."""
        expected = self.shapes(spec, len(self.gate), len(self.vocabulary))
        for name, array in self.arrays().items():
            if array.shape != expected.get(name):
                raise ValueError(f"{name} has shape {array.shape} instead of {expected.get(name, 'none')}")
        if spec.is_moved and self.expansion is None:
            raise ValueError("expansion is missing: a moved head needs it")
        ids = self.vocabulary
        if not len(ids) or ids[0] < 0 or ids[-1] >= spec.vocab_size or (np.diff(ids) <= 0).any():
            raise ValueError(f"vocabulary must be ascending ids under {spec.vocab_size}")

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All that there are, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in found.items() if array is not None}


class HeadManifest(BaseModel):
    """What a head is made of, and whose it is."""

    model_config = ConfigDict(frozen=True)

    role: Literal["head"] = "head"
    builder_version: int = HEAD_BUILDER_VERSION
    target_name: str
    target_sha256: str = Field(description="of the GGUF that the target was built from")
    tokenizer_fingerprint: str | None
    feature_size: int = Field(description="numbers in the target's hidden states")
    hidden_size: int = Field(description="numbers in the head's own")
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    is_moved: bool = Field(False, description="whether it was first made for another model")
    num_ids: int = Field(description="size of the trimmed vocabulary")
    vocab_size: int
    context_length: int
    bits: int
    block: int
    accuracy_level: int
    files: dict[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files the manifest names."""
        return sum(record.bytes for record in self.files.values())

    def require_target(self, target: Manifest, path: Path) -> None:
        """Raises TokenizerMismatchError or UnsupportedModelError unless this head was trained for this target."""
        self.require_tokens(target.tokenizer_fingerprint, target.source_name, path)
        if self.target_sha256 != target.source_sha256:
            raise UnsupportedModelError(
                f"the head in {path} was trained for {self.target_name} (GGUF {self.target_sha256[:12]}), the target "
                f"was built from {target.source_file} ({target.source_sha256[:12]}): train one with "
                "`edge-agent distill`, or set head to none"
            )
        if self.feature_size != target.architecture.hidden_size:
            raise UnsupportedModelError(
                f"the head in {path} takes hidden states of {self.feature_size} numbers, the target's have "
                f"{target.architecture.hidden_size}"
            )

    def require_tokens(self, fingerprint: str | None, target_name: str, path: Path) -> None:
        """Raises TokenizerMismatchError unless this head counts in the tokens of this target."""
        if self.tokenizer_fingerprint != fingerprint:
            raise TokenizerMismatchError(
                f"the head in {path} counts in the tokens of {self.target_name}, which differ from those of "
                f"{target_name}"
            )

    @model_validator(mode="before")
    @classmethod
    def _as_wide_as_its_target(cls, values: object) -> object:
        """Heads of the first builds don't name their target's size: it is their own."""
        return {"feature_size": values.get("hidden_size"), **values} if isinstance(values, dict) else values


@dataclass(frozen=True)
class HeadDirectory:
    """A head's directory that was found whole."""

    path: Path
    manifest: HeadManifest
    vocabulary: npt.NDArray[np.int32]

    @property
    def model_path(self) -> Path:
        """The ONNX graph."""
        return self.path / MODEL_FILE


def write_head(
    directory: Path,
    weights: HeadWeights,
    spec: HeadSpec,
    *,
    precision: Precision = HEAD_PRECISION,
    accuracy_level: int = 4,
) -> HeadManifest:
    """Quantise the matrices and write the directory; it appears, or is replaced, only when it is complete.

    Raises:
        ValueError: the weights don't fit the target.
    """
    weights.check(spec)
    with whole_directory(directory) as working:
        np.save(working / VOCABULARY_FILE, weights.vocabulary.astype(np.int32))
        data = ExternalData(working / DATA_FILE)
        try:
            onnx.save_model(_graph(data, weights, spec, precision, accuracy_level), working / MODEL_FILE)
        finally:
            data.close()
        manifest = HeadManifest(
            target_name=spec.target_name,
            target_sha256=spec.target_sha256,
            tokenizer_fingerprint=spec.tokenizer_fingerprint,
            feature_size=spec.feature_size,
            hidden_size=spec.hidden_size,
            ffn_size=len(weights.gate),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            is_moved=spec.is_moved,
            num_ids=len(weights.vocabulary),
            vocab_size=spec.vocab_size,
            context_length=len(spec.rotary.cosines),
            bits=precision.bits,
            block=precision.block,
            accuracy_level=accuracy_level,
            files={path.name: file_record(path) for path in sorted(working.iterdir())},
        )
        (working / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2))
    return manifest


def open_head(directory: Path, *, target: Path | None = None) -> HeadDirectory:
    """Read a head's directory, check that it is whole and, with a target's directory, that it belongs to it.

    Raises:
        ModelFileError: a file is missing, truncated, altered or no manifest of a head.
        TokenizerMismatchError: the target counts in other tokens.
        UnsupportedModelError: the head was trained for another model than the target.
    """
    manifest = read_head_manifest(directory)
    check_files(directory, manifest.files)
    if target is not None:
        manifest.require_target(_target_manifest(target), directory)
    return HeadDirectory(directory, manifest, np.load(directory / VOCABULARY_FILE, allow_pickle=False))


def read_head_weights(head: HeadDirectory) -> HeadWeights:
    """The weights of a head on disk, as they are stored: what `write_head` wrote, rounded.

    Raises:
        UnsupportedModelError: the graph isn't one that `write_head` writes.
    """
    graph, manifest = StoredGraph(head.model_path), head.manifest
    query, key = manifest.num_heads * manifest.head_size, manifest.num_kv_heads * manifest.head_size
    queries, keys, values = np.split(graph.matrix("layers.0.qkv"), [query, query + key])
    gate, up = np.split(graph.matrix("layers.0.gate_up"), 2)

    def vector(name: str) -> FloatArray:
        return np.array(graph.array(f"{name}.weight"), np.float32)

    return HeadWeights(
        embedding_norm=vector("embedding_norm"),
        feature_norm=vector("feature_norm"),
        fusion=graph.matrix("fusion"),
        attention_norm=vector("layers.0.attention_norm"),
        query=queries,
        key=keys,
        value=values,
        attention_output=graph.matrix("layers.0.attention_output"),
        ffn_norm=vector("layers.0.ffn_norm"),
        gate=gate,
        up=up,
        ffn_down=graph.matrix("layers.0.ffn_down"),
        output_norm=vector("output_norm"),
        lm_head=graph.matrix("lm_head"),
        vocabulary=head.vocabulary,
        expansion=graph.matrix("expansion") if manifest.is_moved else None,
    )


def is_head(directory: Path) -> bool:
    """Whether the directory says that it holds a draft head."""
    try:
        return bool(json.loads((directory / MANIFEST_FILE).read_bytes()).get("role") == "head")
    except (OSError, ValueError, AttributeError):
        return False


def read_head_manifest(directory: Path) -> HeadManifest:
    """What the directory says of its head, unchecked.

    Raises:
        ModelFileError: there is no manifest of a head.
    """
    file = directory / MANIFEST_FILE
    try:
        return HeadManifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ModelFileError(
            f"{directory} holds no draft head: {file.name} can't be read ({error.strerror})"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelFileError(f"{file} is not a draft head's manifest: {where}: {first['msg']}") from error


def _target_manifest(directory: Path) -> Manifest:
    manifest = open_model_directory(directory).manifest
    if manifest is None:
        raise UnsupportedModelError(f"{directory} has no manifest: a head needs a target that Souschef built")
    return manifest


def _graph(
    data: ExternalData, weights: HeadWeights, spec: HeadSpec, precision: Precision, accuracy_level: int
) -> onnx.ModelProto:
    def matrix(*parts: FloatArray) -> QuantisedMatrix:
        stacked = np.concatenate(parts).astype(np.float32)
        return quantise(stacked, precision.fitted(stacked.shape[1]))

    def vector(values: FloatArray) -> FloatArray:
        return values.astype(np.float32)

    graph = HeadGraph(spec, data, accuracy_level)
    graph.add_lengths()
    graph.add_rotary(spec.rotary)
    graph.add_fusion(vector(weights.embedding_norm), vector(weights.feature_norm), matrix(weights.fusion))
    graph.add_layer(
        LayerWeights(
            attention_norm=vector(weights.attention_norm),
            qkv=matrix(weights.query, weights.key, weights.value),
            qkv_bias=None,
            query_norm=None,
            key_norm=None,
            attention_output=matrix(weights.attention_output),
            ffn_norm=vector(weights.ffn_norm),
            gate_up=matrix(weights.gate, weights.up),
            ffn_down=matrix(weights.ffn_down),
        )
    )
    expansion = None if weights.expansion is None else matrix(weights.expansion)
    return graph.finish(vector(weights.output_norm), matrix(weights.lm_head), expansion)
