"""A decoder's graph in which several sequences, each with any number of new tokens, go through one pass.

GroupQueryAttention takes several sequences at once only for one new token each. So every one of them becomes a choice:
one sequence alone runs as it did before; several run side by side, each in a lane with a cache of its own, and all else
of the pass sees the rows of all as those of one.

The caches are called past_key_values.LAYER.key.LANE and so on; a sequence alone has lane 0. New inputs: in_lanes bool
scalar, the choice; logits_rows int64 [N], the rows whose logits are wanted, in the place of logits_from. In lanes, the
rows of all follow each other in input_ids [1, R]; lanes without any are the last, and get a row of zeros each:
row_counts int64 [lanes], pads int64 [6] (for R rows to reach the sum of row_counts), num_rows int64 [1] (R), and for
each lane LANE.last int32 [1] and LANE.total int32 scalar, the place of its last row and one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

from shared.errors import UnsupportedModelError

LOGITS_FROM = "logits_from"
NUM_CACHES = 2
"""Keys and values."""


def with_lanes(model: onnx.ModelProto, num_lanes: int, logits: str) -> onnx.ModelProto:
    """The model, changed in place. logits: what its output is called.

    Raises:
        UnsupportedModelError: its attention isn't GroupQueryAttention over caches, or wants positions.
    """
    graph = model.graph
    nodes: list[onnx.NodeProto] = []
    caches: set[str] = set()
    for node in _with_chosen_logits(list(graph.node), logits):
        if node.op_type == "GroupQueryAttention":
            if len(node.input) < 7 or not node.input[3] or any(node.input[9:11]):
                raise UnsupportedModelError(f"the attention {node.name!r} can't be run for several sequences at once")
            caches |= {*node.input[3:5], *node.output[1:3]}
            nodes.append(_branching(node, num_lanes))
        else:
            nodes.append(node)
    if not caches:
        raise UnsupportedModelError("the graph has no attention that can be run for several sequences at once")
    del graph.node[:]
    graph.node.extend(nodes)
    for values in (graph.input, graph.output):
        _multiply(values, caches, num_lanes)
    kept = [value for value in graph.input if value.name != LOGITS_FROM]
    del graph.input[:]
    graph.input.extend([*kept, *_new_inputs(num_lanes)])
    for name, value in (("lanes.start", 0), ("lanes.axis", 1)):
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [value]))
    return model


def _new_inputs(num_lanes: int) -> list[onnx.ValueInfoProto]:
    value: Any = helper.make_tensor_value_info
    inputs = [value("in_lanes", TensorProto.BOOL, []), value("logits_rows", TensorProto.INT64, ["logits_length"])]
    for name, length in (("row_counts", num_lanes), ("num_rows", 1), ("pads", 6)):
        inputs.append(value(name, TensorProto.INT64, [length]))
    for lane in range(num_lanes):
        inputs += [value(f"{lane}.last", TensorProto.INT32, [1]), value(f"{lane}.total", TensorProto.INT32, [])]
    return inputs


def _with_chosen_logits(nodes: list[onnx.NodeProto], logits: str) -> list[onnx.NodeProto]:
    """Logits of the wanted rows: chosen before the projection in our graphs, behind it in others."""
    found = []
    for node in nodes:
        if node.op_type == "Slice" and node.input[1] == LOGITS_FROM:
            node = helper.make_node("Gather", [node.input[0], "logits_rows"], node.output, axis=1)
            logits = ""
        found.append(node)
    if logits:
        for node in found:
            node.output[:] = [f"{name}.all" if name == logits else name for name in node.output]
        found.append(helper.make_node("Gather", [f"{logits}.all", "logits_rows"], [logits], axis=1))
    return found


def _branching(attention: onnx.NodeProto, num_lanes: int) -> onnx.NodeProto:
    past = [[f"{name}.{lane}" for name in attention.input[3:5]] for lane in range(num_lanes)]
    present = [[f"{name}.{lane}" for name in attention.output[1:3]] for lane in range(num_lanes)]
    outputs = [attention.output[0], *(name for pair in present for name in pair)]
    return helper.make_node(
        "If",
        ["in_lanes"],
        outputs,
        name=f"{attention.name}.lanes",
        then_branch=_lanes(attention, past, outputs),
        else_branch=_alone(attention, past, outputs),
    )


def _alone(attention: onnx.NodeProto, past: list[list[str]], outputs: Sequence[str]) -> onnx.GraphProto:
    """The attention as it was, over lane 0; the caches of the others stay as they are, and where they are."""
    made = [f"{name}.alone" for name in outputs]
    node = onnx.NodeProto()
    node.CopyFrom(attention)
    node.input[3:5] = past[0]
    node.output[:] = made[: 1 + NUM_CACHES]
    untouched = [name for pair in past[1:] for name in pair]
    kept = [
        helper.make_node("Identity", [source], [target])
        for source, target in zip(untouched, made[1 + NUM_CACHES :], strict=True)
    ]
    return _branch("alone", [node, *kept], made)


def _lanes(attention: onnx.NodeProto, past: list[list[str]], outputs: Sequence[str]) -> onnx.GraphProto:
    made = [f"{name}.lanes" for name in outputs]
    nodes, parts = [], []
    for source in attention.input[:3]:
        names = [f"{source}.{lane}" if source else "" for lane in range(len(past))]
        if source:
            nodes.append(helper.make_node("Pad", [source, "pads"], [f"{source}.padded"]))
            nodes.append(helper.make_node("Split", [f"{source}.padded", "row_counts"], names, axis=1))
        parts.append(names)
    results = [f"{made[0]}.{lane}" for lane in range(len(past))]
    for lane, piece in enumerate(zip(*parts, strict=True)):
        node = onnx.NodeProto()
        node.CopyFrom(attention)
        node.name = f"{attention.name}.{lane}"
        node.input[:7] = [*piece, *past[lane], f"{lane}.last", f"{lane}.total"]
        first = 1 + NUM_CACHES * lane
        node.output[:] = [results[lane], *made[first : first + NUM_CACHES]]
        nodes.append(node)
    nodes.append(helper.make_node("Concat", results, [f"{made[0]}.padded"], axis=1))
    nodes.append(helper.make_node("Slice", [f"{made[0]}.padded", "lanes.start", "num_rows", "lanes.axis"], made[:1]))
    return _branch("lanes", nodes, made)


def _branch(name: str, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=output) for output in outputs])


def _multiply(values: Any, caches: set[str], num_lanes: int) -> None:
    """Every cache among the inputs or outputs by one a lane."""
    found = []
    for value in values:
        for name in [f"{value.name}.{lane}" for lane in range(num_lanes)] if value.name in caches else [value.name]:
            copy = onnx.ValueInfoProto()
            copy.CopyFrom(value)
            copy.name = name
            found.append(copy)
    del values[:]
    values.extend(found)
