"""Load: many clients against a small queue, and what must hold meanwhile. `python -m tests.load --seconds 120`.

The server has a process of its own and /health is asked from a thread of its own, so that what is measured is the
server and not the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.servers import CHAT, run_server
from tests.toy_engine import Script, script_engine, toy_settings

ANSWER = "The quick brown fox jumps over the lazy dog."
CLIENTS = 200
QUEUE = 32
MOST_PATIENCE_S = 2.0


@dataclass
class LoadReport:
    """What came of it. Times in seconds, memory in bytes of the server's process."""

    statuses: Counter[int] = field(default_factory=Counter)
    codes: set[str] = field(default_factory=set)
    num_wrong: int = 0
    health_s: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    left_running: float = 0.0

    @property
    def health_p99_s(self) -> float:
        """99 of 100 answers of /health came within."""
        return statistics.quantiles(self.health_s, n=100)[98]

    @property
    def growth(self) -> int:
        """Memory gained from the second to the last fifth of the run."""
        fifth = max(1, len(self.memory) // 5)
        return int(statistics.median(self.memory[-fifth:]) - statistics.median(self.memory[fifth : 2 * fifth]))


@contextmanager
def server_process() -> Iterator[tuple[str, psutil.Process]]:
    """(address, process) of a server of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.load", "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def serve() -> None:
    """The server's side: until stdin is closed."""
    settings = toy_settings(max_running=4, max_waiting=QUEUE)
    with run_server(settings, lambda: script_engine(Script(ANSWER, pause_s=0.001))) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


async def drive(url: str, seconds: float, report: LoadReport, num_clients: int) -> None:
    """Each client asks, takes its answer, and asks again; half of them stream, some leave early."""
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(number: int) -> None:
            turn = 0
            while time.monotonic() < until:
                turn += 1
                stream = bool(number % 2)
                body = {**CHAT, "stream": stream, "user": f"client-{number}"}
                if number % 10 == 9 and turn % 3 == 0:
                    await _leave_early(client, body)
                    continue
                response = await client.post("/v1/chat/completions", json=body)
                report.statuses[response.status_code] += 1
                if response.status_code == 200:
                    report.num_wrong += _text(response.text, stream) != ANSWER
                else:
                    report.codes.add(response.json()["error"]["code"])
                    await asyncio.sleep(min(float(response.headers["retry-after"]), MOST_PATIENCE_S))

        await asyncio.gather(*(one(number) for number in range(num_clients)))


def watch(url: str, process: psutil.Process, report: LoadReport, ended: threading.Event) -> None:
    """Ask /health again and again, and look at the server's memory."""
    with httpx.Client(base_url=url, timeout=60) as client:
        while not ended.wait(0.1):
            started = time.perf_counter()
            response = client.get("/health")
            report.health_s.append(time.perf_counter() - started)
            assert response.status_code == 200
            report.memory.append(process.memory_info().rss)


def run_load(seconds: float, num_clients: int = CLIENTS) -> LoadReport:
    """A server with a queue of 32, under load for so long."""
    report = LoadReport()
    ended = threading.Event()
    with server_process() as (url, process):
        watcher = threading.Thread(target=watch, args=(url, process, report, ended))
        watcher.start()
        try:
            asyncio.run(drive(url, seconds, report, num_clients))
        finally:
            ended.set()
            watcher.join()
        ready = httpx.get(f"{url}/ready", timeout=60).json()
        report.left_running = ready["running"] + ready["waiting"]
    return report


async def _leave_early(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        async for _ in response.aiter_raw():
            return


def _text(body: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--serve", action="store_true", help="be the server, until stdin is closed")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    report = run_load(arguments.seconds, arguments.clients)
    sys.stdout.write(
        f"statuses {dict(report.statuses)}, refusals {sorted(report.codes)}, wrong answers {report.num_wrong}\n"
        f"/health p99 {report.health_p99_s * 1e3:.0f} ms of {len(report.health_s)}, "
        f"memory gained {report.growth / 2**20:.1f} MiB, left running {report.left_running:.0f}\n"
    )
    sound = not report.num_wrong and set(report.statuses) <= {200, 429, 503} and report.growth < 32 * 2**20
    return 0 if sound and report.health_p99_s < 0.1 and not report.left_running else 1


if __name__ == "__main__":
    sys.exit(main())
