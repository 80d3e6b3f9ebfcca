"""Several sequences with several new tokens each in one pass: the same logits as one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.batched_verify import ScatterModel, stacked
from shared.models.build import build_model
from shared.onnx_batch import OnnxBatchModel
from tests.random_decoder import DecoderShape, write_random_decoder

LENGTHS = np.array([9, 30, 17])


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With query, key and value as one tensor, and as three."""
    folder = tmp_path_factory.mktemp(request.param)
    write_random_decoder(folder / "random.gguf", DecoderShape(request.param))
    build_model(folder / "random.gguf", folder / "model", role="q4", progress=lambda what, done: None)
    return folder / "model"


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 4])
def test_one_pass_for_all_says_what_passes_for_each_say(batch: int, new: int, directory: Path) -> None:
    model = OnnxBatchModel(directory, context_length=64, max_batch=len(LENGTHS), num_threads=1)
    rows = [model.new_cache() for _ in LENGTHS]
    for row, length in zip(rows, LENGTHS, strict=True):
        row.forward(list(range(10, 10 + length)), 0)
    tokens = np.arange(batch * new).reshape(batch, new) + 50
    together = ScatterModel(directory, stacked(rows), 1).run(tokens, LENGTHS[:batch]).copy()
    alone = [row.forward(ids, new).copy() for row, ids in zip(rows, tokens.tolist(), strict=False)]
    spread = float(np.std(alone))
    assert np.abs(together - np.array(alone)).max() < 0.05 * spread
