"""The draft head in torch, as it is trained: the layer of `shared/models/head_graph.py`, unrolled on its own features.

Depth 1 reads the target's feature i and token i + 1 and predicts token i + 2. Depth k reads, in place of the target's
feature, what depth k - 1 gave one position before (a moved head expands it); it sees the keys of depth 1 up to k - 1
positions back, and then one key each of depths 2 … k: the very cache that drafting k tokens leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from shared.models.head import HeadSpec, HeadWeights


@dataclass(frozen=True)
class HeadBatch:
    """Conversations side by side, padded at their ends.

    features and embeddings [B, L, H]: the target's feature i, and its embedding of token i + 1. queries [B, A]: the
    positions that are learned from, ascending, with padding where `is_learned` [B, A] says no. states [B, A, H]: the
    target's hidden state one position on, from which its distribution of token i + 2 comes.
    """

    features: Tensor
    embeddings: Tensor
    queries: Tensor
    is_learned: Tensor
    states: Tensor


class HeadModule(nn.Module):
    """Parameters are named as in `HeadWeights`; matrices as in torch.nn.Linear."""

    embedding_norm: nn.Parameter
    feature_norm: nn.Parameter
    fusion: nn.Parameter
    attention_norm: nn.Parameter
    query: nn.Parameter
    key: nn.Parameter
    value: nn.Parameter
    attention_output: nn.Parameter
    ffn_norm: nn.Parameter
    gate: nn.Parameter
    up: nn.Parameter
    ffn_down: nn.Parameter
    output_norm: nn.Parameter
    lm_head: nn.Parameter
    expansion: nn.Parameter | None

    def __init__(self, weights: HeadWeights, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.vocabulary = torch.from_numpy(weights.vocabulary.astype(np.int64))
        self.register_parameter("expansion", None)
        for name, array in weights.arrays().items():
            if name != "vocabulary":
                setattr(self, name, nn.Parameter(torch.tensor(array, dtype=torch.float32)))
        self._cosines = torch.tensor(np.array(spec.rotary.cosines))
        self._sines = torch.tensor(np.array(spec.rotary.sines))

    def weights(self) -> HeadWeights:
        """What is trained so far, as arrays."""
        arrays = {name: parameter.detach().cpu().float().numpy() for name, parameter in self.named_parameters()}
        return HeadWeights(**arrays, vocabulary=self.vocabulary.cpu().numpy().astype(np.int32))

    def unroll(self, batch: HeadBatch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each depth the head's features x [B, A, H], and which of them come from an unbroken chain [B, A]."""
        length = batch.features.shape[1]
        places = torch.arange(length, device=batch.features.device)
        queries = batch.queries
        row = torch.arange(len(queries), device=queries.device)[:, None]
        fused = self._fuse(batch.embeddings, batch.features)
        normed = self._norm(fused, self.attention_norm)
        keys, values = self._keys_and_values(normed, places.expand(len(queries), -1))
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        is_chained = batch.is_learned
        follows = torch.zeros_like(is_chained)
        follows[:, 1:] = queries[:, 1:] == queries[:, :-1] + 1
        chosen = batch.embeddings[row, queries]
        x = fused[row, queries]
        for level in range(depth):
            if level:
                x = self._fuse(chosen, self._expanded(_shifted(x, 1)))
                is_chained = is_chained & follows & _shifted(is_chained, 1)
                own_key, own_value = self._keys_and_values(self._norm(x, self.attention_norm), queries)
                own_keys, own_values = [*own_keys, own_key], [*own_values, own_value]
            masks = [places <= queries[:, :, None] - level]
            for back in reversed(range(level)):  # depth 2's key is the furthest back
                masks.append(torch.eye(queries.shape[1], dtype=torch.bool, device=x.device).roll(-back, 1)[None])
                masks[-1] = masks[-1].expand(len(queries), -1, -1)
            mask = torch.cat(masks, dim=-1)[:, None]
            x = self._layer(x, queries, torch.cat([keys, *own_keys], 2), torch.cat([values, *own_values], 2), mask)
            yield x, is_chained

    def output(self, x: Tensor) -> Tensor:
        """What the vocabulary projection is applied to."""
        return self._norm(x, self.output_norm)

    def _expanded(self, x: Tensor) -> Tensor:
        """The head's features as the target's are."""
        return x if self.expansion is None else linear(x, self.expansion)

    def _fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        both = [self._norm(embeddings, self.embedding_norm), self._norm(features, self.feature_norm)]
        return linear(torch.cat(both, dim=-1), self.fusion).float()

    def _keys_and_values(self, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, kv heads, L, D] each."""
        heads = (*normed.shape[:2], self.spec.num_kv_heads, self.spec.head_size)
        key = self._rotated(linear(normed, self.key).view(heads), positions)
        return key.transpose(1, 2), linear(normed, self.value).view(heads).transpose(1, 2)

    def _layer(self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        normed = self._norm(x, self.attention_norm)
        heads = linear(normed, self.query).view(*x.shape[:2], self.spec.num_heads, self.spec.head_size)
        query = self._rotated(heads, positions).transpose(1, 2)
        groups = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (held.repeat_interleave(groups, dim=1) for held in (keys, values))
        mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + linear(mixed.transpose(1, 2).reshape(*x.shape[:2], -1), self.attention_output)
        normed = self._norm(x, self.ffn_norm)
        return x + linear(silu(linear(normed, self.gate)) * linear(normed, self.up), self.ffn_down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(x.float(), x.shape[-1:], weight, self.spec.rms_epsilon)
        return (
            normed.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else normed
        )

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, S, heads, D] turned by its positions' angles [B, S]; pairs are (n, n + D / 2)."""
        first, second = x.float().chunk(2, dim=-1)
        cosines, sines = self._cosines[positions][:, :, None], self._sines[positions][:, :, None]
        turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
        return turned.to(x.dtype)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Each entry of the second axis moved on by so many places; zeros come in."""
    moved = torch.zeros_like(x)
    moved[:, by:] = x[:, :-by]
    return moved
