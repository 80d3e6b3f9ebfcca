"""A draft head's directory: what its graph computes, whose it is, and what is said of a broken one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime as ort
import pytest

from shared.errors import ModelFileError, TokenizerMismatchError, UnsupportedModelError
from shared.models.build import build_model
from shared.models.directory import MANIFEST_FILE, Manifest, open_model_directory
from shared.models.head import HeadSpec, HeadWeights, open_head, read_head_weights, write_head
from shared.models.target_embedding import TargetEmbedding
from tests.random_decoder import DecoderShape, write_random_decoder
from tests.random_head import as_stored, random_head, reference_head

BUFFER = 48


@dataclass(frozen=True)
class Built:
    """A random target, and a random head for it whose activations stay floats."""

    target: Path
    tensors: dict[str, np.ndarray]
    spec: HeadSpec
    weights: HeadWeights
    head: Path


def moved(spec: HeadSpec) -> HeadSpec:
    """A head of two thirds of its target's size, with other attention heads."""
    return replace(spec, hidden_size=48, num_heads=6, num_kv_heads=3, head_size=16, is_moved=True)


@pytest.fixture(scope="module", params=["as wide", "moved"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    path = tmp_path_factory.mktemp("head")
    tensors = write_random_decoder(path / "random.gguf", DecoderShape("qwen2"), kinds={"token_embd": "Q8_0"})
    build_model(path / "random.gguf", path / "target", progress=lambda _what, _done: None)
    spec = HeadSpec.of_target(path / "target")
    if request.param == "moved":
        spec = moved(spec)
    weights = random_head(spec)
    write_head(path / "head", weights, spec, accuracy_level=0)
    return Built(path / "target", tensors, spec, weights, path / "head")


class Runner:
    """A session over one buffer that is past and present at once."""

    def __init__(self, head: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(open_head(head).model_path), options)
        self.binding = self.session.io_binding()
        for value in self.session.get_inputs():
            if value.name.startswith("past"):
                buffer = np.zeros((1, value.shape[1], BUFFER, value.shape[3]), np.float32)
                cache = ort.OrtValue.ortvalue_from_numpy(buffer)
                self.binding.bind_ortvalue_input(value.name, cache)
                self.binding.bind_ortvalue_output(value.name.replace("past_key_values", "present"), cache)

    def step(self, embeddings: np.ndarray, features: np.ndarray, past: int) -> tuple[np.ndarray, np.ndarray]:
        """(logits [S, V], own features [S, H]) of S positions after `past`."""
        self.binding.bind_cpu_input("embeddings", embeddings[np.newaxis].astype(np.float32))
        self.binding.bind_cpu_input("features", features[np.newaxis].astype(np.float32))
        self.binding.bind_cpu_input("attention_mask", np.ones((1, past + len(embeddings)), np.int64))
        for name in ("logits", "features_out"):
            self.binding.bind_output(name)
        self.session.run_with_iobinding(self.binding)
        *_, logits, own = self.binding.get_outputs()  # the caches were bound first
        return logits.numpy()[0], own.numpy()[0]


def test_a_head_equals_its_float64_reference_with_a_past_and_without(built: Built) -> None:
    rng = np.random.default_rng(1)
    embeddings, features = rng.standard_normal((2, 21, built.spec.feature_size))
    logits, own = reference_head(as_stored(built.weights), built.spec, embeddings, features)
    runner = Runner(built.head)
    bounds = (0, 9, 14, 15, 21)
    for start, stop in pairwise(bounds):
        found_logits, found_own = runner.step(embeddings[start:stop], features[start:stop], start)
        assert np.abs(found_logits - logits[start:stop]).max() < 1e-4 * logits.std()
        assert np.abs(found_own - own[start:stop]).max() < 1e-4 * own.std()


def test_a_wrong_position_would_be_seen(built: Built) -> None:
    """The tolerance above is far smaller than what a shift by one position changes."""
    embeddings, features = np.random.default_rng(1).standard_normal((2, 6, built.spec.feature_size))
    logits, _ = reference_head(as_stored(built.weights), built.spec, embeddings, features)
    shifted, _ = Runner(built.head).step(embeddings, features[::-1], 0)
    assert np.abs(shifted - logits).max() > 0.1 * logits.std()


def test_the_embedding_is_the_targets(built: Built) -> None:
    embedding = TargetEmbedding(built.target)
    ids = [5, 0, 259, 5]
    assert embedding.hidden_size == built.spec.feature_size
    assert np.allclose(embedding.rows(ids), built.tensors["token_embd.weight"][ids], atol=1e-6)


def test_the_manifest_ties_the_head_to_its_target(built: Built) -> None:
    target = open_model_directory(built.target).manifest
    head = open_head(built.head, target=built.target)
    assert target is not None
    assert head.manifest.role == "head"
    assert head.manifest.target_sha256 == target.source_sha256
    assert np.array_equal(head.vocabulary, built.weights.vocabulary)
    assert head.manifest.num_ids == len(head.vocabulary)


def other_words(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"tokenizer_fingerprint": "0" * 64})


def other_weights(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"source_sha256": "0" * 64})


def other_size(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"architecture": manifest.architecture.model_copy(update={"hidden_size": 128})})


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (other_words, TokenizerMismatchError, "tokens"),
        (other_weights, UnsupportedModelError, "trained for random qwen2"),
        (other_size, UnsupportedModelError, "hidden states of 64"),
    ],
)
def test_a_head_of_another_target_is_refused(
    built: Built, change: Callable[[Manifest], Manifest], error: type[Exception], said: str
) -> None:
    manifest = open_model_directory(built.target).manifest
    assert manifest is not None
    head = open_head(built.head).manifest
    with pytest.raises(error, match=said):
        head.require_target(change(manifest), built.head)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "vocabulary.npy", MANIFEST_FILE])
def test_a_damaged_head_is_named(built: Built, tmp_path: Path, name: str) -> None:
    write_head(tmp_path / "head", built.weights, built.spec)
    file = tmp_path / "head" / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
        open_head(tmp_path / "head")
    file.unlink()
    with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
        open_head(tmp_path / "head")


def test_what_was_written_is_read_back(built: Built) -> None:
    head = open_head(built.head)
    read, stored = read_head_weights(head).arrays(), as_stored(built.weights).arrays()
    assert read.keys() == stored.keys()
    for name in stored:
        np.testing.assert_array_equal(read[name], stored[name], name)
    spec = HeadSpec.of_head(head, built.target)
    np.testing.assert_array_equal(spec.rotary.cosines, built.spec.rotary.cosines)
    assert replace(spec, rotary=built.spec.rotary) == built.spec


def test_a_head_of_the_first_builds_is_as_wide_as_its_target(built: Built, tmp_path: Path) -> None:
    """Their manifests name one size."""
    spec = HeadSpec.of_target(built.target)
    now = write_head(tmp_path / "head", random_head(spec), spec)
    manifest = json.loads(now.model_dump_json(exclude={"feature_size", "is_moved"}))
    (tmp_path / "head" / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert open_head(tmp_path / "head", target=built.target).manifest == now


def test_a_target_is_no_head(built: Built) -> None:
    with pytest.raises(ModelFileError, match="not a draft head's manifest"):
        open_head(built.target)


def test_weights_that_do_not_fit_are_refused_by_name(built: Built, tmp_path: Path) -> None:
    narrow = replace(built.weights, fusion=built.weights.fusion[:, :40])
    with pytest.raises(ValueError, match="fusion"):
        write_head(tmp_path / "head", narrow, built.spec)
    unsorted = replace(built.weights, vocabulary=built.weights.vocabulary[::-1])
    with pytest.raises(ValueError, match="vocabulary"):
        write_head(tmp_path / "head", unsorted, built.spec)
    with pytest.raises(ValueError, match="expansion"):
        write_head(tmp_path / "head", built.weights, replace(built.spec, is_moved=not built.spec.is_moved))
    assert not any(tmp_path.iterdir())
