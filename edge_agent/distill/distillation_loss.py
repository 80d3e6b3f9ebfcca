"""Cross-entropy to the target's distribution over the head's vocabulary, without ever holding all its logits.

Each distribution is a projection of hidden states: the target's of its own, the head's of what it puts out. So the loss
is a function of two sets of hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK: Final = 512
"""Positions whose logits are held at a time."""


@dataclass(frozen=True)
class Projections:
    """What makes logits of the target's hidden states, [V, T], and of the head's outputs, [V, H]; the same ids."""

    target: Tensor
    head: Tensor


@dataclass(frozen=True)
class Agreement:
    """How far a head agrees with its target.

    loss: summed over the positions of depth 1. accepted: for each depth, positions where the likeliest ids agree there
    and at all shallower depths of the same draft. reached: where they agree at all shallower ones.
    """

    loss: float
    accepted: list[int]
    reached: list[int]


@torch.no_grad()
def loss_slopes(
    outputs: Sequence[Tensor],
    is_chained: Sequence[Tensor],
    states: Tensor,
    projections: Projections,
    depth_weights: Sequence[float],
) -> list[Tensor]:
    """The loss's derivative by each output: softmax(output) - softmax(state), through the projection.

    The loss is the mean over positions of the weighted sum over depths. outputs: for each depth [B, A, H], what the
    head's projection is applied to; is_chained: for each [B, A]; states [B, A, T].
    """
    kept = is_chained[0]  # depth 1 is there wherever a deeper one is
    slopes = [torch.zeros_like(output) for output in outputs]
    flat_states = states[kept].to(projections.target.dtype)
    flat_outputs = [output[kept].to(projections.head.dtype) for output in outputs]
    flat_slopes = [torch.empty_like(output) for output in flat_outputs]
    for first in range(0, len(flat_states), CHUNK):
        part = slice(first, first + CHUNK)
        wanted = torch.softmax(linear(flat_states[part], projections.target), -1)
        for output, slope in zip(flat_outputs, flat_slopes, strict=True):
            excess = torch.softmax(linear(output[part], projections.head), -1).sub_(wanted)
            slope[part] = excess @ projections.head
    for slope, flat, mask, weight in zip(slopes, flat_slopes, is_chained, depth_weights, strict=True):
        slope[kept] = (flat * (mask[kept] * (weight / max(1, len(flat))))[:, None]).to(slope.dtype)
    return slopes


@torch.no_grad()
def agreement(
    outputs: Sequence[Tensor], is_chained: Sequence[Tensor], states: Tensor, projections: Projections
) -> Agreement:
    """Loss and agreement of outputs as in `loss_slopes`."""
    kept = is_chained[0]
    agrees = torch.zeros((len(outputs), *kept.shape), dtype=torch.bool, device=kept.device)
    flat_states = states[kept].to(projections.target.dtype)
    loss = 0.0
    for depth, output in enumerate(outputs):
        flat, found = output[kept].to(projections.head.dtype), []
        for first in range(0, len(flat), CHUNK):
            part = slice(first, first + CHUNK)
            wanted = linear(flat_states[part], projections.target).float()
            logits = linear(flat[part], projections.head).float()
            found.append(wanted.argmax(-1) == logits.argmax(-1))
            if depth == 0:
                loss -= float((torch.softmax(wanted, -1) * torch.log_softmax(logits, -1)).sum())
        agrees[depth][kept] = torch.cat(found)
    return Agreement(loss, *_chained(agrees, is_chained))


def _chained(agrees: Tensor, is_chained: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Accepted and reached: depth k at a position continues the draft that depth k - 1 made one position before."""
    accepted, reached = [], []
    so_far = torch.ones_like(is_chained[0])
    for depth, mask in enumerate(is_chained):
        if depth:
            so_far = torch.cat([torch.zeros_like(so_far[:, :1]), so_far[:, :-1]], dim=1)
        so_far = so_far & mask
        reached.append(int(so_far.sum()))
        so_far = so_far & agrees[depth]
        accepted.append(int(so_far.sum()))
    return accepted, reached
