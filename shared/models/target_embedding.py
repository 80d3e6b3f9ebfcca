"""The rows of a target's embedding, read from its own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shared.models.directory import MODEL_FILE
from shared.models.gguf_source import FloatArray
from shared.models.quantise import Precision, QuantisedMatrix, dequantise
from shared.models.stored_graph import StoredGraph


class TargetEmbedding:
    """What the target's lookup gives for a token. Only the rows that are asked for take memory."""

    def __init__(self, directory: Path) -> None:
        """Open the embedding of a built target's directory.

        Raises:
            UnsupportedModelError: the directory is of another maker.
        """
        graph = StoredGraph(directory / MODEL_FILE)
        self._codes = graph.array("embedding.codes")
        self._scales = graph.array("embedding.scales")
        self._zeros = graph.array("embedding.zeros") if graph.has("embedding.zeros") else None
        bits, block = (graph.attribute("embedding", name) for name in ("bits", "block_size"))
        self._precision = Precision(bits, block, self._zeros is None)
        self.hidden_size = self._codes.shape[1] * 8 // bits

    def rows(self, ids: Sequence[int]) -> FloatArray:
        """Float32 [len(ids), hidden_size], the values that the target computes with."""
        index = np.asarray(ids, np.int64)
        codes = self._codes[index].reshape(len(index), self._scales.shape[1], -1)
        zeros = None if self._zeros is None else self._zeros[index]
        return dequantise(QuantisedMatrix(self._precision, self.hidden_size, codes, self._scales[index], zeros))
