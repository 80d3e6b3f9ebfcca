"""The examples of docs/clients.md, run as they stand against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import REPOSITORY
from tests.servers import events, run_server
from tests.toy_engine import Script, script_engine, toy_settings

LIMIT_S = 120
OPENAI_PACKAGE = "openai@6.1.0"
SAID = "Good day to you, and to you."


def examples(language: str) -> list[str]:
    """The code blocks of one language, in order."""
    text = (REPOSITORY / "docs/clients.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_server(
        toy_settings(context_length=512), lambda: script_engine(Script(SAID), context_length=512)
    ) as server:
        yield server.url


def run(command: list[str], url: str, folder: Path) -> str:
    environment = {**os.environ, "SOUSCHEF_URL": url, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_answers_whole(url: str, tmp_path: Path) -> None:
    answer = json.loads(run(["bash", "-c", examples("bash")[0]], url, tmp_path))
    assert answer["choices"][0]["message"]["content"] == SAID
    assert answer["souschef"]["tokens_by_origin"]["cloud"] == 0


def test_curl_streams(url: str, tmp_path: Path) -> None:
    found = events(run(["bash", "-c", examples("bash")[1]], url, tmp_path))
    assert found[-1] == "[DONE]"
    deltas = [choice["delta"].get("content") or "" for chunk in found[:-1] for choice in chunk["choices"]]
    assert "".join(deltas) == SAID
    assert any(chunk.get("usage") for chunk in found[:-1])


def test_python_streams(url: str, tmp_path: Path) -> None:
    said = run([sys.executable, "-c", examples("python")[0]], url, tmp_path)
    assert said.startswith(SAID)
    assert re.search(r"'target': \d+.* rounds", said)


def test_python_predicts(url: str, tmp_path: Path) -> None:
    said = run([sys.executable, "-c", examples("python")[1]], url, tmp_path)
    assert said.startswith(SAID)
    assert re.search(r"accepted from the prediction: \d+", said)


def test_javascript_streams(url: str, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", OPENAI_PACKAGE],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    (tmp_path / "example.mjs").write_text(examples("javascript")[0], encoding="utf-8")
    said = run(["node", "example.mjs"], url, tmp_path)
    assert said.startswith(SAID)
    assert "target:" in said
