"""Ray clusters as docs/scale.md starts them: `python -m deploy.ray`, and `ray start` for a second machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
HEAD, WORKER = "127.0.0.2", "127.0.0.3"
"""Two machines of one kernel: loopback has many addresses."""

START_LIMIT_S = 180.0


class RayCluster:
    """A head and a second machine, with one core each. Leaves no process behind."""

    def __init__(self, *, args: Mapping[str, Any], verifier: Mapping[str, Any]) -> None:
        """What differs from serve.yaml: settings of the service, options of the deployment."""
        # Short: the path of a socket has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._cluster_port, port, self._worker_port = _free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self.worker_url = f"http://127.0.0.1:{self._worker_port}"
        config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text(encoding="utf-8"))
        config["http_options"]["port"] = port
        application = config["applications"][0]
        application["args"] |= args
        application["deployments"][0] |= verifier
        self._num_replicas = verifier["autoscaling_config"]["min_replicas"]
        self._config = self._folder / "serve.yaml"
        self._config.write_text(yaml.safe_dump(config), encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SOUSCHEF_", "RAY_"))}
        self._environment = kept | {
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(self._folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # Both proxies are on one machine here.
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self._worker_port),
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def replicas(self) -> set[str]:
        """Those that tell their metrics; none while nobody answers."""
        try:
            answer = httpx.get(f"{self.url}/metrics", timeout=30)
        except httpx.TransportError:
            return set()
        families = text_string_to_metric_families(answer.text) if answer.status_code == 200 else ()
        return {sample.labels["instance"] for family in families for sample in family.samples}

    def wait_for(self, condition: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.log()
            assert self._processes[0].poll() is None, self.log()
            time.sleep(0.2)

    def kill_replica(self) -> None:
        """SIGKILL to the replica on the head's machine."""
        replica = next(one for one in _family(self._processes[0]) if _is_replica(one))
        replica.kill()

    def kill_machine(self) -> None:
        """All that runs on the second machine, at once."""
        started = self._processes.pop()
        for process in _family(started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.wait(60)

    def log(self) -> str:
        """The end of what was said."""
        return "\n".join(path.read_text(errors="replace")[-5000:] for path in sorted(self._folder.glob("*.log")))

    def __enter__(self) -> RayCluster:
        try:
            head = f"{HEAD}:{self._cluster_port}"
            self._start("deploy.ray", str(self._config), "--cluster", head, "--cores", "1")
            self.wait_for(lambda: _accepts(HEAD, self._cluster_port))
            joining = [f"--address={head}", f"--node-ip-address={WORKER}", "--num-cpus=1", "--block"]
            self._start("ray.scripts.scripts", "start", *joining, "--object-store-memory=80000000")
            self.wait_for(lambda: len(self.replicas()) == self._num_replicas)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        running = [one for process in self._processes if process.poll() is None for one in _family(process)]
        for process in self._processes:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        for one in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process in self._processes:
            process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, module: str, *arguments: str) -> None:
        with (self._folder / f"{len(self._processes)}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    cwd=self._folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def _is_replica(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).startswith("ray::ServeReplica")
    return False


def _accepts(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("", 0))
        return [int(one.getsockname()[1]) for one in sockets]
