"""The rows of a target's embedding, read from its own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shared.models.directory import MODEL_FILE
from shared.models.gguf_source import FloatArray
from shared.models.stored_graph import StoredGraph


class TargetEmbedding:
    """What the target's lookup gives for a token. Only the rows that are asked for take memory."""

    def __init__(self, directory: Path) -> None:
        """Open the embedding of a built target's directory.

        Raises:
            UnsupportedModelError: the directory is of another maker.
        """
        self._stored = StoredGraph(directory / MODEL_FILE).stored("embedding")
        self.hidden_size = self._stored.num_columns

    def rows(self, ids: Sequence[int]) -> FloatArray:
        """Float32 [len(ids), hidden_size], the values that the target computes with."""
        return self._stored.rows(np.asarray(ids, np.int64))
