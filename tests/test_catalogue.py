"""What a model reference means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.models.catalogue import CATALOGUE, GgufFile, HubFile, ReadyDirectory, find_model, parse_reference


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_model_is_pinned(name: str) -> None:
    model = find_model(name)
    assert parse_reference(name) is model
    assert model.name == name
    assert re.fullmatch("[0-9a-f]{64}", model.sha256)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", wheel) for wheel in model.wheels)
    assert len(set(model.wheels)) == len(model.wheels)
    assert model.licence == "Apache-2.0"


def test_parts_are_in_order() -> None:
    numbers = [int(re.findall(r"part(\d+)", wheel)[0]) for wheel in find_model("qwen2.5-coder-1.5b-instruct").wheels]
    assert numbers == list(range(1, 23))


def test_the_pinned_bytes_are_those_of_the_real_file(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == find_model("smollm2-135m-instruct").size


@pytest.mark.parametrize("find", [find_model, parse_reference])
def test_an_unknown_name_is_refused_with_the_known_ones(find: object) -> None:
    assert callable(find)
    with pytest.raises(ConfigError, match=r"'qwen3-8b' is not known.*smollm2-135m-instruct"):
        find("qwen3-8b")


def test_paths(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    assert parse_reference(str(gguf)) == parse_reference(f"file:{gguf}") == GgufFile(gguf)
    assert parse_reference(str(tmp_path)) == parse_reference(f"file:{tmp_path}") == ReadyDirectory(tmp_path)


@pytest.mark.parametrize("text", ["file:nowhere", "/nowhere/m.gguf", "nowhere.gguf", "./nowhere"])
def test_a_path_to_nothing_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match="no such file or directory"):
        parse_reference(text)


def test_hub_files() -> None:
    assert parse_reference("hf:org/repo/m.gguf") == HubFile("org/repo", "m.gguf")
    assert parse_reference("hf:org/repo/sub/m.gguf") == HubFile("org/repo", "sub/m.gguf")


@pytest.mark.parametrize(
    "text", ["hf:org/repo", "hf:org//m.gguf", "hf:m.gguf", "hf:org/repo/m.bin", "hf:o/r/../m.gguf"]
)
def test_an_incomplete_hub_reference_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected hf:organisation/repository/file\.gguf"):
        parse_reference(text)
