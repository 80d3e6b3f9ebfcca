"""Sequences that go through one pass give what each gives alone, whatever joins, leaves or changes its lane."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from shared.errors import ContextLengthError, UnsupportedModelError
from shared.models.build import build_model
from shared.models.lanes import with_lanes
from shared.onnx_batch import BatchSequence, OnnxBatchModel
from shared.onnx_lm import OnnxModel
from tests.random_decoder import DecoderShape, write_random_decoder

CONTEXT = 64
NUM_SEQUENCES = 5


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With query, key and value as one tensor, and as three."""
    root = tmp_path_factory.mktemp(request.param)
    write_random_decoder(root / "random.gguf", DecoderShape(request.param))
    build_model(root / "random.gguf", root / "model", progress=lambda stage, done: None)
    return root / "model"


@pytest.fixture
def model(directory: Path) -> OnnxBatchModel:
    return OnnxBatchModel(directory, context_length=CONTEXT, max_batch=NUM_SEQUENCES - 1, num_threads=1)


def filled(model: OnnxBatchModel) -> list[BatchSequence]:
    """Sequences of 4, 7, 10, … tokens."""
    rng = np.random.default_rng(1)
    sequences = [model.new_cache() for _ in range(NUM_SEQUENCES)]
    for number, sequence in enumerate(sequences):
        sequence.forward(rng.integers(0, 200, 4 + 3 * number).tolist(), 1)
    return sequences


def assert_near(mine: np.ndarray, theirs: np.ndarray) -> None:
    """Row counts differ in the last bits; a cache mixed up differs by far more."""
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() < 0.05 * np.ptp(theirs)


def test_a_sequence_alone_is_that_of_the_plain_graph_bit_for_bit(model: OnnxBatchModel, directory: Path) -> None:
    alone = OnnxModel(directory, context_length=CONTEXT, num_threads=1).new_cache()
    sequence = model.new_cache()
    for tokens, num_logits in (([10, 20, 30, 40], 0), ([50, 60], 2), ([70], 1), ([80, 90, 100], 1)):
        assert np.array_equal(sequence.forward(tokens, num_logits), alone.forward(tokens, num_logits))


def test_any_choice_of_sequences_in_any_order_with_any_number_of_tokens(model: OnnxBatchModel, directory: Path) -> None:
    rng = np.random.default_rng(2)
    sequences = filled(model)
    plain = OnnxModel(directory, context_length=CONTEXT, num_threads=1)
    for _ in range(20):
        chosen = rng.permutation(NUM_SEQUENCES)[: rng.integers(1, model.max_batch + 1)].tolist()
        before = [list(sequence.tokens) for sequence in sequences]
        tokens = [rng.integers(0, 200, rng.integers(1, 6)).tolist() for _ in chosen]
        wanted = [int(rng.integers(0, len(new) + 1)) for new in tokens]
        logits = [each.copy() for each in model.forward_batch([sequences[i] for i in chosen], tokens, wanted)]
        for number, new, count, mine in zip(chosen, tokens, wanted, logits, strict=True):
            whole = plain.new_cache().forward([*before[number], *new], len(new))[len(new) - count :]
            assert mine.shape == whole.shape
            if count:
                assert_near(mine, whole)
            assert list(sequences[number].tokens) == [*before[number], *new]
            sequences[number].truncate(len(before[number]) + int(rng.integers(0, 2)))
        for number in set(range(NUM_SEQUENCES)) - set(chosen):
            assert list(sequences[number].tokens) == before[number]


def test_passes_of_their_own_between_common_ones_change_nothing(model: OnnxBatchModel, directory: Path) -> None:
    sequences = filled(model)
    model.forward_batch([sequences[4], sequences[2]], [[5], [6, 7]], [1, 2])
    for sequence in sequences:
        sequence.forward([40, 41, 42], 3)
        sequence.truncate(len(sequence.tokens) - 2)
    chosen = [sequences[3], sequences[0], sequences[4]]
    logits = [each.copy() for each in model.forward_batch(chosen, [[7], [7, 8], [7]], [1, 1, 1])]
    plain = OnnxModel(directory, context_length=CONTEXT, num_threads=1)
    for sequence, mine in zip(chosen, logits, strict=True):
        assert_near(mine, plain.new_cache().forward(list(sequence.tokens), 1))


def test_a_full_sequence_stops_the_batch_and_changes_nothing(model: OnnxBatchModel) -> None:
    full, other = model.new_cache(), model.new_cache()
    full.forward([1] * (CONTEXT - 1), 0)
    other.forward([1, 2], 0)
    with pytest.raises(ContextLengthError):
        model.forward_batch([full, other], [[3, 4], [3]], [1, 1])
    assert len(full.tokens) == CONTEXT - 1
    assert list(other.tokens) == [1, 2]
    model.forward_batch([full, other], [[3], [3]], [1, 1])
    assert len(full.tokens) == CONTEXT


def test_another_attention_is_refused(directory: Path) -> None:
    graph = onnx.load(directory / "model.onnx", load_external_data=False)
    for node in graph.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.op_type = "MultiHeadAttention"
    with pytest.raises(UnsupportedModelError, match="several sequences"):
        with_lanes(graph, 2, "logits")


@pytest.mark.parametrize(("tokens", "num_logits"), [([], 0), ([1], 2), ([1], -1)])
def test_a_pass_that_makes_no_sense_is_refused(model: OnnxBatchModel, tokens: list[int], num_logits: int) -> None:
    sequence = model.new_cache()
    with pytest.raises(ValueError, match="num_logits"):
        sequence.forward(tokens, num_logits)
    with pytest.raises(ValueError, match="length"):
        sequence.truncate(1)
