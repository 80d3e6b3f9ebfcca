"""Sequences stepped together give what each gives alone, whatever joins, leaves or moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.errors import ContextLengthError
from shared.models.build import build_model
from shared.onnx_batch import BatchRow, OnnxBatchModel
from shared.onnx_lm import OnnxModel
from tests.random_decoder import DecoderShape, write_random_decoder

CONTEXT = 64
NUM_ROWS = 5


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("batch")
    write_random_decoder(root / "random.gguf", DecoderShape("qwen2"))
    build_model(root / "random.gguf", root / "model", progress=lambda stage, done: None)
    return root / "model"


@pytest.fixture
def batch(directory: Path) -> OnnxBatchModel:
    return OnnxBatchModel.load(directory, CONTEXT, NUM_ROWS, num_threads=1)


def assert_rows_match(batch: OnnxBatchModel, rows: list[BatchRow], directory: Path) -> None:
    """The next logits of every row are those of a sequence that was fed its tokens at once."""
    model = OnnxModel(directory, context_length=CONTEXT, num_threads=1)
    logits = batch.decode_batch(rows, [7] * len(rows)).copy()
    for row, mine in zip(rows, logits, strict=True):
        alone = model.new_cache()
        theirs = alone.forward(list(row.tokens), 1)[0]
        # Row counts differ in the last bits; a cache mixed up differs by far more.
        assert np.abs(mine - theirs).max() < 0.05 * np.ptp(theirs)
        row.truncate(len(row.tokens) - 1)


def test_any_choice_of_rows_in_any_order(batch: OnnxBatchModel, directory: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [batch.new_cache() for _ in range(NUM_ROWS)]
    for number, row in enumerate(rows):
        row.forward(rng.integers(0, 200, 4 + 3 * number).tolist(), 1)
    for _ in range(20):
        chosen = rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS + 1)].tolist()
        before = {number: list(row.tokens) for number, row in enumerate(rows)}
        tokens = rng.integers(0, 200, len(chosen)).tolist()
        batch.decode_batch([rows[number] for number in chosen], tokens)
        for number, token in zip(chosen, tokens, strict=True):
            before[number].append(token)
        assert {number: list(row.tokens) for number, row in enumerate(rows)} == before
    assert sorted(row.index for row in rows) == list(range(NUM_ROWS))
    assert_rows_match(batch, rows, directory)


def test_rows_move_for_a_batch_and_passes_of_their_own_go_on(batch: OnnxBatchModel, directory: Path) -> None:
    rows = [batch.new_cache() for _ in range(NUM_ROWS)]
    for number, row in enumerate(rows):
        row.forward([number + 10, 20, 30], 0)
    batch.decode_batch([rows[4], rows[2]], [5, 6])
    assert sorted(rows[number].index for number in (4, 2)) == [0, 1]
    for row in rows:
        row.forward([40, 41, 42], 3)
        row.truncate(len(row.tokens) - 2)
    assert_rows_match(batch, [rows[3], rows[0], rows[4]], directory)


def test_a_full_row_stops_the_batch_and_changes_nothing(batch: OnnxBatchModel) -> None:
    full, other = batch.new_cache(), batch.new_cache()
    full.forward([1] * CONTEXT, 0)
    other.forward([1, 2], 0)
    with pytest.raises(ContextLengthError):
        batch.decode_batch([full, other], [3, 3])
    with pytest.raises(ContextLengthError):
        full.forward([1], 1)
    assert list(other.tokens) == [1, 2]


def test_there_are_no_more_rows_than_memory(batch: OnnxBatchModel) -> None:
    for _ in range(NUM_ROWS):
        batch.new_cache()
    with pytest.raises(LookupError):
        batch.new_cache()


@pytest.mark.parametrize(("tokens", "num_logits"), [([], 0), ([1], 2), ([1], -1)])
def test_a_pass_that_makes_no_sense_is_refused(batch: OnnxBatchModel, tokens: list[int], num_logits: int) -> None:
    row = batch.new_cache()
    with pytest.raises(ValueError, match="num_logits"):
        row.forward(tokens, num_logits)
    with pytest.raises(ValueError, match="length"):
        row.truncate(1)
