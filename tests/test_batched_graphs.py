"""Several sequences with several new tokens each in one pass: the same logits as one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.batched_verify import ScatterModel, SlotModel
from shared.models.build import build_model
from shared.onnx_batch import OnnxBatchModel
from shared.onnx_lm import OnnxModel
from tests.random_decoder import DecoderShape, write_random_decoder

LENGTHS = np.array([9, 30, 17])


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With query, key and value as one tensor, and as three."""
    folder = tmp_path_factory.mktemp(request.param)
    write_random_decoder(folder / "random.gguf", DecoderShape(request.param))
    build_model(folder / "random.gguf", folder / "model", role="q4", progress=lambda what, done: None)
    return folder / "model"


@pytest.mark.parametrize("kind", [ScatterModel, SlotModel])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 4])
def test_one_pass_for_all_says_what_passes_for_each_say(
    kind: type[ScatterModel | SlotModel], batch: int, new: int, directory: Path
) -> None:
    model = OnnxModel(directory, context_length=64, num_threads=1)
    grouped = OnnxBatchModel(model, len(LENGTHS))
    rows = [grouped.new_cache() for _ in LENGTHS]
    for row, length in zip(rows, LENGTHS, strict=True):
        row.forward(list(range(10, 10 + length)), 0)
    caches = [buffer for pair in zip(grouped._keys, grouped._values, strict=True) for buffer in pair]
    tokens = np.arange(batch * new).reshape(batch, new) + 50
    together = kind(directory, caches, 1).run(tokens, LENGTHS[:batch]).copy()
    alone = [row.forward(ids, new).copy() for row, ids in zip(rows, tokens.tolist(), strict=False)]
    spread = float(np.std(alone))
    assert np.abs(together - np.array(alone)).max() < 0.05 * spread
