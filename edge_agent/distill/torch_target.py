"""The target in torch, many sequences at a time: its built files' own weights, dequantised, in bfloat16.

ONNX Runtime's int8 kernels gain little from a batch on a CPU; bfloat16 products of a matrix unit or a GPU gain almost
all. The weights are the same numbers; what differs is the rounding of activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from shared.errors import UnsupportedModelError
from shared.models.blocks import ROTARY_COSINES, ROTARY_SINES
from shared.models.directory import MODEL_FILE, open_model_directory
from shared.models.stored_graph import StoredGraph
from shared.models.target_embedding import TargetEmbedding

SPAN_ROWS: Final = 64
"""Rows that attend together: who fills the rows keeps those of a span about equally long."""


class Product:
    """y = x @ matrix.T. On a CPU the matrix is laid out once as oneDNN wants it, not again at every call."""

    def __init__(self, matrix: Tensor, num_rows: int) -> None:
        """num_rows: rows of x that it will mostly be called with."""
        one_dnn: Any = torch.backends.mkldnn
        is_packed = matrix.device.type == "cpu" and one_dnn.is_available()
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(matrix, num_rows) if is_packed else matrix
        self._multiply = self._packed if is_packed else linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._matrix)

    @staticmethod
    def _packed(x: Tensor, matrix: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], ""))


@dataclass(frozen=True)
class TorchLayer:
    """One decoder layer."""

    attention_norm: Tensor
    qkv: Product  # query rows, then key rows, then value rows
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Product
    ffn_norm: Tensor
    gate_up: Product  # gate rows, then up rows
    ffn_down: Product


class TargetWeights:
    """Reads a built model's weights as torch tensors: vectors float32, matrices of `dtype`."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Open a built model's directory.

        Raises:
            ModelFileError: the directory is not whole.
            UnsupportedModelError: another maker built it.
        """
        manifest = open_model_directory(directory).manifest
        if manifest is None:
            raise UnsupportedModelError(f"{directory} has no manifest: a head needs a target that Souschef built")
        self.architecture = manifest.architecture
        self.device, self.dtype = device, dtype
        self._graph = StoredGraph(directory / MODEL_FILE)
        self.epsilon = float(self._graph.attribute("output_norm", "epsilon"))

    def vector(self, name: str) -> Tensor:
        """A norm's weights or a table, float32."""
        return torch.tensor(np.array(self._graph.array(name), np.float32), device=self.device)

    def vector_or_none(self, name: str) -> Tensor | None:
        """The same of an array that not every architecture has."""
        return self.vector(name) if self._graph.has(name) else None

    def matrix(self, name: str) -> Tensor:
        """A matrix [rows, columns]."""
        parts = [torch.from_numpy(part).to(self.dtype) for part in self._graph.rows(name)]
        return torch.cat(parts).to(self.device)

    def lm_head(self) -> Tensor:
        """The vocabulary projection [V, H]."""
        return self.matrix("lm_head")

    def layer(self, number: int, num_rows: int) -> TorchLayer:
        """One decoder layer, for about so many rows at a time."""

        def product(name: str) -> Product:
            return Product(self.matrix(f"{prefix}.{name}"), num_rows)

        prefix = f"layers.{number}"
        return TorchLayer(
            attention_norm=self.vector(f"{prefix}.attention_norm.weight"),
            qkv=product("qkv"),
            qkv_bias=self.vector_or_none(f"{prefix}.qkv.bias"),
            query_norm=self.vector_or_none(f"{prefix}.query.norm.weight"),
            key_norm=self.vector_or_none(f"{prefix}.key.norm.weight"),
            attention_output=product("attention_output"),
            ffn_norm=self.vector(f"{prefix}.ffn_norm.weight"),
            gate_up=product("gate_up"),
            ffn_down=product("ffn_down"),
        )


@dataclass(frozen=True)
class Span:
    """Rows whose attention is computed together, over as many positions as the longest of them has."""

    rows: slice
    total: int
    seen: Tensor  # [rows, S, total]: which positions each new token sees


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values [layers, rows, context, kv heads, D]. Memory is touched only as the rows fill."""

    keys: Tensor
    values: Tensor


class TorchTarget:
    """The target's weights. Its caches may be used by several threads, each by one."""

    def __init__(self, directory: Path, context_length: int, num_rows: int, device: torch.device) -> None:
        """Load a built model's directory, for passes over about `num_rows` tokens; no longer than its own context.

        Raises:
            ModelFileError, UnsupportedModelError: see `TargetWeights`.
        """
        weights = TargetWeights(directory, device, torch.bfloat16)
        a = self._a = weights.architecture
        self._weights = weights
        self._embedding = TargetEmbedding(directory)
        self._layers = [weights.layer(number, num_rows) for number in range(a.num_layers)]
        self._output_norm = weights.vector("output_norm.weight")
        self._lm_head = weights.lm_head()
        self._cosines, self._sines = weights.vector(ROTARY_COSINES), weights.vector(ROTARY_SINES)
        self.context_length = min(context_length, len(self._cosines))

    def new_cache(self, num_rows: int) -> KeyValueCache:
        """Room for so many sequences."""
        a = self._a
        shape = (a.num_layers, num_rows, self.context_length, a.num_kv_heads, a.head_size)
        keys, values = (torch.zeros(shape, dtype=self._weights.dtype, device=self._weights.device) for _ in range(2))
        return KeyValueCache(keys, values)

    @torch.inference_mode()
    def forward(
        self, cache: KeyValueCache, rows: slice, tokens: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> Tensor:
        """One pass; the last hidden states [B, S, H], float32, after the last norm.

        rows: the B rows of the cache. tokens: [B, S]. lengths: tokens that each row holds before.
        """
        count = len(tokens[0])
        flat = self._embedding.rows([token for row in tokens for token in row])
        x = torch.from_numpy(flat).to(self._weights.device).view(len(tokens), count, -1)
        past = torch.tensor(lengths, device=x.device)
        positions = past[:, None] + torch.arange(count, device=x.device)  # [B, S]
        spans = _spans(lengths, count, positions)
        for number, layer in enumerate(self._layers):
            keys, values = cache.keys[number, rows], cache.values[number, rows]
            x = x + self._attention(layer, self._norm(x, layer.attention_norm), keys, values, positions, spans)
            gate, up = layer.gate_up(self._norm(x, layer.ffn_norm)).chunk(2, dim=-1)
            x = x + layer.ffn_down(silu(gate) * up)
        return rms_norm(x, x.shape[-1:], self._output_norm, self._weights.epsilon)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Logits [N, V], bfloat16, of hidden states [N, H]."""
        return linear(states.to(self._weights.dtype), self._lm_head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.float(), x.shape[-1:], weight, self._weights.epsilon).to(self._weights.dtype)

    def _attention(
        self, layer: TorchLayer, x: Tensor, keys: Tensor, values: Tensor, positions: Tensor, spans: Sequence[Span]
    ) -> Tensor:
        """keys, values: the cache's rows [B, context, kv heads, D]."""
        a = self._a
        batch, count = positions.shape
        groups = a.num_heads // a.num_kv_heads
        heads = layer.qkv(x)
        if layer.qkv_bias is not None:
            heads = (heads + layer.qkv_bias).to(x.dtype)
        heads = heads.view(batch, count, -1, a.head_size)
        query, key, value = torch.split(heads, [a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=2)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        query, key = self._rotated(query, positions), self._rotated(key, positions)
        row = torch.arange(batch, device=x.device)[:, None]
        keys[row, positions] = key
        values[row, positions] = value
        # The heads that share a key are rows of one product: [B, kv heads, groups * S, D].
        query = query.view(batch, count, a.num_kv_heads, groups, a.head_size).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, a.num_kv_heads, groups * count, a.head_size)
        mixed = torch.empty_like(query)
        for span in spans:
            past_keys, past_values = (held[span.rows, : span.total].transpose(1, 2) for held in (keys, values))
            mask = span.seen.repeat(1, groups, 1)[:, None]
            mixed[span.rows] = scaled_dot_product_attention(query[span.rows], past_keys, past_values, attn_mask=mask)
        mixed = mixed.view(batch, a.num_kv_heads, groups, count, a.head_size).permute(0, 3, 1, 2, 4)
        return layer.attention_output(mixed.reshape(batch, count, -1))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, S, heads, D] turned by its positions' angles; pairs are (n, n + D / 2)."""
        first, second = x.float().chunk(2, dim=-1)
        cosines, sines = self._cosines[positions][:, :, None], self._sines[positions][:, :, None]
        turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
        return turned.to(x.dtype)


def _spans(lengths: Sequence[int], count: int, positions: Tensor) -> list[Span]:
    spans = []
    for first in range(0, len(lengths), SPAN_ROWS):
        rows = slice(first, first + SPAN_ROWS)
        total = max(lengths[rows]) + count
        spans.append(Span(rows, total, torch.arange(total, device=positions.device) <= positions[rows, :, None]))
    return spans
