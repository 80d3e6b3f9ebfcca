"""Weighing rounding errors by what each input is worth: less error where it counts, and the same function."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import pytest

from benchmarks.importance import measure
from shared.models.build import build_model
from shared.models.gguf_source import FloatArray, GgufSource
from shared.models.importance import Importance
from shared.models.quantise import Precision, dequantise, quantise
from shared.models.scheme import TensorClass
from shared.onnx_lm import OnnxModel
from tests.random_decoder import DecoderShape, write_random_decoder

SHAPE = DecoderShape("qwen2")
LAYER_KINDS = [kind for kind in TensorClass if kind is not TensorClass.VOCABULARY]


def silent(_what: str, _done: float) -> None:
    """No progress."""


def uneven(columns: int, seed: int = 0) -> FloatArray:
    """Mean squares over five orders of magnitude, as real inputs have them."""
    return np.exp(np.random.default_rng(seed).normal(0, 2.5, (SHAPE.num_layers, columns))).astype(np.float32)


@pytest.fixture
def importance() -> Importance:
    columns = dict.fromkeys(LAYER_KINDS, SHAPE.hidden) | {TensorClass.FFN_DOWN: SHAPE.ffn}
    return Importance({kind: uneven(size) for kind, size in columns.items()})


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    path = tmp_path / "random.gguf"
    write_random_decoder(path, SHAPE)
    return path


def test_it_is_kept_within_half_a_step(tmp_path: Path, importance: Importance) -> None:
    importance.save("abc", tmp_path)
    kept = Importance.of_source("abc", tmp_path)
    for kind, squares in importance.squares.items():
        relative = squares / squares.mean(axis=-1, keepdims=True)
        assert np.abs(np.log2(kept.squares[kind] / relative)).max() <= 0.5 / 8 + 1e-5
    assert not Importance.of_source("unknown", tmp_path).squares


def test_the_error_falls_where_it_counts() -> None:
    weights = np.random.default_rng(5).standard_normal((24, 256)).astype(np.float32)
    squares = uneven(256)[0]

    def error(importance: FloatArray | None) -> float:
        miss = dequantise(quantise(weights, Precision(4, 64, False), importance)) - weights
        return float((np.square(miss) * squares).sum())

    assert error(squares) < 0.9 * error(None)


def test_scaling_changes_nothing_but_the_rounding(tmp_path: Path, gguf_path: Path, importance: Importance) -> None:
    ids = np.random.default_rng(1).integers(3, 200, 12).tolist()
    rows = []
    for name, known in (("plain", Importance({})), ("scaled", importance)):
        build_model(gguf_path, tmp_path / name, role="q8", progress=silent, importance=known)
        lm = OnnxModel(tmp_path / name, context_length=64, num_threads=1).new_cache()
        rows.append(lm.forward(ids, len(ids)).copy())
    # Rounding differs; a factor that isn't undone would change everything.
    assert np.abs(rows[0] - rows[1]).max() < 0.1 * np.ptp(rows[0])


def test_a_tensor_scaled_in_parts_is_the_tensor_scaled(gguf_path: Path) -> None:
    tensor = GgufSource(gguf_path).raw("blk.0.attn_q.weight")
    factors = uneven(tensor.columns)[1]
    parts = np.concatenate([part.to_float() for part in tensor.scaled(factors).chunks(7 * tensor.columns)])
    assert np.allclose(parts, tensor.to_float() * factors, rtol=1e-6)
    assert tensor.scaled(np.ones_like(factors)) is tensor


def test_measuring_finds_every_input_of_every_layer(gguf_path: Path) -> None:
    squares = measure(gguf_path, 300).squares
    assert set(squares) == set(LAYER_KINDS)
    for kind, measured in squares.items():
        assert measured.shape == (SHAPE.num_layers, SHAPE.ffn if kind is TensorClass.FFN_DOWN else SHAPE.hidden)
        assert (measured > 0).all()
