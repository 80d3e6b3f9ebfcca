"""Building a directory: all or nothing, and what is wrong with a broken one is said by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime as ort
import pytest

from shared.errors import ConfigError, ModelFileError, UnsupportedModelError
from shared.models.build import BUILDER_VERSION, build_model
from shared.models.directory import MANIFEST_FILE, ModelDirectory, open_model_directory
from tests.random_decoder import DecoderShape, write_random_decoder


def silent(_what: str, _done: float) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "random.gguf"
    write_random_decoder(path, DecoderShape("qwen2"), kinds={"ffn": "Q4_0", "token_embd": "Q8_0"})
    return path


@pytest.fixture
def built(gguf_path: Path, tmp_path: Path) -> Path:
    build_model(gguf_path, tmp_path / "model", progress=silent)
    return tmp_path / "model"


def first_logits(directory: ModelDirectory) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(directory.model_path), options)
    past = {
        value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    feed = {"input_ids": np.array([[5, 6, 7]]), "attention_mask": np.ones((1, 3), np.int64)}
    return np.asarray(session.run(["logits"], feed | past)[0])


def test_the_manifest_says_what_was_built(gguf_path: Path, built: Path) -> None:
    manifest = open_model_directory(built).manifest
    assert manifest is not None
    assert manifest.source_sha256 == hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    assert manifest.accuracy_level == 4
    assert manifest.builder_version == BUILDER_VERSION
    assert manifest.tokenizer_fingerprint
    assert {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json"} <= set(manifest.files)
    assert manifest.total_bytes == sum(
        path.stat().st_size for path in built.iterdir() if path.name in manifest.files and path.name != MANIFEST_FILE
    )
    vocabulary = manifest.precisions["vocabulary"][0]
    assert (vocabulary.bits, vocabulary.block, vocabulary.symmetric) == (8, 32, True)


def test_progress_rises_to_one(gguf_path: Path, tmp_path: Path) -> None:
    seen: list[float] = []
    build_model(gguf_path, tmp_path / "model", role="draft", progress=lambda _what, done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_an_unknown_scheme_is_refused_before_anything_is_written(gguf_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="q5-odd"):
        build_model(gguf_path, tmp_path / "model", role="q5-odd", progress=silent)
    assert not any(tmp_path.iterdir())


def test_building_again_replaces_the_directory(gguf_path: Path, built: Path) -> None:
    (built / "stray").write_text("from before")
    build_model(gguf_path, built, role="q4-32", progress=silent)
    manifest = open_model_directory(built).manifest
    assert manifest is not None
    assert manifest.scheme == "q4-32"
    assert not (built / "stray").exists()


def test_an_interrupted_build_leaves_the_old_model_and_nothing_else(gguf_path: Path, built: Path) -> None:
    before = sorted(path.name for path in built.parent.iterdir())

    def interrupt(_what: str, done: float) -> None:
        if done > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_model(gguf_path, built, role="q4-32", progress=interrupt)
    manifest = open_model_directory(built).manifest
    assert manifest is not None
    assert manifest.scheme != "q4-32"
    assert sorted(path.name for path in built.parent.iterdir()) == before


def test_a_killed_build_leaves_no_model_and_the_next_one_succeeds(gguf_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom shared.models.build import build_model\n"
        "def progress(what, done):\n"
        "    if done > 0.3:\n        print('half', flush=True)\n        time.sleep(60)\n"
        "build_model(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(gguf_path), str(target)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not target.exists()
    for left in tmp_path.iterdir():
        if left.is_dir():
            with pytest.raises(ModelFileError):
                open_model_directory(left)
    build_model(gguf_path, target, progress=silent)
    open_model_directory(target)
    assert not (tmp_path / ".model.building").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", ["model.onnx.data", "model.onnx", "tokenizer.json", "genai_config.json"])
def test_a_damaged_file_is_named(built: Path, name: str, damage: Callable[[Path], None]) -> None:
    open_model_directory(built)
    damage(built / name)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=name.replace(".", r"\.")):
        open_model_directory(built)


def test_a_truncated_gguf_is_named(gguf_path: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf_path.read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match=r"short\.gguf"):
        build_model(short, tmp_path / "model", progress=silent)


def test_a_missing_tensor_and_an_unknown_architecture_are_named(tmp_path: Path) -> None:
    write_random_decoder(tmp_path / "hole.gguf", DecoderShape("qwen2"), skip="blk.1.attn_k.weight")
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_k\.weight"):
        build_model(tmp_path / "hole.gguf", tmp_path / "model", progress=silent)
    write_random_decoder(tmp_path / "gemma.gguf", DecoderShape("gemma"))
    with pytest.raises(UnsupportedModelError, match="gemma"):
        build_model(tmp_path / "gemma.gguf", tmp_path / "model", progress=silent)


def test_a_hub_cache_of_links_made_by_others_loads(built: Path, tmp_path: Path) -> None:
    """Files named by hash in blobs/, links to them in snapshots/, no manifest."""
    expected = first_logits(open_model_directory(built))
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in built.iterdir():
        if path.name != MANIFEST_FILE and not path.name.startswith("."):
            blob = blobs / hashlib.sha256(path.name.encode()).hexdigest()
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    directory = open_model_directory(snapshot)
    assert directory.manifest is None
    assert np.array_equal(first_logits(directory), expected)
    (snapshot / "model.onnx.data").unlink()
    with pytest.raises(ModelFileError, match=r"model\.onnx\.data"):
        open_model_directory(snapshot)


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "a/../../model.onnx"])
def test_a_name_that_leads_outside_is_refused(built: Path, name: str) -> None:
    (built / MANIFEST_FILE).unlink()
    config = json.loads((built / "genai_config.json").read_bytes())
    config["model"]["decoder"]["filename"] = name
    (built / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="outside"):
        open_model_directory(built)
