"""A head to begin with: made of the target (its last layer, its vocabulary), or a trained one of this target to go on
from. One of another model: `moved_head`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from edge_agent.distill.ridge import normed, ridge
from edge_agent.distill.shards import Record
from edge_agent.distill.torch_target import TargetWeights
from shared.models.gguf_source import FloatArray
from shared.models.head import HeadDirectory, HeadSpec, HeadWeights, read_head_weights
from shared.models.target_embedding import TargetEmbedding

FIT_POSITIONS: Final = 40_000
RIDGE: Final = 1e-2
"""Of the mean diagonal: keeps the fit of the fusion steady where answers are few."""
BRANCH_SCALE: Final = 0.02
"""How much of what the target's last layer adds is kept: its input here is a guess of what it was made for."""


def initial_head(
    directory: Path,
    spec: HeadSpec,
    vocabulary: npt.NDArray[np.int32],
    records: Sequence[Record],
    branch_scale: float = BRANCH_SCALE,
) -> HeadWeights:
    """Fusion: the linear map that best gives the next feature; the layer: the target's last one, without its biases.

    The head's x lives in the space of the target's features, after the last norm with weights g. A state r before that
    norm is x / g there (up to its size), so what reads the residual divides by g and what writes to it multiplies.
    """
    target = TargetWeights(directory, torch.device("cpu"), torch.float32)
    last = f"layers.{target.architecture.num_layers - 1}"
    gain = _array(target.vector("output_norm.weight"))
    fusion, size = _fit_fusion(records, TargetEmbedding(directory))
    read, write = size / gain, (branch_scale * gain)[:, None]
    qkv, gate_up = _array(target.matrix(f"{last}.qkv")), _array(target.matrix(f"{last}.gate_up"))
    query, key, value = np.split(qkv, np.cumsum([spec.num_heads, spec.num_kv_heads]) * spec.head_size)
    gate, up = np.split(gate_up, 2)
    ones = np.ones(spec.hidden_size, np.float32)
    return HeadWeights(
        embedding_norm=ones,
        feature_norm=ones,
        fusion=fusion,
        attention_norm=_array(target.vector(f"{last}.attention_norm.weight")) * read,
        query=query,
        key=key,
        value=value,
        attention_output=_array(target.matrix(f"{last}.attention_output")) * write,
        ffn_norm=_array(target.vector(f"{last}.ffn_norm.weight")) * read,
        gate=gate,
        up=up,
        ffn_down=_array(target.matrix(f"{last}.ffn_down")) * write,
        output_norm=ones * size,
        lm_head=_array(target.lm_head())[vocabulary],
        vocabulary=vocabulary,
    )


def continued_head(directory: Path, head: HeadDirectory, vocabulary: npt.NDArray[np.int32]) -> HeadWeights:
    """A head as wide as this target, which it was trained for, with these ids to propose from now on."""
    rows = projection_rows(directory, vocabulary).numpy()
    return replace(read_head_weights(head), lm_head=rows, vocabulary=vocabulary)


def projection_rows(directory: Path, ids: npt.NDArray[np.int32]) -> torch.Tensor:
    """The target's rows of these ids, [ids, H], float32."""
    return TargetWeights(directory, torch.device("cpu"), torch.float32).lm_head()[torch.from_numpy(ids).long()]


def _array(tensor: torch.Tensor) -> FloatArray:
    return tensor.numpy()


def _fit_fusion(records: Sequence[Record], embedding: TargetEmbedding) -> tuple[FloatArray, np.float32]:
    """Ridge regression of feature i + 1 on embedding i + 1 and feature i, both normed; and the features' mean size."""
    sources, wanted, count = [], [], 0
    for record in records:
        features = record.states.astype(np.float32)
        embeddings = embedding.rows(record.tokens[1:-1].tolist())
        sources.append(np.concatenate([normed(embeddings), normed(features[:-1])], axis=1))
        wanted.append(features[1:])
        count += len(features) - 1
        if count >= FIT_POSITIONS:
            break
    x, y = np.concatenate(sources), np.concatenate(wanted)
    return ridge(x, y, RIDGE), np.sqrt(np.square(y).mean())
