"""Draft heads of random weights, and the same heads computed in float64 with plain numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shared.models.head import HEAD_PRECISION, HeadSpec, HeadWeights
from shared.models.quantise import dequantise, quantise

Array = np.ndarray


def random_head(spec: HeadSpec, *, ffn_size: int = 96, num_ids: int = 64, seed: int = 0) -> HeadWeights:
    """Weights of a size that keeps the signal's scale; a random subset of the ids."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name, shape in HeadWeights.shapes(spec, ffn_size, num_ids).items():
        if name == "vocabulary":
            arrays[name] = np.sort(rng.choice(spec.vocab_size, num_ids, replace=False)).astype(np.int32)
        elif len(shape) == 1:
            arrays[name] = (1 + 0.2 * rng.standard_normal(shape)).astype(np.float32)
        else:
            arrays[name] = (rng.standard_normal(shape) * 2 / np.sqrt(shape[1])).astype(np.float32)
    return HeadWeights(**arrays)


def as_stored(weights: HeadWeights) -> HeadWeights:
    """The weights after a pass through quantisation."""

    def stored(name: str) -> Array:
        matrix = getattr(weights, name)
        return dequantise(quantise(matrix, HEAD_PRECISION.fitted(matrix.shape[1])))

    matrices = [name for name, array in weights.arrays().items() if array.ndim == 2]
    return replace(weights, **{name: stored(name) for name in matrices})


def reference_head(weights: HeadWeights, spec: HeadSpec, embeddings: Array, features: Array) -> tuple[Array, Array]:
    """(logits [S, V], the head's own features [S, T]) of positions 0 to S - 1, float64."""
    w = {name: array.astype(np.float64) for name, array in weights.arrays().items()}
    normed = [_rms(embeddings, w["embedding_norm"], spec), _rms(features, w["feature_norm"], spec)]
    x = np.concatenate(normed, axis=-1) @ w["fusion"].T
    x = x + _attention(w, spec, _rms(x, w["attention_norm"], spec))
    normed_x = _rms(x, w["ffn_norm"], spec)
    gate, up = normed_x @ w["gate"].T, normed_x @ w["up"].T
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w["ffn_down"].T
    features_out = x @ w["expansion"].T if "expansion" in w else x
    return _rms(x, w["output_norm"], spec) @ w["lm_head"].T, features_out


def _attention(w: dict[str, Array], spec: HeadSpec, x: Array) -> Array:
    """Each query attends to the positions up to its own, key heads shared among neighbouring query heads."""
    length, size = len(x), spec.head_size
    query, key, value = ((x @ w[name].T).reshape(length, -1, size) for name in ("query", "key", "value"))
    query, key = _rotate(query, spec), _rotate(key, spec)
    mixed = np.empty_like(query)
    for head in range(spec.num_heads):
        shared = head * spec.num_kv_heads // spec.num_heads
        for position in range(length):
            scores = key[: position + 1, shared] @ query[position, head] / np.sqrt(size)
            shares = np.exp(scores - scores.max())
            mixed[position, head] = shares / shares.sum() @ value[: position + 1, shared]
    return mixed.reshape(length, -1) @ w["attention_output"].T


def _rotate(x: Array, spec: HeadSpec) -> Array:
    cosines, sines = (table[: len(x), None].astype(np.float64) for table in (spec.rotary.cosines, spec.rotary.sines))
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def _rms(x: Array, weight: Array, spec: HeadSpec) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + spec.rms_epsilon) * weight
