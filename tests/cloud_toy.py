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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from cloud_service.app import LoadedModel, Service, create_app
from cloud_service.config import CloudSettings, load_settings
from cloud_service.loading import load_model, open_fleet, open_store
from cloud_service.pass_costs import PassCosts, measure
from shared.causal_lm import Logits
from shared.inference_thread import InferenceThread
from shared.server import Server, bind
from tests.fakes import TableLM
from tests.servers import wait_until

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
    """Many toy sequences; a batch is one pass. `failure` is what the next one of decode steps raises."""

    max_batch = 8

    def __init__(
        self, pass_s: float = 0.0, context_length: int = 4096, hold: Callable[[], object] = lambda: None
    ) -> None:
        """hold: called before each pass of decode steps; it may wait."""
        self.vocab_size = VOCAB
        self.context_length = context_length
        self.pass_s = pass_s
        self.batch_sizes: list[int] = []
        self.caches: list[SlowTable] = []
        self.failure: Exception | None = None
        self.hold = hold

    def new_cache(self) -> SlowTable:
        lm = SlowTable(VOCAB, SEED, context_length=self.context_length)
        lm.pass_s = self.pass_s
        self.caches.append(lm)
        return lm

    def forward_batch(
        self, sequences: Sequence[SlowTable], tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Logits]:
        self.batch_sizes.append(len(sequences))
        if all(len(new) == 1 for new in tokens):
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            self.hold()
        if len(sequences) == 1:
            return [sequences[0].forward(tokens[0], num_logits[0])]
        time.sleep(self.pass_s)
        return [TableLM.forward(*each) for each in zip(sequences, tokens, num_logits, strict=True)]


def toy_app(settings: CloudSettings, decoder: TableDecoder, num_slots: int = 16) -> FastAPI:
    return app_around(settings, LoadedModel("toy-target", FINGERPRINT, decoder, num_slots))


def app_around(settings: CloudSettings, model: LoadedModel, costs: PassCosts | None = None) -> FastAPI:
    """costs: of the model's passes, where they were measured before."""

    async def start(settings: CloudSettings) -> Service:
        kind = Service if costs is None else lambda *parts: MeasuredService(costs, *parts)
        return kind(settings, model, InferenceThread(), open_store(settings), open_fleet(settings))

    return create_app(settings, start)


class MeasuredService(Service):
    """One that knows what its model's passes cost."""

    def __init__(self, costs: PassCosts, *parts: Any) -> None:
        super().__init__(*parts)
        self.meter.costs = costs

    async def measure(self) -> None:
        """Nothing is left to do."""


def toy_server(app: FastAPI, settings: CloudSettings, on_ready: Callable[[int], None] = lambda port: None) -> Server:
    return Server(app, lambda: app.state.service.drain(settings.grace_s), on_ready, date_header=False)


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
    server = toy_server(app, settings, lambda port: ready.set())
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        assert ready.wait(30)
        decoder.batch_sizes.clear()
        yield RunningCloud(app, decoder, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


class CloudProcess:
    """A service in a process of its own, that can be killed, frozen and started again on the same port.

    The processes are forked from one that has done its imports and has read the model, so that a restart takes no time.
    """

    def __init__(
        self,
        log: Path,
        *,
        pass_s: float = 0.0,
        held_by: Path | None = None,
        model: Path | None = None,
        **environment: str,
    ) -> None:
        """held_by: while this file is there no batch runs. model: a real one's directory, in the toy's place."""
        self._log = log
        self._flags = ["--pass-s", str(pass_s)]
        self._flags += ["--held-by", str(held_by)] if held_by else []
        self._flags += ["--model", str(model)] if model else []
        self._environment = environment
        self._pid = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._pid = self._ask("start")
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5):
                    return
            except OSError:
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        if self._pid:
            os.kill(self._pid, number)

    def kill(self) -> None:
        if self._pid:
            self.signal(signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """The exit status, negative for a signal."""
        status = self._ask("wait")
        self._pid = 0
        return status

    def _ask(self, command: str) -> int:
        nursery = self._nursery
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(f"{command}\n".encode())
        nursery.stdin.flush()
        answer = nursery.stdout.readline()
        assert answer, self._log.read_text()
        return int(answer)

    def __enter__(self) -> CloudProcess:
        command = [sys.executable, "-m", "tests.cloud_toy", "--port", str(self.port), *self._flags]
        with self._log.open("ab") as log:
            self._nursery = subprocess.Popen(
                command,
                env={**os.environ, **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[1],
            )
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._nursery.kill()
        self._nursery.communicate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pass-s", type=float, default=0.0)
    parser.add_argument("--held-by", type=Path, default=Path("/nowhere"))
    parser.add_argument("--model", help="directory of a real model")
    arguments = parser.parse_args()
    settings = load_settings({"preset": "tiny", "port": arguments.port, "model": arguments.model, "threads": 1})
    # With one thread ONNX Runtime has none of its own that a fork would lose.
    model = load_model(settings) if arguments.model else None
    costs = measure(model.decoder, [model.decoder.new_cache() for _ in range(8)], 9) if model else None
    pid = 0
    for command in sys.stdin:
        if command.strip() == "start":
            pid = os.fork()
            if not pid:
                break
            answer = pid
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    else:
        return
    decoder = TableDecoder(arguments.pass_s, hold=lambda: wait_until(lambda: not arguments.held_by.exists()))
    app = app_around(settings, model, costs) if model else toy_app(settings, decoder)
    asyncio.run(toy_server(app, settings).serve([bind(settings.host, settings.port)]))


if __name__ == "__main__":
    main()
