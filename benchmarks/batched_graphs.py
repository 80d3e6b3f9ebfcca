"""Another way than `shared/models/lanes.py` to let several sequences with several new tokens each go through one pass:
ONNX's own operators in the place of GroupQueryAttention, in a graph that stays in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

from shared.onnx_lm import DecoderConfig

MICROSOFT = "com.microsoft"
OPSET = 24


class _Nodes(list[onnx.NodeProto]):
    """Nodes in the making."""

    def make(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **values: Any) -> str:
        """Add one; the name of its first output."""
        self.append(helper.make_node(kind, inputs, outputs, domain=domain, **values))
        return outputs[0]


def scattered(model: onnx.ModelProto, config: DecoderConfig) -> onnx.ModelProto:
    """The model with every GroupQueryAttention as rotary embedding, TensorScatter and Attention.

    New inputs: position_ids int64 [B, S], past_lengths int64 [B], lengths int64 [B].
    """
    graph = model.graph
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.extend(_scattered_attention(node, config) if node.op_type == "GroupQueryAttention" else [node])
    names = (("position_ids", ["batch_size", "sequence_length"]), ("past_lengths", ["batch_size"]))
    for name, shape in (*names, ("lengths", ["batch_size"])):
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
    for name, values in (("heads.shape", [0, 0, -1, config.head_size]), ("flat.shape", [0, 0, -1])):
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
    for imported in model.opset_import:
        if imported.domain == "":
            imported.version = OPSET
    model.ir_version = max(model.ir_version, 11)
    return model


def _scattered_attention(node: onnx.NodeProto, config: DecoderConfig) -> _Nodes:
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    query, key, value, past_key, past_value, _, _, cosines, sines = node.input
    heads, kv_heads, name = attributes["num_heads"], attributes["kv_num_heads"], node.output[0]
    nodes = _Nodes()
    if not key:
        sizes = [count * config.head_size for count in (heads, kv_heads, kv_heads)]
        tensor = helper.make_tensor(f"{name}.sizes", TensorProto.INT64, [3], sizes)
        nodes.append(helper.make_node("Constant", [], [f"{name}.sizes"], value=tensor))
        parts = [f"{name}.{part}" for part in ("q", "k", "v")]
        nodes.append(helper.make_node("Split", [query, f"{name}.sizes"], parts, axis=-1))
        query, key, value = parts

    def by_head(source: str, num_heads: int, rotated: bool) -> str:
        """[B, S, heads * size] as [B, heads, S, size]."""
        if rotated:
            inputs = [source, "position_ids", cosines, sines]
            source = nodes.make("RotaryEmbedding", inputs, [f"{source}.rotated"], MICROSOFT, num_heads=num_heads)
        shaped = nodes.make("Reshape", [source, "heads.shape"], [f"{source}.heads"])
        return nodes.make("Transpose", [shaped], [f"{source}.by_head"], perm=[0, 2, 1, 3])

    nodes.make("TensorScatter", [past_key, by_head(key, kv_heads, True), "past_lengths"], [node.output[1]], axis=2)
    nodes.make("TensorScatter", [past_value, by_head(value, kv_heads, False), "past_lengths"], [node.output[2]], axis=2)
    inputs = [by_head(query, heads, True), node.output[1], node.output[2], "", "", "", "lengths"]
    attended = nodes.make("Attention", inputs, [f"{name}.attended"], is_causal=1)
    rows = nodes.make("Transpose", [attended], [f"{name}.rows"], perm=[0, 2, 1, 3])
    nodes.make("Reshape", [rows, "flat.shape"], [name])
    return nodes
