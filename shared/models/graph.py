"""The decoder as an ONNX graph, for ONNX Runtime's CPU kernels.

Inputs: input_ids int64 [B, S]; attention_mask int64 [B, past + S], ones for the tokens that count; for each layer
past_key_values.N.key and .value float32 [B, kv_heads, P, head_size], where P is the length of the past, or of the whole
buffer when past and present are bound to the same memory. Optional: logits_from int64 [1] (default 0), the first of
the S positions whose logits are wanted; a negative one counts from the end.

Outputs: logits float32 [B, S - logits_from, vocabulary]; hidden_states float32 [B, S, hidden], after the last norm;
present.N.key and .value like the past. An output that nobody asks for isn't copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from shared.models.gguf_source import Architecture, FloatArray
from shared.models.quantise import QuantisedMatrix

DATA_FILE = "model.onnx.data"
MICROSOFT = "com.microsoft"
OPSET, IR_VERSION = 21, 10
INLINE_BYTES = 1024
PAGE = 4096


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
        """A second initializer over the bytes of `tensor`, in another shape."""
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.from_array(numpy_helper.to_array(tensor).reshape(shape), name)
        entries = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
        return self._reference(name, tensor.data_type, shape, entries["offset"], entries["length"])

    def close(self) -> None:
        self._file.close()

    def _reference(self, name: str, kind: int, shape: tuple[int, ...], offset: int, length: int) -> TensorProto:
        tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self._location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


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


class DecoderGraph:
    """Collects nodes and initializers in the order of computation: embed, add_layer for each, finish."""

    def __init__(self, architecture: Architecture, data: ExternalData, accuracy_level: int) -> None:
        self._a = architecture
        self._data = data
        self._accuracy_level = accuracy_level
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._residual = ""
        self._branch = ""  # what the last sublayer adds to the residual
        self._num_layers = 0

    def add_rotary(self, frequencies: npt.NDArray[np.float64], context_length: int) -> None:
        """Cosines and sines of each position's angles, [context_length, head_size / 2]."""
        angles = np.outer(np.arange(context_length, dtype=np.float64), frequencies)
        self._constant("rotary.cos", np.cos(angles).astype(np.float32))
        self._constant("rotary.sin", np.sin(angles).astype(np.float32))

    def add_vocabulary(self, embedding: QuantisedMatrix, head: QuantisedMatrix | None) -> None:
        """The embedding's lookup, and the initializers of the vocabulary projection.

        `head` None ties it to the embedding: two initializers over the same bytes of the file. Both are needed because
        lookup and product want different shapes; only the lookup's stays mapped, and of it only the rows that are read.
        """
        p = embedding.precision
        codes = self._data.add("lm_head.codes", (head or embedding).codes)
        scales = self._data.add("lm_head.scales", (head or embedding).scales)
        zeros = (head or embedding).zero_points
        self._initializers += [codes, scales] + ([] if zeros is None else [self._data.add("lm_head.zeros", zeros)])
        packed_columns = embedding.codes.shape[1] * embedding.codes.shape[2]
        if head is None:
            self._initializers.append(self._data.alias("embedding.codes", codes, (embedding.rows, packed_columns)))
            self._initializers.append(self._data.alias("embedding.scales", scales, embedding.scales.shape))
        else:
            self._constant("embedding.codes", embedding.codes.reshape(embedding.rows, packed_columns))
            self._constant("embedding.scales", embedding.scales)
        inputs = ["embedding.codes", "input_ids", "embedding.scales"]
        if embedding.zero_points is not None:
            self._constant("embedding.zeros", embedding.zero_points)
            inputs.append("embedding.zeros")
        attributes = {"gather_axis": 0, "quantize_axis": 1, "bits": p.bits, "block_size": p.block}
        self._residual = self._node("GatherBlockQuantized", inputs, "embedding", MICROSOFT, **attributes)

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

    def finish(self, output_norm: FloatArray, head: QuantisedMatrix) -> onnx.ModelProto:
        """The last norm, the vocabulary projection of the rows asked for, and the whole model."""
        hidden = self._norm("output_norm", output_norm, output="hidden_states")
        self._constant("logits_from", np.array([0], np.int64))
        self._constant("slice.end", np.array([np.iinfo(np.int64).max], np.int64))
        wanted = self._node("Slice", [hidden, "logits_from", "slice.end", "axis.one"], "wanted_states")
        self._product("lm_head", wanted, head, output="logits", stored=True)
        graph = helper.make_graph(self._nodes, "decoder", self._inputs(), self._outputs(), self._initializers)
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
        inputs += ["sequence_lengths", "total_length", "rotary.cos", "rotary.sin"]
        outputs = [f"{layer}.attention", *(f"present.{name}" for name in names)]
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                outputs,
                name=f"{layer}.attention",
                domain=MICROSOFT,
                num_heads=self._a.num_heads,
                kv_num_heads=self._a.num_kv_heads,
                do_rotary=1,
                rotary_interleaved=0,
            )
        )
        return self._product(f"{layer}.attention_output", outputs[0], weights.attention_output)

    def _normed_heads(self, layer: str, qkv: str, query_norm: FloatArray, key_norm: FloatArray) -> list[str]:
        """Query, key and value apart, the first two with an RMS norm on each head (qwen3)."""
        a = self._a
        sizes = np.array([a.num_heads, a.num_kv_heads, a.num_kv_heads], np.int64) * a.head_size
        parts = [f"{layer}.query", f"{layer}.key", f"{layer}.value"]
        self._split(qkv, sizes, parts)
        self._shared_constant("shape.heads", np.array([0, 0, -1, a.head_size], np.int64))
        self._shared_constant("shape.flat", np.array([0, 0, -1], np.int64))
        for index, norm in enumerate((query_norm, key_norm)):
            name = parts[index]
            heads = self._node("Reshape", [name, "shape.heads"], f"{name}.heads")
            self._constant(f"{name}.norm.weight", norm)
            normed = self._node(
                "SimplifiedLayerNormalization",
                [heads, f"{name}.norm.weight"],
                f"{name}.norm",
                axis=-1,
                epsilon=a.rms_epsilon,
                stash_type=1,
            )
            parts[index] = self._node("Reshape", [normed, "shape.flat"], f"{name}.flat")
        return parts

    def _feed_forward(self, layer: str, weights: LayerWeights, normed: str) -> str:
        both = self._product(f"{layer}.gate_up", normed, weights.gate_up)
        gate, up = f"{layer}.gate", f"{layer}.up"
        self._split(both, np.array([self._a.ffn_size] * 2, np.int64), [gate, up])
        activated = self._node("QuickGelu", [gate], f"{layer}.silu", MICROSOFT, alpha=1.0)  # x * sigmoid(x)
        gated = self._node("Mul", [activated, up], f"{layer}.gated")
        return self._product(f"{layer}.ffn_down", gated, weights.ffn_down)

    def _norm(self, name: str, weight: FloatArray, output: str | None = None) -> str:
        """RMS norm of the residual, after adding the last sublayer's branch to it."""
        output = output or name
        self._constant(f"{name}.weight", weight)
        if not self._branch:
            inputs = [self._residual, f"{name}.weight"]
            epsilon = self._a.rms_epsilon
            return self._node("SimplifiedLayerNormalization", inputs, output, axis=-1, epsilon=epsilon, stash_type=1)
        summed = f"{name}.residual"
        self._nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [self._branch, self._residual, f"{name}.weight"],
                [output, "", "", summed],
                name=name,
                domain=MICROSOFT,
                epsilon=self._a.rms_epsilon,
            )
        )
        self._residual = summed
        return output

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
            self._constant(f"{name}.codes", matrix.codes)
            self._constant(f"{name}.scales", matrix.scales)
            if matrix.zero_points is not None:
                self._constant(f"{name}.zeros", matrix.zero_points)
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

    def _constant(self, name: str, array: npt.NDArray[np.generic]) -> None:
        self._initializers.append(self._data.add(name, array))

    def _shared_constant(self, name: str, array: npt.NDArray[np.generic]) -> None:
        if all(tensor.name != name for tensor in self._initializers):
            self._constant(name, array)

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        value: Callable[..., onnx.ValueInfoProto] = helper.make_tensor_value_info
        made = [
            value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
            value("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
        ]
        made += self._caches("past_key_values", "past_sequence_length")
        return [*made, value("logits_from", TensorProto.INT64, [1])]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        value: Callable[..., onnx.ValueInfoProto] = helper.make_tensor_value_info
        logits = value("logits", TensorProto.FLOAT, ["batch_size", "logits_length", self._a.vocab_size])
        hidden = value("hidden_states", TensorProto.FLOAT, ["batch_size", "sequence_length", self._a.hidden_size])
        return [logits, *self._caches("present", "total_sequence_length_or_buffer"), hidden]

    def _caches(self, prefix: str, length: str) -> list[onnx.ValueInfoProto]:
        shape: list[str | int | None] = ["batch_size", self._a.num_kv_heads, length, self._a.head_size]
        return [
            helper.make_tensor_value_info(f"{prefix}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(self._num_layers)
            for part in ("key", "value")
        ]
