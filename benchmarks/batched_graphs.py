"""Two ways to let several sequences with several new tokens each go through a model in one pass.

GroupQueryAttention takes several sequences at once only for one new token each. Both rewrites put something else in its
place, in a graph that stays in memory.
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


def slotted(model: onnx.ModelProto, num_slots: int) -> onnx.ModelProto:
    """The model with a GroupQueryAttention a sequence, each with a cache of its own; all else sees the rows of all.

    Rows of all sequences follow each other in input_ids [1, R]; those
    that have none are the last, and get a row of zeros each.
    Caches are called past_key_values.LAYER.key.SLOT and so on. New inputs: row_counts int64 [num_slots], num_rows int64
    [1], pads int64 [6] (for R rows to reach the sum of row_counts), last.SLOT int32 [1] and total.SLOT int32 scalar.
    """
    graph = model.graph
    nodes, added = list(graph.node), _Nodes()
    for node in nodes:
        if node.op_type == "GroupQueryAttention":
            _slotted_attention(node, num_slots, added)
        else:
            added.append(node)
    del graph.node[:]
    graph.node.extend(added)
    _replace_caches(graph.input, num_slots)
    _replace_caches(graph.output, num_slots)
    for name, length in (("row_counts", num_slots), ("num_rows", 1), ("pads", 6)):
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, [length]))
    for slot in range(num_slots):
        graph.input.append(helper.make_tensor_value_info(f"last.{slot}", TensorProto.INT32, [1]))
        graph.input.append(helper.make_tensor_value_info(f"total.{slot}", TensorProto.INT32, []))
    graph.initializer.append(helper.make_tensor("slot.start", TensorProto.INT64, [1], [0]))
    graph.initializer.append(helper.make_tensor("slot.axis", TensorProto.INT64, [1], [1]))
    return model


def _slotted_attention(node: onnx.NodeProto, num_slots: int, nodes: _Nodes) -> None:
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    *sources, past_key, past_value, _, _, cosines, sines = node.input
    name, present_key, present_value = node.output
    parts = []
    for source in sources:
        names = [f"{source}.{slot}" if source else "" for slot in range(num_slots)]
        if source:
            padded = nodes.make("Pad", [source, "pads"], [f"{source}.padded"])
            nodes.make("Split", [padded, "row_counts"], names, axis=1)
        parts.append(names)
    for slot, piece in enumerate(zip(*parts, strict=True)):
        caches = [f"{past_key}.{slot}", f"{past_value}.{slot}"]
        outputs = [f"{name}.{slot}", f"{present_key}.{slot}", f"{present_value}.{slot}"]
        inputs = [*piece, *caches, f"last.{slot}", f"total.{slot}", cosines, sines]
        nodes.make("GroupQueryAttention", inputs, outputs, MICROSOFT, **attributes)
    joined = nodes.make("Concat", [f"{name}.{slot}" for slot in range(num_slots)], [f"{name}.joined"], axis=1)
    nodes.make("Slice", [joined, "slot.start", "num_rows", "slot.axis"], [name])


def _replace_caches(values: Any, num_slots: int) -> None:
    """Every cache among the inputs or outputs by one a slot."""
    kept = []
    for value in values:
        if value.name.startswith(("past_key_values.", "present.")):
            for slot in range(num_slots):
                copy = onnx.ValueInfoProto()
                copy.CopyFrom(value)
                copy.name = f"{value.name}.{slot}"
                kept.append(copy)
        else:
            kept.append(value)
    del values[:]
    values.extend(kept)
