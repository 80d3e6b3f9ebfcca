"""Servers as processes of their own: started, watched and stopped by a benchmark."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx
import psutil

START_TIMEOUT_S = 300


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Usage:
    """What a process has used since it started. cpu_s in seconds of a core, memory in bytes."""

    cpu_s: float
    resident_bytes: int


class ServerProcess:
    """An OpenAI-compatible server in a process of its own; a context manager that ends it."""

    def __init__(self, name: str, command: Sequence[str], port: int, ready_path: str) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._ready_url = self.url + ready_path
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                if httpx.get(self._ready_url, timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        self._stop()
        raise RuntimeError(f"{self.name} did not become ready; it said:\n{self._tail()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._output.close()

    @property
    def pid(self) -> int:
        """The process itself."""
        return self._process.pid

    def usage(self) -> Usage:
        """CPU and memory of the process and its children so far."""
        process = psutil.Process(self._process.pid)
        family = [process, *process.children(recursive=True)]
        cpu = sum(member.cpu_times().user + member.cpu_times().system for member in family)
        return Usage(cpu, sum(member.memory_info().rss for member in family))

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        self._output.seek(0)
        return self._output.read()[-3000:].decode(errors="replace")


def edge_agent(name: str, *flags: str) -> ServerProcess:
    """Our agent: `edge-agent serve` with these flags."""
    port = free_port()
    command = [sys.executable, "-m", "edge_agent", "serve", "--port", str(port), *flags]
    return ServerProcess(name, command, port, "/ready")


def llama_server(name: str, gguf: str, *flags: str) -> ServerProcess:
    """llama.cpp's server on a GGUF."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.llama_server", "--gguf", gguf, "--port", str(port), *flags]
    return ServerProcess(name, command, port, "/health")


def library_server(name: str, engine: str, *flags: str) -> ServerProcess:
    """An engine that is a library: `genai` or `openvino`."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.library_server", engine, "--port", str(port), *flags]
    return ServerProcess(name, command, port, "/health")
