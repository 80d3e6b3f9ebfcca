"""A head that was trained for another model with the same tokens, fitted between this target's features and itself.

A small model's head has seen far more answers than a larger model can give in the same time. What it has learned is in
its layer, in the space of the small model's features; and two models of a family feel much the same about a token. So
the layer, the projection and the ids stay as they are, and only what it reads and says of features is fitted:

- fusion reads the target's embeddings and features, by the linear maps that best give what it read before;
- expansion says the head's own feature as a target's one: the linear map from the small model's features to the
  target's, bent so that fusion reads from it exactly what it read before.

The head stays as wide as it was, and as quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from edge_agent.distill.ridge import normed, ridge, sizes
from edge_agent.distill.shards import Record
from edge_agent.verifier import PREFILL_CHUNK
from shared.models.gguf_source import FloatArray
from shared.models.head import HeadDirectory, HeadWeights, read_head_weights
from shared.models.target_embedding import TargetEmbedding
from shared.onnx_lm import OnnxHiddenStateLM, OnnxModel

FIT_POSITIONS: Final = 40_000
RIDGE: Final = 1e-3
"""Of the mean diagonal."""


class _Pairs(NamedTuple):
    """The same positions as both models see them, [n, T] and [n, H] each, float32."""

    features: FloatArray
    former_features: FloatArray
    embeddings: FloatArray
    former_embeddings: FloatArray


def moved_head(
    head: HeadDirectory, made_for: Path, target: Path, records: Sequence[Record], num_threads: int
) -> HeadWeights:
    """The head's weights for `HeadSpec.of_head(head, target)`. made_for: the built model that it was trained for.

    Raises:
        ModelFileError, UnsupportedModelError: a directory isn't whole, or not of Souschef's making.
    """
    weights = read_head_weights(head)
    pairs = _pairs(made_for, target, records, weights.vocabulary, num_threads)
    of_embeddings, of_features = np.split(weights.fusion, 2, axis=1)
    of_embeddings = of_embeddings * weights.embedding_norm
    of_features = of_features * weights.feature_norm
    reads_embeddings = ridge(normed(pairs.embeddings), normed(pairs.former_embeddings) @ of_embeddings.T, RIDGE)
    reads_features = ridge(normed(pairs.features), normed(pairs.former_features) @ of_features.T, RIDGE)
    expansion = ridge(pairs.former_features, pairs.features, RIDGE)
    # Fusion divides by the feature's size: it reads the same if size and direction are kept.
    size = sizes(pairs.former_features @ expansion.T).mean() / sizes(pairs.former_features).mean()
    expansion += np.linalg.pinv(reads_features) @ (size * of_features - reads_features @ expansion)
    ones = np.ones(pairs.features.shape[1], np.float32)
    return replace(
        weights,
        embedding_norm=ones,
        feature_norm=ones,
        fusion=np.concatenate([reads_embeddings, reads_features], axis=1),
        expansion=expansion.astype(np.float32),
    )


def _pairs(made_for: Path, target: Path, records: Sequence[Record], vocabulary: np.ndarray, num_threads: int) -> _Pairs:
    """Features of the records' first positions; embeddings of their tokens, and of each id of the head once."""
    context_length = max(len(record.tokens) for record in records)
    lm = OnnxModel(made_for, context_length=context_length, num_threads=num_threads).new_cache_with_hidden_states()
    features, former, tokens, count = [], [], vocabulary.tolist(), 0
    for record in records:
        features.append(record.states.astype(np.float32))
        former.append(_features(lm, record.tokens[:-1].tolist()))
        tokens += record.tokens[1:].tolist()
        count += len(record.states)
        if count >= FIT_POSITIONS:
            break
    return _Pairs(
        np.concatenate(features),
        np.concatenate(former),
        TargetEmbedding(target).rows(tokens),
        TargetEmbedding(made_for).rows(tokens),
    )


def _features(lm: OnnxHiddenStateLM, tokens: Sequence[int]) -> FloatArray:
    lm.truncate(0)
    for first in range(0, len(tokens), PREFILL_CHUNK):
        lm.forward(tokens[first : first + PREFILL_CHUNK], 0)
    return lm.hidden_states(0, len(tokens)).copy()
