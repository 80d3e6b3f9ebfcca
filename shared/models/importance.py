"""How much each input of a matrix matters: its mean square over calibration texts.

Measured once a GGUF by `python -m benchmarks.importance` and kept in `measured/`, named by the file's hash. Building
needs no calibration then, and gives the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.models.gguf_source import FloatArray
from shared.models.scheme import TensorClass

FOLDER = Path(__file__).parent / "measured"
STEPS_AN_OCTAVE = 8
MIDDLE = 128
SMOOTHING = 0.3
"""How far large inputs are made smaller and their weights larger: AWQ's exponent, of the root mean square."""


@dataclass(frozen=True)
class Importance:
    """Mean squares of the inputs of a decoder's matrices, relative to their mean in each matrix.

    squares: by tensor class, float32 [layers, columns]; nothing for a class, or at all, where nothing was measured.
    """

    squares: Mapping[TensorClass, FloatArray]

    @staticmethod
    def of_source(sha256: str, folder: Path = FOLDER) -> Importance:
        """What was measured for the GGUF of this hash: nothing for most."""
        path = folder / f"{sha256}.npz"
        if not path.is_file():
            return Importance({})
        with np.load(path) as stored:
            return Importance({TensorClass(name): _decoded(stored[name]) for name in stored.files})

    def save(self, sha256: str, folder: Path = FOLDER) -> None:
        """Keep it for the GGUF of this hash, as logarithms in steps of an eighth of an octave."""
        folder.mkdir(exist_ok=True)
        arrays = {str(kind): _encoded(squares) for kind, squares in self.squares.items()}
        np.savez_compressed(folder / f"{sha256}.npz", allow_pickle=False, **arrays)

    def smoothing(self, layer: int, columns: int) -> FloatArray:
        """What the columns of query, key and value are multiplied by before rounding, ones when unknown.

        Their inputs are divided by as much, which costs nothing: it folds into the norm before them.
        """
        if TensorClass.QKV not in self.squares:
            return np.ones(columns, np.float32)
        return np.asarray(self.squares[TensorClass.QKV][layer] ** (SMOOTHING / 2), np.float32)

    def weights(self, kind: TensorClass, layer: int) -> FloatArray | None:
        """How much the squared error of each column counts, smoothed ones after smoothing; None when unknown."""
        if kind not in self.squares:
            return None
        squares = self.squares[kind][layer]
        smoothed = squares / self.smoothing(layer, len(squares)) ** 2 if kind is TensorClass.QKV else squares
        return np.asarray(smoothed, np.float32)


def _encoded(squares: FloatArray) -> npt.NDArray[np.uint8]:
    relative = squares / squares.mean(axis=-1, keepdims=True)
    steps = np.rint(np.log2(np.maximum(relative, 1e-30)) * STEPS_AN_OCTAVE) + MIDDLE
    return np.asarray(np.clip(steps, 0, 255), np.uint8)


def _decoded(steps: npt.NDArray[np.uint8]) -> FloatArray:
    return np.asarray(np.exp2((steps.astype(np.float32) - MIDDLE) / STEPS_AN_OCTAVE), np.float32)
