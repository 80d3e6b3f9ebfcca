"""The command line as a user meets it: help that teaches, errors of one line, clean starts and stops."""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from edge_agent import console
from edge_agent.console import ChatOptions, printable, summary
from edge_agent.serve import welcome
from shared.errors import ConfigError
from shared.server import bind
from tests.servers import CHAT, run_server, wait_until
from tests.toy_engine import Script, script_engine, toy_settings

LIMIT_S = 120
COMMAND = [sys.executable, "-m", "edge_agent"]
REPOSITORY = Path(__file__).parent.parent


def environment(tmp_path: Path) -> dict[str, str]:
    """No settings of the developer's own; wide enough that no line is wrapped."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SOUSCHEF_")}
    return kept | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", "TERM": "dumb", "HOME": str(tmp_path)}


def edge_agent(tmp_path: Path, *arguments: str, typed: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        env=environment(tmp_path) | variables,
        input=typed,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def hear_ctrl_c() -> None:
    """A suite that a shell started in the background ignores SIGINT, and would hand that down."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def running(tmp_path: Path, arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str]]]:
    """The command in the background, with its lines as they come; killed if it does not end by itself."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        env=environment(tmp_path) | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: [lines.put(line) for line in process.stdout or ()])
    reader.start()
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait(LIMIT_S)
        reader.join(LIMIT_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def line_with(lines: queue.Queue[str], word: str) -> str:
    """The next line that holds the word."""
    seen = []
    while True:
        try:
            seen.append(lines.get(timeout=LIMIT_S))
        except queue.Empty:
            raise AssertionError(f"no line with {word!r} in {''.join(seen)}") from None
        if word in seen[-1]:
            return seen[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["serve", "chat", "calibrate", "models", "souschef.toml", "SOUSCHEF_PORT"]),
        (["serve"], ["--preset", "--host", "--port", "--api-key", "--draft", "--target", "Example"]),
        (["chat"], ["--url", "/reset", "/quit"]),
        (["calibrate"], ["--preset", "m positions"]),
        (["models"], ["list", "pull", "info"]),
        (["models", "pull"], ["--role", "hf:ORG/REPO"]),
    ],
)
def test_help_teaches(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    result = edge_agent(tmp_path, *arguments, "--help")
    assert result.returncode == 0
    for word in words:
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["serve", "--host", "0.0.0.0"], "API key"),
        (["serve", "--port", "70000"], "65535"),
        (["serve", "--target", "no-such-model"], "no-such-model"),
        (["serve", "--config", "missing.toml"], "missing.toml"),
        (["serve", "--objective", "speed"], "latency"),
        (["models", "pull", "smollm2-135m-instruct", "--role", "chef"], "target, draft"),
        (["models", "info", "no-such-model"], "no-such-model"),
        (["chat", "--target", "file:/nowhere.gguf"], "/nowhere.gguf"),
    ],
)
def test_errors_are_one_line_without_a_traceback(tmp_path: Path, arguments: list[str], word: str) -> None:
    result = edge_agent(tmp_path, *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("edge-agent: ")
    assert result.stderr.count("\n") == 1
    assert word in result.stderr


def test_unknown_variable_stops_the_start(tmp_path: Path) -> None:
    result = edge_agent(tmp_path, "serve", SOUSCHEF_PROT="1")
    assert result.returncode == 1
    assert "did you mean SOUSCHEF_PORT?" in result.stderr


def test_busy_port_is_told_before_models_are_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = edge_agent(tmp_path, "serve", "--port", str(port))
        assert result.returncode == 1
        assert str(port) in result.stderr
        with pytest.raises(ConfigError):
            bind("127.0.0.1", port)
    assert not list(tmp_path.rglob("*.parts"))


def test_catalogue_is_listed_and_described(tmp_path: Path) -> None:
    listed = edge_agent(tmp_path, "models", "list").stdout
    for name in ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"):
        assert name in listed
    described = edge_agent(tmp_path, "models", "info", "smollm2-135m-instruct").stdout
    assert "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53" in described


def test_welcome_is_a_line_that_works() -> None:
    assert "http://127.0.0.1:9000/v1" in welcome(toy_settings(host="0.0.0.0", api_keys=("k",)), 9000)
    assert "http://[::1]:9000/v1" in welcome(toy_settings(host="::1"), 9000)
    assert "Bearer" not in welcome(toy_settings(), 9000)
    assert "secret" not in welcome(toy_settings(api_keys=("secret",)), 9000)


def test_chat_with_a_running_agent_over_several_turns(tmp_path: Path) -> None:
    with run_server(toy_settings(api_keys=("k",)), lambda: script_engine(Script("Bonjour 😀\x1b[31m!"))) as server:
        typed = "hello\nagain\n/reset\nanew\n/quit\n"
        result = edge_agent(tmp_path, "chat", "--url", server.url, "--api-key", "k", typed=typed)
        assert result.returncode == 0
        assert result.stdout.count("Bonjour 😀") == 3
        assert "\x1b[31m" not in result.stdout
        assert result.stdout.count("tokens/s") == 3
        text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer k"}).text
        assert 'finish_reason="stop",mode="local_speculative"} 3.0' in text


def test_chat_says_why_there_is_no_answer_and_goes_on(tmp_path: Path) -> None:
    with run_server(toy_settings(api_keys=("k",)), lambda: script_engine(Script())) as server:
        result = edge_agent(tmp_path, "chat", "--url", server.url, typed="hello\nhello\n")
    assert result.returncode == 0
    assert result.stdout.count("a valid API key is needed") == 2
    result = edge_agent(tmp_path, "chat", "--url", "http://127.0.0.1:9", typed="hello\n")
    assert result.returncode == 0
    assert "can't be reached" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_ctrl_c_stops_an_answer_then_leaves_the_chat(tmp_path: Path) -> None:
    script = Script("abcdefgh", ends=False, pause_s=0.05)
    with (
        run_server(toy_settings(), lambda: script_engine(script, gamma=0)) as server,
        running(tmp_path, ["chat", "--url", server.url]) as (process, lines),
    ):
        assert process.stdin is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        wait_until(lambda: script.num_rows > 3)
        process.send_signal(signal.SIGINT)
        line_with(lines, "stopped")
        wait_until(lambda: server.agent.scheduler.num_running == 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
        while not lines.empty():
            assert "Traceback" not in lines.get()


@pytest.mark.parametrize("where", ["_turn", "_read_line"])
def test_ctrl_c_anywhere_leaves_the_chat_quietly(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing waits for it: between an answer and the next prompt."""
    left: list[bool] = []

    @asynccontextmanager
    async def nobody() -> AsyncIterator[Any]:
        yield None
        left.append(True)

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "_read_line", lambda _console: "hello")
    monkeypatch.setattr(console, where, interrupted)
    console._chat(nobody(), ChatOptions())
    assert left == [True]


def test_figures_and_printable_text() -> None:
    report = {"tokens_by_origin": {"draft": 3, "target": 2, "cloud": 0}, "ttft_ms": 1234.0, "tokens_per_second": 9.87}
    assert summary(report) == "5 tokens · 9.9 tokens/s · first after 1.23 s"
    assert "75% of 4 drafts accepted" in summary(report | {"acceptance_rate": 0.75, "draft_tokens": 4})
    assert printable("a\x1b]0;x\x07b\r\x9bc\nd\té😀") == "a]0;xbc\nd\té😀"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_a_real_model_until_a_signal(tmp_path: Path, smollm2_directory: Path, number: signal.Signals) -> None:
    arguments = ["serve", "--target", f"file:{smollm2_directory}", "--draft", "none", "--port", "0"]
    with running(tmp_path, [*arguments, "--context-length", "512"]) as (process, lines):
        words = shlex.split(line_with(lines, "curl "))
        url = words[1]
        headers = dict([words[words.index("-H") + 1].split(": ")])
        response = httpx.post(url, content=words[words.index("-d") + 1], headers=headers, timeout=LIMIT_S)
        assert response.status_code == 200
        assert response.json()["choices"][0]["message"]["content"]
        with openai.OpenAI(base_url=url.removesuffix("/chat/completions"), api_key="none") as client:
            # Direct, and each from the same cached prompt: INT4 kernels round by the number of rows in a pass.
            body = {"model": smollm2_directory.name, "messages": CHAT["messages"], "seed": 3, "max_tokens": 24}
            body["extra_body"] = {"souschef": {"speculation": "off"}}
            client.chat.completions.create(**body)
            whole = client.chat.completions.create(**body)
            chunks = list(client.chat.completions.create(**body, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[-1].model_extra is not None
        assert chunks[-1].model_extra["souschef"]["rounds"] > 0
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 0
        while not lines.empty():
            assert not re.search("Traceback|ERROR", lines.get())


def test_chat_with_a_model_of_its_own(tmp_path: Path, smollm2_directory: Path) -> None:
    arguments = ["chat", "--target", f"file:{smollm2_directory}", "--draft", "none", "--temperature", "0"]
    result = edge_agent(tmp_path, *arguments, "--max-tokens", "8", "--context-length", "512", typed="Hello!\n/quit\n")
    assert result.returncode == 0
    assert re.search(r"\d tokens · [\d.]+ tokens/s · first after", result.stdout)
    assert "Traceback" not in result.stderr


def test_calibrate_prints_the_curve(tmp_path: Path, smollm2_directory: Path) -> None:
    arguments = ["--target", f"file:{smollm2_directory}", "--draft", "none", "--context-length", "512"]
    result = edge_agent(tmp_path, "calibrate", *arguments)
    assert result.returncode == 0
    assert "c(m) / c(1)" in result.stdout
    assert re.search(r"\b1\b.*1\.00", result.stdout)
