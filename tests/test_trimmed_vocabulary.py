"""A model that knows the first ids only answers like the whole one among them, and says nothing of the others."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import pytest

from shared.logits_memory import UNKNOWN_LOGIT, LogitsMemory
from shared.models.build import build_model
from shared.models.quantise import Precision
from shared.models.scheme import Scheme, TensorClass
from shared.onnx_lm import OnnxModel
from shared.sampling import Sampler, SamplingParams
from tests.random_decoder import DecoderShape, write_random_decoder

NUM_IDS = 100


def load(directory: Path, num_ids: int | None) -> OnnxModel:
    scheme = Scheme("trimmed", 4, dict.fromkeys(TensorClass, Precision(8, 32, True)), num_ids=num_ids)
    build_model(directory / "random.gguf", directory / "model", role=scheme, progress=lambda _what, _done: None)
    return OnnxModel(directory / "model", context_length=64, num_threads=1)


@pytest.fixture
def gguf_directory(tmp_path: Path) -> Path:
    write_random_decoder(tmp_path / "random.gguf", DecoderShape("qwen2"))
    return tmp_path


def test_its_logits_are_as_wide_as_the_whole_vocabulary(gguf_directory: Path) -> None:
    ids = np.random.default_rng(1).integers(3, 250, 12).tolist()
    whole = load(gguf_directory, None).new_cache().forward(ids, 3).copy()
    trimmed = load(gguf_directory, NUM_IDS).new_cache()
    for num_logits in (3, 1, 2):
        trimmed.truncate(0)
        logits = trimmed.forward(ids, num_logits)
        assert logits.shape == (num_logits, trimmed.vocab_size)
        assert np.allclose(logits[:, :NUM_IDS], whole[-num_logits:, :NUM_IDS], atol=1e-5)
        assert (logits[:, NUM_IDS:] == UNKNOWN_LOGIT).all()


def test_an_unknown_id_is_never_drawn(gguf_directory: Path) -> None:
    logits = load(gguf_directory, NUM_IDS).new_cache().forward([5, 6, 7], 1)[0]
    params = SamplingParams(temperature=2.0, repetition_penalty=1.5, logit_bias={240: 100.0})
    distribution = Sampler(params, prompt=[250, 20]).distribution(logits)
    assert distribution.ids.max() < NUM_IDS


def test_ids_may_be_any() -> None:
    known = np.array([2, 3, 7], np.int32)
    memory = LogitsMemory(known, 9, np.float32)
    narrow = memory.narrow(1, 2)
    narrow[:] = np.arange(6).reshape(1, 2, 3)
    wide = memory.widened(narrow)[0]
    assert (wide[:, known] == narrow[0]).all()
    assert (np.delete(wide, known, axis=1) == UNKNOWN_LOGIT).all()
