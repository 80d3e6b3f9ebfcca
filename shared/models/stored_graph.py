"""Reading a graph's weights back from a model's directory, without loading them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from shared.errors import UnsupportedModelError
from shared.models.gguf_source import FloatArray
from shared.models.quantise import Precision, QuantisedMatrix, SplitMatrix, dequantise

LOOKUPS: Final = frozenset({"Gather", "GatherBlockQuantized"})
ROWS: Final = 1 << 14
"""Dequantised at a time: a whole vocabulary in float32 would take half a gigabyte."""


class StoredGraph:
    """An ONNX graph on disk. Its arrays are memory-mapped: only what is read of them takes memory."""

    def __init__(self, path: Path) -> None:
        """Parse the graph; the weights' file isn't touched. `path` is the model.onnx of a checked directory."""
        self._path = path
        graph = onnx.load(path, load_external_data=False).graph
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes = {node.name or str(number): node for number, node in enumerate(graph.node)}

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

    def bytes_read(self) -> int:
        """Bytes of the weights that every pass reads: all but the arrays that only some rows are looked up in."""
        read = {name for node in self._nodes.values() if node.op_type not in LOOKUPS for name in node.input}
        sizes = {
            # Two names may stand for the same bytes.
            tuple(entry.value for entry in tensor.external_data): prod(tensor.dims)
            * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            for name, tensor in self._initializers.items()
            if name in read and tensor.data_location == TensorProto.EXTERNAL
        }
        return sum(sizes.values())

    def rows(self, name: str) -> Iterator[FloatArray]:
        """A quantised matrix's rows as float32, some at a time.

        Raises:
            UnsupportedModelError: the graph has no such matrix.
        """
        stored = self.stored(name)
        for first in range(0, stored.num_rows, ROWS):
            yield stored.rows(slice(first, first + ROWS))

    def stored(self, name: str) -> StoredMatrix:
        """The same, to read some rows of.

        Raises:
            UnsupportedModelError: the graph has no such matrix.
        """
        users = [node.name for node in self._nodes.values() if f"{name}.codes" in node.input]
        if not users:
            raise UnsupportedModelError(f"{self._path} has no matrix {name!r}: it isn't one of Souschef's graphs")
        bits, block = (self.attribute(users[0], key) for key in ("bits", "block_size"))
        zeros = self.array(f"{name}.zeros") if self.has(f"{name}.zeros") else None
        fine = f"{name}.fine.codes"
        return StoredMatrix(
            Precision(bits, block, zeros is None),
            self.array(f"{name}.codes"),
            self.array(f"{name}.scales"),
            zeros,
            self.array(fine) if self.has(fine) else None,
        )

    def matrix(self, name: str) -> FloatArray:
        """A quantised matrix as float32 [rows, columns]."""
        return np.concatenate(list(self.rows(name)))


@dataclass(frozen=True)
class StoredMatrix:
    """A quantised matrix on disk. `fine`: the codes of a split one's other half."""

    precision: Precision
    codes: np.ndarray[Any, np.dtype[Any]]
    scales: np.ndarray[Any, np.dtype[Any]]
    zeros: np.ndarray[Any, np.dtype[Any]] | None
    fine: np.ndarray[Any, np.dtype[Any]] | None

    @property
    def num_rows(self) -> int:
        return len(self.codes)

    @property
    def num_columns(self) -> int:
        return int(self.scales.shape[1]) * self.precision.block

    def rows(self, which: slice | npt.NDArray[np.int64]) -> FloatArray:
        """Rows as float32; only what is asked for is read."""
        scales = self.scales[which]
        zeros = None if self.zeros is None else self.zeros[which]
        codes = self.codes[which].reshape(*scales.shape, -1)
        coarse = QuantisedMatrix(self.precision, self.num_columns, codes, scales, zeros)
        if self.fine is None:
            return dequantise(coarse)
        split = SplitMatrix(coarse, self.fine[which].reshape(codes.shape))
        return dequantise(coarse) + dequantise(split.fine)
