"""The comparison with llama.cpp: a good build of a small model reads as llama.cpp does, a bad one is seen."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import pytest

from benchmarks.llama_reader import LlamaReader
from benchmarks.quality import Reading, Row, compare, read, table
from shared.models.build import build_model
from shared.onnx_lm import OnnxModel
from tests.random_decoder import DecoderShape, reference_logits, write_random_decoder

IDS = np.random.default_rng(3).integers(3, 250, 200).tolist()
ROW = Row("good", 1.01, 0.95, {"text": (1.01, 0.95)}, 1.0, 20.0, 16.0, 900.0)


def our_reading(gguf_path: Path, directory: Path, scheme: str) -> Reading:
    build_model(gguf_path, directory, role=scheme, progress=lambda _what, _done: None)
    return read(OnnxModel(directory, context_length=256, num_threads=1).new_cache(), IDS)


def test_llama_and_we_read_alike_and_worse_codes_show(tmp_path: Path) -> None:
    shape = DecoderShape("qwen2")
    tensors = write_random_decoder(tmp_path / "random.gguf", shape)
    llama = LlamaReader(tmp_path / "random.gguf", context_length=256, threads=1)
    try:
        theirs = read(llama, IDS)
        llama.clear()
        assert np.array_equal(read(llama, IDS).best, theirs.best)
    finally:
        llama.close()
    assert np.mean(theirs.best == reference_logits(shape, tensors, IDS)[:-1].argmax(axis=-1)) > 0.95
    good = compare(our_reading(tmp_path / "random.gguf", tmp_path / "good", "q8"), theirs)
    bad = compare(our_reading(tmp_path / "random.gguf", tmp_path / "bad", "q4"), theirs)
    assert good[0] == pytest.approx(1, abs=0.1)
    assert good[1] > bad[1] + 0.1


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(RuntimeError, match=r"odd\.gguf"):
        LlamaReader(tmp_path / "odd.gguf", context_length=256, threads=1)


def test_perplexity_and_agreement_of_two_readings() -> None:
    theirs = Reading(np.array([1, 2, 3, 4]), np.log([0.5, 0.5, 0.5, 0.5]))
    ours = Reading(np.array([1, 2, 3, 5]), np.log([0.5, 0.5, 0.25, 0.25]))
    ratio, agreement = compare(ours, theirs)
    assert ratio == pytest.approx(2**0.5)
    assert agreement == 0.75


def test_the_table_marks_a_row_that_another_one_beats() -> None:
    worse = replace(ROW, scheme="worse", perplexity_ratio=1.02)
    smaller = replace(worse, scheme="smaller", size_ratio=0.8)
    lines = table([ROW, worse, smaller]).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["", "beaten by good", ""]
    assert "| +1.00% | 0.950 | +1.0% / 0.950 | 1.000 | 20.0 | 16.0 | 900 |" in lines[2]
