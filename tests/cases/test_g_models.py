"""Section G: models and the runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shared.chat_template import ChatTemplate
from shared.errors import ModelError, ModelFileError
from shared.models.build import build_model, default_scheme
from shared.models.cache import ModelCache
from shared.models.directory import open_model_directory
from shared.models.pull import pull
from shared.onnx_batch import OnnxBatchModel
from shared.onnx_lm import OnnxModel
from tests.random_decoder import DecoderShape, write_random_decoder
from tests.servers import chat, complete, error_of, run_server
from tests.toy_engine import END, Script, script_engine, toy_settings

ROOT = Path(__file__).parents[2]
IDS = np.random.default_rng(3).integers(3, 250, 40).tolist()


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "random.gguf"
    write_random_decoder(path, DecoderShape("qwen2"))
    return path


@pytest.fixture(scope="module")
def directory(gguf_path: Path) -> Path:
    """A small INT4 decoder, built."""
    build_model(gguf_path, gguf_path.parent / "model", role="q4", progress=lambda what, done: None)
    return gguf_path.parent / "model"


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    """Its own copy for a test that breaks it."""
    return Path(shutil.copytree(directory, tmp_path / "model"))


def test_G1_the_accuracy_level_is_recorded_and_measured(gguf_path: Path, tmp_path: Path) -> None:
    """INT8 activations flip the most likely token, and nobody knows which level a file has (onnxruntime#29849).

    Here: the manifest records it, and agreement with level 0 on the same weights is measured.
    """
    rows = {}
    for level in (0, 4):
        path = tmp_path / f"level{level}"
        build_model(
            gguf_path,
            path,
            role=replace(default_scheme("q4"), accuracy_level=level),
            progress=lambda what, done: None,
        )
        manifest = open_model_directory(path).manifest
        assert manifest is not None
        assert manifest.accuracy_level == level
        rows[level] = OnnxModel(path, context_length=64).new_cache().forward(IDS, len(IDS)).copy()
    agreement = (rows[0].argmax(axis=1) == rows[4].argmax(axis=1)).mean()
    error = np.abs(rows[0] - rows[4]).max() / rows[0].std()
    assert agreement >= 0.9
    assert 0 < error < 0.25


def test_G2_links_missing_weights_and_paths_that_lead_out(copy: Path, tmp_path: Path) -> None:
    """A hub's cache of links "escapes the model directory"; missing weights show at the first pass (onnxruntime#27353).

    Here: links load; a missing file is named at the start; a name with `..` is refused.
    """
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in [file for file in copy.iterdir() if not file.name.startswith(".")]:
        target = blobs / f"blob-{file.name}"
        file.rename(target)
        file.symlink_to(target)
    open_model_directory(copy)
    alone = OnnxModel(copy, context_length=64).new_cache().forward(IDS, 1)
    batched = OnnxBatchModel(copy, context_length=64, max_batch=2).new_cache().forward(IDS, 1)
    assert alone.shape[0] == 1
    assert np.array_equal(batched, alone)
    for weights in copy.glob("*.data"):
        weights.unlink()
        with pytest.raises(ModelFileError, match=weights.name):
            open_model_directory(copy)
    config = (copy / "genai_config.json").read_text()
    (copy / "genai_config.json").unlink()
    (copy / "genai_config.json").write_text(config.replace('"model.onnx"', '"../model.onnx"'))
    with pytest.raises(ModelFileError, match="outside"):
        open_model_directory(copy)


def test_G4_idle_costs_nothing_and_memory_stays_flat(directory: Path) -> None:
    """Idle threads spin at full load, and the arena grows with every new length (headroom#2540, screenpipe#5252).

    Here: threads spin for 50 microseconds at most, memory comes from no arena, caches are reused buffers.
    """
    lm = OnnxModel(directory, context_length=256).new_cache()
    process = psutil.Process()
    rng = np.random.default_rng(1)

    def requests(count: int) -> int:
        for length in rng.integers(1, 200, count):
            lm.truncate(0)
            lm.forward([5] * int(length), 1)
            for _ in range(3):
                lm.forward([7], 1)
        return process.memory_info().rss

    warm = requests(100)
    assert requests(200) - warm < 16 * 2**20
    before, started = time.process_time(), time.perf_counter()
    time.sleep(1)
    assert (time.process_time() - before) / (time.perf_counter() - started) < 0.05


@pytest.mark.parametrize("damage", ["truncated", "altered"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_G5_damaged_files_stop_the_start(gguf_path: Path, tmp_path: Path, damage: str, role: Any) -> None:
    """A cut file loads and crashes later; the draft is loaded lazily and crashes in the middle (llama.cpp#6774).

    Here: size and sha256 of every file of both models are checked before anything is served.
    """
    cache = ModelCache(tmp_path / "cache")
    path = pull(f"file:{gguf_path}", cache, role=role)
    weights = max(path.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(weights.read_bytes())
    if damage == "truncated":
        del content[-1000:]
    else:
        content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelFileError, match=weights.name):
        pull(f"file:{gguf_path}", cache, role=role)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(gguf_path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"damaged\.gguf"):
        pull(f"file:{damaged}", cache, role=role)


def test_G6_a_model_without_a_chat_template() -> None:
    """Some other model's template is used in silence (vLLM#39279, omlx#2005).

    Here: chat is a 400 that points to completions, which work.
    """

    def engine() -> Any:
        engine = script_engine(Script())
        engine.chat_template = ChatTemplate(None, None, END)
        return engine

    with run_server(toy_settings(), engine) as server:
        error = error_of(chat(server))
        assert error["code"] == "no_chat_template"
        assert "/v1/completions" in error["message"]
        assert complete(server).status_code == 200


def test_G7_rewinding_grouped_query_attention(directory: Path) -> None:
    """Several tokens with a past, and a cache that is only counted back, go wrong (onnxruntime#21523, genai#1110).

    Here: both equal stepwise decoding; without the rewind they would not.
    """
    lm = OnnxModel(directory, context_length=64).new_cache()
    lm.forward(IDS[:10], 0)
    stepwise = np.concatenate([lm.forward([token], 1).copy() for token in IDS[10:15]])
    lm.truncate(10)
    together = lm.forward(IDS[10:15], 5).copy()
    noise = np.abs(together - stepwise).max()
    lm.truncate(10)
    lm.forward([9, 9, 9], 0)
    lm.truncate(10)
    rewound = lm.forward(IDS[10:15], 5).copy()
    lm.truncate(10)
    lm.forward([9, 9, 9], 0)
    wrong = lm.forward(IDS[10:15], 5).copy()
    spread = stepwise.std()
    assert noise < 0.1 * spread
    assert np.array_equal(rewound, together)
    assert np.abs(wrong - together).max() > 0.5 * spread


def modules_with_onnxruntime() -> list[str]:
    return sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for package in ("shared", "edge_agent", "cloud_service")
        for file in (ROOT / package).rglob("*.py")
        if any(
            line.strip().startswith(("import onnxruntime", "from onnxruntime")) for line in file.read_text().split("\n")
        )
    )


@pytest.mark.parametrize("entry", [*modules_with_onnxruntime(), "edge_agent.loading", "cloud_service.loading"])
def test_G8_onnx_runtime_does_not_phone_home(entry: str, directory: Path, tmp_path: Path) -> None:
    """From 1.29 on it leaves an id in the home directory and talks to a server (wyoming-piper#64, onnxruntime#27379).

    Here: switched off in the package that every module of ours imports first; nothing is written, no socket is opened.
    """
    code = (
        f"import {entry}, psutil, sys\n"
        "from pathlib import Path\n"
        "from shared.onnx_lm import OnnxModel\n"
        f"OnnxModel(Path({str(directory)!r}), context_length=64).new_cache().forward([1, 2], 1)\n"
        "sockets = [c for c in psutil.Process().net_connections() if c.raddr]\n"
        "sys.exit(f'talks to {sockets}' if sockets else 0)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    left = [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name or "Microsoft" in str(path)]
    assert left == []


def test_G8_every_way_in_is_covered() -> None:
    assert all(module.startswith("shared.") for module in modules_with_onnxruntime())
    assert "ORT_DISABLE_TELEMETRY=1" in (ROOT / "deploy/souschef.Dockerfile").read_text()
