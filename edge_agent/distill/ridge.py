"""Linear maps between a model's vectors, fitted by ridge regression."""

from __future__ import annotations

import numpy as np

from shared.models.gguf_source import FloatArray


def ridge(x: FloatArray, y: FloatArray, strength: float) -> FloatArray:
    """The matrix [columns of y, columns of x] with y = x @ matrix.T in the least squares, kept small.

    strength: of the penalty, in mean diagonals of x.T @ x.
    """
    square = x.T @ x
    square += np.eye(len(square), dtype=np.float32) * (strength * square.trace() / len(square))
    return np.ascontiguousarray(np.linalg.solve(square, x.T @ y).T)


def sizes(x: FloatArray) -> FloatArray:
    """The root mean square of each row, [n, 1]."""
    found: FloatArray = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-6)
    return found


def normed(x: FloatArray) -> FloatArray:
    """Each row over its size."""
    found: FloatArray = x / sizes(x)
    return found
