"""Reading a graph's weights back from a model's directory, without loading them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from shared.errors import UnsupportedModelError
from shared.models.gguf_source import FloatArray
from shared.models.quantise import Precision, QuantisedMatrix, dequantise

ROWS: Final = 1 << 14
"""Dequantised at a time: a whole vocabulary in float32 would take half a gigabyte."""


class StoredGraph:
    """An ONNX graph on disk. Its arrays are memory-mapped: only what is read of them takes memory."""

    def __init__(self, path: Path) -> None:
        """Parse the graph; the weights' file isn't touched. `path` is the model.onnx of a checked directory."""
        self._path = path
        graph = onnx.load(path, load_external_data=False).graph
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes = {node.name: node for node in graph.node}

    def has(self, name: str) -> bool:
        """Whether there is such an array."""
        return name in self._initializers

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """An array in its own type and shape, read-only.

        Raises:
            UnsupportedModelError: the graph has no such array: we didn't build it.
        """
        tensor = self._initializers.get(name)
        if tensor is None:
            raise UnsupportedModelError(f"{self._path} has no array {name!r}: it isn't one of Souschef's graphs")
        if tensor.data_location != TensorProto.EXTERNAL:
            return np.asarray(numpy_helper.to_array(tensor))
        entries = {entry.key: entry.value for entry in tensor.external_data}
        kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        data = self._path.parent / entries["location"]
        return np.memmap(data, kind, "r", int(entries["offset"]), tuple(tensor.dims))

    def attribute(self, node: str, name: str) -> Any:
        """A node's attribute.

        Raises:
            UnsupportedModelError: the graph has no such node.
        """
        if node not in self._nodes:
            raise UnsupportedModelError(f"{self._path} has no node {node!r}: it isn't one of Souschef's graphs")
        return next(helper.get_attribute_value(a) for a in self._nodes[node].attribute if a.name == name)

    def rows(self, name: str, node: str | None = None) -> Iterator[FloatArray]:
        """A quantised matrix's rows as float32, some at a time; `node`: the product that uses it, if named otherwise.

        Raises:
            UnsupportedModelError: the graph has no such matrix.
        """
        bits, block, columns = (self.attribute(node or name, key) for key in ("bits", "block_size", "K"))
        zeros = self.array(f"{name}.zeros") if self.has(f"{name}.zeros") else None
        codes, scales = self.array(f"{name}.codes"), self.array(f"{name}.scales")
        precision = Precision(bits, block, zeros is None)
        for first in range(0, len(codes), ROWS):
            part = slice(first, first + ROWS)
            own = None if zeros is None else zeros[part]
            yield dequantise(QuantisedMatrix(precision, columns, codes[part], scales[part], own))

    def matrix(self, name: str) -> FloatArray:
        """A quantised matrix as float32 [rows, columns]."""
        return np.concatenate(list(self.rows(name)))
