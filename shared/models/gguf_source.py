"""Reading a GGUF file: the architecture it describes, and its tensors, one at a time.

The file stays memory-mapped: a tensor's bytes are read when they are asked for, so building a model never holds all of
it. Rows of llama-family query and key matrices are put back into the order that rotary embedding by halves expects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from shared.errors import ModelFileError, UnsupportedModelError

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")
LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LAYER_VECTORS = ("attn_norm", "ffn_norm")
QK_NORMS = ("attn_q_norm", "attn_k_norm")


@dataclass(frozen=True)
class Architecture:
    """What the decoder looks like. Sizes are counts of elements."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rms_epsilon: float
    rope_theta: float
    rope_scale: float
    context_length: int
    has_qkv_bias: bool
    has_qk_norm: bool


@dataclass(frozen=True)
class RawTensor:
    """A tensor as the file stores it: `data` is bytes [rows, bytes a row] for a quantised one, else floats."""

    name: str
    kind: str
    rows: int
    columns: int
    data: npt.NDArray[Any]

    def row_range(self, start: int, stop: int) -> RawTensor:
        """Rows start..stop, without copying."""
        part = self.data[start:stop]
        return RawTensor(self.name, self.kind, len(part), self.columns, part)

    def to_float(self) -> FloatArray:
        """Float32 values, [rows, columns]."""
        values = dequantize(self.data, gguf.GGMLQuantizationType[self.kind])
        return np.ascontiguousarray(values, dtype=np.float32).reshape(self.rows, self.columns)

    def chunks(self, elements: int) -> Iterator[RawTensor]:
        """The tensor in runs of whole rows, each of about `elements` values."""
        step = max(1, elements // self.columns)
        for start in range(0, self.rows, step):
            yield self.row_range(start, start + step)

    def scaled(self, factors: FloatArray) -> RawTensor:
        """The tensor with each column multiplied by its factor; itself where all are one."""
        if (factors == 1).all():
            return self
        return ScaledTensor(self.name, "scaled", self.rows, self.columns, self.data, self, factors)


@dataclass(frozen=True)
class ScaledTensor(RawTensor):
    """A tensor whose columns are multiplied by factors when its values are asked for."""

    source: RawTensor
    factors: FloatArray

    def row_range(self, start: int, stop: int) -> RawTensor:
        """Rows start..stop, without copying."""
        return self.source.row_range(start, stop).scaled(self.factors)

    def to_float(self) -> FloatArray:
        """Float32 values, [rows, columns]."""
        return self.source.to_float() * self.factors


class GgufSource:
    """One GGUF file, opened and checked: it is of a family we know and has every tensor, and none that we'd ignore.

    Raises ModelFileError when the file can't be read as GGUF or lacks a tensor, UnsupportedModelError when it describes
    something that this builder doesn't do; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except FileNotFoundError as error:
            raise ModelFileError(f"{path} does not exist") from error
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise ModelFileError(f"{path} is not a complete GGUF file: {error}") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self._read_architecture()
        self._check_tensors()

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default` when the file has no such key."""
        found = self._fields.get(key)
        return default if found is None else found.contents()

    @property
    def name(self) -> str:
        return str(self.field("general.name", self.path.stem))

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors, the vocabulary counted once."""
        return sum(int(t.n_elements) for name, t in self._tensors.items() if name != "output.weight")

    def has(self, name: str) -> bool:
        return name in self._tensors

    def raw(self, name: str) -> RawTensor:
        """The tensor's stored form, [rows, columns]; vectors have one row."""
        tensor = self._tensors[name]
        shape = [int(size) for size in reversed(tensor.shape)]
        columns = shape[-1]
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        raw = RawTensor(name, tensor.tensor_type.name, rows, columns, tensor.data.reshape(rows, -1))
        heads = self._interleaved_heads(name)
        return raw if heads is None else _deinterleave_rows(raw, heads)

    def vector(self, name: str) -> FloatArray:
        """A norm's weights or a bias, [size]."""
        return self.raw(name).to_float().reshape(-1)

    def rope_frequencies(self) -> npt.NDArray[np.float64]:
        """Radians a position for each rotated pair, [head_size / 2], with the file's scaling applied.

        `rope_freqs.weight` holds llama 3's factors, by which llama.cpp divides each frequency.
        """
        a = self.architecture
        exponents = np.arange(0, a.head_size, 2, dtype=np.float64) / a.head_size
        frequencies = a.rope_theta**-exponents / a.rope_scale
        if self.has("rope_freqs.weight"):
            frequencies = frequencies / self.vector("rope_freqs.weight").astype(np.float64)
        return np.asarray(frequencies, dtype=np.float64)

    def sha256(self) -> str:
        """Hex digest of the whole file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _read_architecture(self) -> Architecture:
        name = str(self.field("general.architecture", "unnamed"))
        if name not in SUPPORTED_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.path}: architecture {name!r} is not supported; these are: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        hidden, heads = (
            int(self._required(f"{name}.embedding_length")),
            int(self._required(f"{name}.attention.head_count")),
        )
        head_size = int(self.field(f"{name}.attention.key_length", hidden // heads))
        self._refuse_what_we_cannot_compute(name, head_size)
        return Architecture(
            name=name,
            num_layers=int(self._required(f"{name}.block_count")),
            hidden_size=hidden,
            ffn_size=int(self._required(f"{name}.feed_forward_length")),
            num_heads=heads,
            num_kv_heads=int(self.field(f"{name}.attention.head_count_kv", heads)),
            head_size=head_size,
            vocab_size=self.raw_rows("token_embd.weight"),
            rms_epsilon=float(self._required(f"{name}.attention.layer_norm_rms_epsilon")),
            rope_theta=float(self.field(f"{name}.rope.freq_base", 10000.0)),
            rope_scale=float(self.field(f"{name}.rope.scaling.factor", 1.0)),
            context_length=int(self._required(f"{name}.context_length")),
            has_qkv_bias=self.has("blk.0.attn_q.bias"),
            has_qk_norm=self.has("blk.0.attn_q_norm.weight"),
        )

    def raw_rows(self, name: str) -> int:
        """How many rows the tensor has."""
        if name not in self._tensors:
            raise ModelFileError(f"{self.path} has no tensor {name}")
        return int(self._tensors[name].shape[-1])

    def _required(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise ModelFileError(f"{self.path} has no metadata key {key}")
        return value

    def _refuse_what_we_cannot_compute(self, name: str, head_size: int) -> None:
        scaling = str(self.field(f"{name}.rope.scaling.type", "none"))
        if scaling not in ("none", "linear"):
            raise UnsupportedModelError(f"{self.path}: rope scaling {scaling!r} is not supported")
        rotated = int(self.field(f"{name}.rope.dimension_count", head_size))
        if rotated != head_size:
            raise UnsupportedModelError(f"{self.path}: rotary embedding of {rotated} of {head_size} dimensions")
        if int(self.field(f"{name}.attention.value_length", head_size)) != head_size:
            raise UnsupportedModelError(f"{self.path}: values and keys of different sizes")
        if int(self.field(f"{name}.expert_count", 0)) > 0:
            raise UnsupportedModelError(f"{self.path}: mixtures of experts are not supported")
        if int(self.field(f"{name}.attention.sliding_window", 0)) > 0:
            raise UnsupportedModelError(f"{self.path}: sliding-window attention is not supported")

    def _check_tensors(self) -> None:
        expected = self._expected_tensors()
        for name in expected:
            if name not in self._tensors:
                raise ModelFileError(f"{self.path} has no tensor {name}")
        for name in self._tensors:
            if name not in expected and name not in ("output.weight", "rope_freqs.weight"):
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} has no place in a {self.architecture.name} decoder"
                )

    def _expected_tensors(self) -> set[str]:
        a = self.architecture
        parts = [f"{part}.weight" for part in (*LAYER_MATRICES, *LAYER_VECTORS, *(QK_NORMS if a.has_qk_norm else ()))]
        if a.has_qkv_bias:
            parts += [f"attn_{part}.bias" for part in "qkv"]
        layers = {f"blk.{layer}.{part}" for layer in range(a.num_layers) for part in parts}
        return layers | {"token_embd.weight", "output_norm.weight"}

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads' rows of this tensor are stored for rotation of neighbours, None when they are not."""
        if self.architecture.name != "llama":
            return None
        if ".attn_q." in name:
            return self.architecture.num_heads
        return self.architecture.num_kv_heads if ".attn_k." in name else None


def _deinterleave_rows(raw: RawTensor, heads: int) -> RawTensor:
    """Undo llama.cpp's row permutation: rows (0, 1), (2, 3)… of a head are halves' pairs (0, half), (1, half + 1)…"""
    if raw.rows == 1:  # a bias: its elements are the rows
        values = raw.data.reshape(heads, -1, 2).swapaxes(1, 2).reshape(1, -1)
    else:
        values = raw.data.reshape(heads, -1, 2, raw.data.shape[-1]).swapaxes(1, 2).reshape(raw.rows, -1)
    return RawTensor(raw.name, raw.kind, raw.rows, raw.columns, values)
