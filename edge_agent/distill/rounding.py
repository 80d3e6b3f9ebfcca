"""Weights rounded in training as export stores them, so that what is learned outlives the rounding.

The gradient at the rounded weights moves the unrounded ones: the straight-through estimator, Bengio et al. 2013,
arXiv:1308.3432.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared.models.quantise import Precision


@contextmanager
def rounded_matrices(module: nn.Module, precision: Precision) -> Iterator[None]:
    """Within, every matrix that is trained is rounded in place; after it, each is again what it was."""
    matrices = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.dim() > 1]
    kept = [matrix.detach().clone() for matrix in matrices]
    with torch.no_grad():
        for matrix in matrices:
            matrix.copy_(rounded(matrix, precision))
    try:
        yield
    finally:
        with torch.no_grad():
            for matrix, whole in zip(matrices, kept, strict=True):
                matrix.copy_(whole)


def rounded(weights: Tensor, precision: Precision) -> Tensor:
    """[rows, columns] as stored with zero points, each block's range from end to end.

    `shared.models.quantise.quantise` finds these very codes again in what this returns, and loses nothing of it.
    """
    precision = precision.fitted(weights.shape[1])
    if precision.symmetric:
        raise ValueError(f"only precisions with zero points are rounded to, not {precision}")
    blocks = weights.view(len(weights), -1, precision.block)
    low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
    scales = (high - low) / precision.levels
    scales = torch.where(scales > 0, scales, 1)
    zeros = (precision.levels / 2 - (low + high) / 2 / scales).round().clamp(0, precision.levels)
    steps = ((blocks / scales).round() + zeros).clamp(0, precision.levels) - zeros
    return (steps * scales).view_as(weights)
