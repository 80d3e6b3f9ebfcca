"""The cloud service around a toy model: in this process, or as a real one with `python -m tests.cloud_toy`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from fastapi import FastAPI

from cloud_service.app import LoadedModel, Service, create_app
from cloud_service.config import CloudSettings, load_settings
from cloud_service.loading import open_store
from cloud_service.server import Server, bind
from shared.causal_lm import Logits
from shared.inference_thread import InferenceThread
from tests.fakes import TableLM

VOCAB = 16
SEED = 5
FINGERPRINT = "toy"


class SlowTable(TableLM):
    """A toy that takes its time: `pass_s` a pass."""

    pass_s = 0.0

    def forward(self, tokens: Sequence[int], num_logits: int) -> Logits:
        time.sleep(self.pass_s)
        return super().forward(tokens, num_logits)


class TableDecoder:
    """Many toy sequences; a batch is one pass. `fail_next` makes the next one fail."""

    def __init__(self, pass_s: float = 0.0, context_length: int = 4096) -> None:
        self.vocab_size = VOCAB
        self.context_length = context_length
        self.pass_s = pass_s
        self.batch_sizes: list[int] = []
        self.caches: list[SlowTable] = []
        self.failure: Exception | None = None

    def new_cache(self) -> SlowTable:
        lm = SlowTable(VOCAB, SEED, context_length=self.context_length)
        lm.pass_s = self.pass_s
        self.caches.append(lm)
        return lm

    def decode_batch(self, caches: Sequence[SlowTable], tokens: Sequence[int]) -> Logits:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.batch_sizes.append(len(caches))
        time.sleep(self.pass_s)
        rows = [TableLM.forward(cache, [token], 1)[0] for cache, token in zip(caches, tokens, strict=True)]
        return np.array(rows)


def toy_app(settings: CloudSettings, decoder: TableDecoder, num_slots: int = 16) -> FastAPI:
    async def start(settings: CloudSettings) -> Service:
        model = LoadedModel("toy-target", FINGERPRINT, decoder, num_slots)
        return Service(settings, model, InferenceThread(), open_store(settings))

    return create_app(settings, start)


class RunningCloud:
    """A service in a thread of this process, with its insides open to look at."""

    def __init__(self, app: FastAPI, decoder: TableDecoder, port: int) -> None:
        self.app = app
        self.decoder = decoder
        self.url = f"http://127.0.0.1:{port}"

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service


@contextmanager
def running_cloud(decoder: TableDecoder | None = None, num_slots: int = 16, **flags: object) -> Iterator[RunningCloud]:
    decoder = decoder or TableDecoder()
    settings = load_settings({"preset": "tiny", "port": 0, "grace_s": 5.0, **flags})
    app = toy_app(settings, decoder, num_slots)
    listener = bind(settings.host, settings.port)
    ready = threading.Event()
    server = Server(app, settings.grace_s, lambda port: ready.set())
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        assert ready.wait(30)
        yield RunningCloud(app, decoder, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


class CloudProcess:
    """A service in a process of its own, that can be killed, frozen and started again on the same port."""

    def __init__(self, log: Path, *, pass_s: float = 0.0, **environment: str) -> None:
        self._log = log
        self._pass_s = pass_s
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.cloud_toy", "--port", str(self.port), "--pass-s", str(self._pass_s)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **self._environment}, stdout=log, stderr=log, cwd=Path(__file__).parents[1]
            )
        deadline = time.monotonic() + 60
        while True:
            assert self._process.poll() is None, self._log.read_text()
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(60)

    def __enter__(self) -> CloudProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pass-s", type=float, default=0.0)
    arguments = parser.parse_args()
    settings = load_settings({"preset": "tiny", "port": arguments.port})
    app = toy_app(settings, TableDecoder(arguments.pass_s))
    asyncio.run(Server(app, settings.grace_s).serve([bind(settings.host, settings.port)]))


if __name__ == "__main__":
    main()
