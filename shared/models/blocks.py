"""What our ONNX graphs are made of: weights in a file beside the graph, and the parts of a decoder layer.

Kernels are those of ONNX Runtime's CPU provider. A layer's cache is past_key_values.N.key and .value, float32
[B, kv_heads, P, head_size], where P is the length of the past, or of the whole buffer when past and present are bound
to the same memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from shared.models.gguf_source import FloatArray
from shared.models.quantise import QuantisedMatrix

DATA_FILE = "model.onnx.data"
MICROSOFT = "com.microsoft"
OPSET, IR_VERSION = 21, 10
INLINE_BYTES = 1024
PAGE = 4096
ROTARY_COSINES, ROTARY_SINES = "rotary.cos", "rotary.sin"


class ExternalData:
    """Appends arrays to the weights' file, each on a page of its own so that it can be memory-mapped alone."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._location = path.name

    def add(self, name: str, array: npt.NDArray[np.generic]) -> TensorProto:
        """Write the array and return the initializer that refers to it."""
        array = np.ascontiguousarray(array)
        if array.nbytes <= INLINE_BYTES:
            return numpy_helper.from_array(array, name)
        offset = -(-self._file.tell() // PAGE) * PAGE
        self._file.write(b"\0" * (offset - self._file.tell()))
        self._file.write(array.data)
        return self._reference(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, offset, array.nbytes)

    def alias(self, name: str, tensor: TensorProto, shape: tuple[int, ...]) -> TensorProto:
        """A second initializer over the first values of `tensor`, in another shape."""
        count = math.prod(shape)
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.from_array(numpy_helper.to_array(tensor).reshape(-1)[:count].reshape(shape), name)
        entries = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
        length = count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        return self._reference(name, tensor.data_type, shape, entries["offset"], length)

    def close(self) -> None:
        self._file.close()

    def _reference(self, name: str, kind: int, shape: tuple[int, ...], offset: int, length: int) -> TensorProto:
        tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self._location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


@dataclass(frozen=True)
class RotaryTables:
    """Cosines and sines of each position's angles, float32 [context_length, head_size / 2]."""

    cosines: FloatArray
    sines: FloatArray

    @staticmethod
    def of(frequencies: npt.NDArray[np.float64], context_length: int) -> RotaryTables:
        """Tables for positions 0 to context_length - 1; frequencies in radians a position, [head_size / 2]."""
        angles = np.outer(np.arange(context_length, dtype=np.float64), frequencies)
        return RotaryTables(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are quantised, [rows, columns]; vectors float32."""

    attention_norm: FloatArray
    qkv: QuantisedMatrix  # query rows, then key rows, then value rows
    qkv_bias: FloatArray | None
    query_norm: FloatArray | None
    key_norm: FloatArray | None
    attention_output: QuantisedMatrix
    ffn_norm: FloatArray
    gate_up: QuantisedMatrix  # gate rows, then up rows
    ffn_down: QuantisedMatrix


class LayerSizes(Protocol):
    """What of an architecture a layer's nodes need. Sizes are counts of elements."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def rms_epsilon(self) -> float: ...


class GraphBlocks:
    """Collects nodes and initializers in the order of computation.

    A graph sets `_residual`, the stream that the layers add to, then calls `add_layer` for each.
    """

    def __init__(self, sizes: LayerSizes, data: ExternalData, accuracy_level: int) -> None:
        self._sizes = sizes
        self._data = data
        self._accuracy_level = accuracy_level
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._residual = ""
        self._branch = ""  # what the last sublayer adds to the residual
        self._num_layers = 0

    def add_rotary(self, rotary: RotaryTables) -> None:
        """What the attention turns queries and keys by."""
        self._constant(ROTARY_COSINES, rotary.cosines)
        self._constant(ROTARY_SINES, rotary.sines)

    def add_lengths(self) -> None:
        """From the mask: the index of each sequence's last token, int32 [B], and the longest length, int32 scalar."""
        self._constant("axis.one", np.array([1], np.int64))
        self._constant("index.one", np.array(1, np.int64))
        self._constant("one", np.array([1], np.int64))
        counted = self._node("ReduceSum", ["attention_mask", "axis.one"], "mask.count", keepdims=0)
        last = self._node("Sub", [counted, "one"], "mask.last")
        self._node("Cast", [last], "sequence_lengths", to=TensorProto.INT32)
        shape = self._node("Shape", ["attention_mask"], "mask.shape")
        total = self._node("Gather", [shape, "index.one"], "mask.total", axis=0)
        self._node("Cast", [total], "total_length", to=TensorProto.INT32)

    def add_layer(self, weights: LayerWeights) -> None:
        layer = f"layers.{self._num_layers}"
        normed = self._norm(f"{layer}.attention_norm", weights.attention_norm)
        self._branch = self._attention(layer, weights, normed)
        normed = self._norm(f"{layer}.ffn_norm", weights.ffn_norm)
        self._branch = self._feed_forward(layer, weights, normed)
        self._num_layers += 1

    def _wanted(self, hidden: str) -> str:
        """The positions whose logits are asked for."""
        self._constant("logits_from", np.array([0], np.int64))
        self._constant("slice.end", np.array([np.iinfo(np.int64).max], np.int64))
        return self._node("Slice", [hidden, "logits_from", "slice.end", "axis.one"], "wanted_states")

    def _model(
        self, name: str, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        """The whole model, the caches beside these inputs and outputs."""
        inputs = [
            *inputs,
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
            *self._caches("past_key_values", "past_sequence_length"),
            helper.make_tensor_value_info("logits_from", TensorProto.INT64, [1]),
        ]
        outputs = [*outputs, *self._caches("present", "total_sequence_length_or_buffer")]
        graph = helper.make_graph(self._nodes, name, inputs, outputs, self._initializers)
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="souschef")

    def _attention(self, layer: str, weights: LayerWeights, normed: str) -> str:
        qkv = self._product(f"{layer}.qkv", normed, weights.qkv, bias=weights.qkv_bias)
        if weights.query_norm is not None and weights.key_norm is not None:
            queries = self._normed_heads(layer, qkv, weights.query_norm, weights.key_norm)
        else:
            queries = [qkv, "", ""]
        number = self._num_layers
        names = [f"{number}.key", f"{number}.value"]
        inputs = [*queries, *(f"past_key_values.{name}" for name in names)]
        inputs += ["sequence_lengths", "total_length", ROTARY_COSINES, ROTARY_SINES]
        outputs = [f"{layer}.attention", *(f"present.{name}" for name in names)]
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                outputs,
                name=f"{layer}.attention",
                domain=MICROSOFT,
                num_heads=self._sizes.num_heads,
                kv_num_heads=self._sizes.num_kv_heads,
                do_rotary=1,
                rotary_interleaved=0,
            )
        )
        return self._product(f"{layer}.attention_output", outputs[0], weights.attention_output)

    def _normed_heads(self, layer: str, qkv: str, query_norm: FloatArray, key_norm: FloatArray) -> list[str]:
        """Query, key and value apart, the first two with an RMS norm on each head (qwen3)."""
        a = self._sizes
        sizes = np.array([a.num_heads, a.num_kv_heads, a.num_kv_heads], np.int64) * a.head_size
        parts = [f"{layer}.query", f"{layer}.key", f"{layer}.value"]
        self._split(qkv, sizes, parts)
        self._shared_constant("shape.heads", np.array([0, 0, -1, a.head_size], np.int64))
        self._shared_constant("shape.flat", np.array([0, 0, -1], np.int64))
        for index, norm in enumerate((query_norm, key_norm)):
            name = parts[index]
            heads = self._node("Reshape", [name, "shape.heads"], f"{name}.heads")
            normed = self._plain_norm(f"{name}.norm", heads, norm)
            parts[index] = self._node("Reshape", [normed, "shape.flat"], f"{name}.flat")
        return parts

    def _feed_forward(self, layer: str, weights: LayerWeights, normed: str) -> str:
        both = self._product(f"{layer}.gate_up", normed, weights.gate_up)
        gate, up = f"{layer}.gate", f"{layer}.up"
        self._split(both, np.array([weights.gate_up.rows // 2] * 2, np.int64), [gate, up])
        activated = self._node("QuickGelu", [gate], f"{layer}.silu", MICROSOFT, alpha=1.0)  # x * sigmoid(x)
        gated = self._node("Mul", [activated, up], f"{layer}.gated")
        return self._product(f"{layer}.ffn_down", gated, weights.ffn_down)

    def _norm(self, name: str, weight: FloatArray, *, output: str | None = None, summed: str | None = None) -> str:
        """RMS norm of the residual, after adding the last sublayer's branch to it. `output` and `summed` name both."""
        if not self._branch:
            return self._plain_norm(name, self._residual, weight)
        self._constant(f"{name}.weight", weight)
        inputs = [self._branch, self._residual, f"{name}.weight"]
        self._residual = summed or f"{name}.residual"
        self._nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization",
                inputs,
                [output or name, "", "", self._residual],
                name=name,
                domain=MICROSOFT,
                epsilon=self._sizes.rms_epsilon,
            )
        )
        return output or name

    def _plain_norm(self, name: str, source: str, weight: FloatArray) -> str:
        self._constant(f"{name}.weight", weight)
        return self._node(
            "SimplifiedLayerNormalization",
            [source, f"{name}.weight"],
            name,
            axis=-1,
            epsilon=self._sizes.rms_epsilon,
            stash_type=1,
        )

    def _product(
        self,
        name: str,
        source: str,
        matrix: QuantisedMatrix,
        *,
        bias: FloatArray | None = None,
        output: str | None = None,
        stored: bool = False,
    ) -> str:
        """source [B, S, columns] times the matrix's transpose, plus the bias. `stored`: initializers exist already."""
        if not stored:
            self._matrix(name, matrix)
        inputs = [source, f"{name}.codes", f"{name}.scales", "" if matrix.zero_points is None else f"{name}.zeros"]
        if bias is not None:
            self._constant(f"{name}.bias", bias)
            inputs += ["", f"{name}.bias"]
        return self._node(
            "MatMulNBits",
            inputs,
            output or name,
            MICROSOFT,
            K=matrix.columns,
            N=matrix.rows,
            bits=matrix.precision.bits,
            block_size=matrix.precision.block,
            accuracy_level=self._accuracy_level,
        )

    def _split(self, source: str, sizes: npt.NDArray[np.int64], outputs: list[str]) -> None:
        name = f"split.{'.'.join(str(size) for size in sizes)}"
        self._shared_constant(name, sizes)
        self._nodes.append(helper.make_node("Split", [source, name], outputs, name=f"{source}.split", axis=-1))

    def _node(self, kind: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [output], name=output, domain=domain, **attributes))
        return output

    def _matrix(self, name: str, matrix: QuantisedMatrix) -> None:
        for part, array in matrix.arrays().items():
            self._constant(f"{name}.{part}", array)

    def _constant(self, name: str, array: npt.NDArray[np.generic]) -> None:
        self._initializers.append(self._data.add(name, array))

    def _shared_constant(self, name: str, array: npt.NDArray[np.generic]) -> None:
        if all(tensor.name != name for tensor in self._initializers):
            self._constant(name, array)

    def _caches(self, prefix: str, length: str) -> list[onnx.ValueInfoProto]:
        shape: list[str | int | None] = ["batch_size", self._sizes.num_kv_heads, length, self._sizes.head_size]
        return [
            helper.make_tensor_value_info(f"{prefix}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(self._num_layers)
            for part in ("key", "value")
        ]
