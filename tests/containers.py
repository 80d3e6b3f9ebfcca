"""A container engine of the tests' own, and base images made here: no registry is asked for an image.

The engine runs beside any other on the machine: its own folder and socket, no bridge, no firewall rules; published
ports go through its proxy. The base image is a Debian made by debootstrap with the programs that the stack's images
bring otherwise; what takes long to make is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import platformdirs
import psutil

ROOT = Path(__file__).parent.parent
PROGRAMS = ("dockerd", "docker", "docker-compose", "debootstrap")
PACKAGES = ("ca-certificates", "nginx-light", "prometheus", "python3", "python3-venv", "redis-server")
BASE_IMAGE = "standin-debian"
PYTHON_IMAGE = "standin-python"
WHEELS_FOLDER = "/wheels"
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_LIMIT_S = 60.0
LAST_LINES = 5


class EngineUnavailableError(Exception):
    """Why no engine can run here."""


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    socket: Path

    @property
    def environment(self) -> dict[str, str]:
        """What its clients need to find it."""
        return {"PATH": SEARCH_PATH, "HOME": str(self.socket.parent), "DOCKER_HOST": f"unix://{self.socket}"}

    def docker(self, *arguments: str | Path, stdin: Any = None) -> str:
        """Run a command of the client and return what it prints."""
        return run(["docker", *map(str, arguments)], self.environment, stdin)

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows of a container."""
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", container))
        return found[0]

    def cpu_seconds(self, container: str) -> float:
        """Processor time that the container has used so far."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://engine") as client:
            stats = client.get(f"/containers/{container}/stats", params={"stream": "false", "one-shot": "true"}).json()
        return float(stats["cpu_stats"]["cpu_usage"]["total_usage"]) / 1e9


@dataclass(frozen=True)
class Stack:
    """The compose project on an engine."""

    engine: Engine
    project: str
    settings: dict[str, str]

    def compose(self, *arguments: str) -> str:
        """Run docker-compose on the repository's file with the stack's settings."""
        env_file = self.engine.socket.parent / f"{self.project}.env"
        env_file.write_text("".join(f"{name}={value}\n" for name, value in self.settings.items()), encoding="utf-8")
        options = ["--project-name", self.project, "--project-directory", str(ROOT), "--env-file", str(env_file)]
        command = ["docker-compose", *options, "-f", str(ROOT / "docker-compose.yml"), *arguments]
        profiles = {"COMPOSE_PROFILES": self.settings["COMPOSE_PROFILES"]}
        return run(command, {**self.engine.environment, **profiles})

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers."""
        return self.compose("ps", "--quiet", service).split()

    def logs(self) -> str:
        """The end of what the services said."""
        return self.compose("logs", "--no-color", "--tail", "30")

    def wait_healthy(self, services: Sequence[str], limit_s: float = 180.0) -> None:
        """Return when all their containers are healthy."""
        deadline = time.monotonic() + limit_s
        while True:
            states = [self.engine.inspect(one)["State"] for service in services for one in self.containers(service)]
            health = [state["Health"]["Status"] for state in states]
            if health and all(status == "healthy" for status in health):
                return
            if time.monotonic() > deadline or any(state["Status"] == "exited" for state in states):
                raise AssertionError(f"{services} became {health}:\n{self.logs()}")
            time.sleep(1)

    def fill_models(self, model_cache: Path, directory: Path) -> None:
        """Put a built model into the stack's volume, as a first start would have."""
        volume = json.loads(self.engine.docker("volume", "inspect", f"{self.project}_models"))[0]["Mountpoint"]
        target = Path(volume) / directory.relative_to(model_cache)
        shutil.copytree(directory, target)
        run(["chown", "-R", "10001:10001", volume], self.engine.environment)


def run(command: Sequence[str], environment: dict[str, str], stdin: Any = None) -> str:
    """Run a command; it fails with its own last words."""
    result = subprocess.run(command, env=environment, stdin=stdin, capture_output=True, text=True, errors="replace")
    if result.returncode:
        words = (result.stdout + result.stderr).strip().splitlines()[-40:]
        raise AssertionError(f"{' '.join(command[:6])} … returned {result.returncode}:\n" + "\n".join(words))
    return result.stdout


@contextmanager
def run_engine() -> Iterator[Engine]:
    """An engine of our own, in a folder that is removed afterwards.

    Raises:
        EngineUnavailableError: no engine can start here; says why.
    """
    missing = [program for program in PROGRAMS if shutil.which(program, path=SEARCH_PATH) is None]
    if missing:
        raise EngineUnavailableError(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        raise EngineUnavailableError("the engine has to be started as root")
    # Short: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="souschef-engine-", dir=_roomy_memory(5 * 2**30) or Path("/tmp")))
    log = folder / "log"
    try:
        process = _start(folder, log)
        try:
            engine = Engine(folder / "docker.sock")
            _wait_until_it_answers(engine, process, log)
            yield engine
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
    finally:
        _unmount_below(folder)
        shutil.rmtree(folder, ignore_errors=True)


def make_base_images(engine: Engine) -> None:
    """Both stand-ins: Debian with the programs, and the same with our dependencies' wheels for `pip`."""
    cache = Path(platformdirs.user_cache_dir("souschef-tests", appauthor=False))
    cache.mkdir(parents=True, exist_ok=True)
    with _debian(cache).open("rb") as archive:
        engine.docker("import", "-", BASE_IMAGE, stdin=archive)
    wheels = _wheels(cache)
    (wheels / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nCOPY *.whl {WHEELS_FOLDER}/\n", encoding="utf-8")
    engine.docker("build", "--quiet", "--tag", PYTHON_IMAGE, wheels)


def _start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    (folder / "daemon.json").write_text("{}", encoding="utf-8")
    options = {
        "data-root": folder / "data",
        "exec-root": folder / "exec",
        "pidfile": folder / "pid",
        "config-file": folder / "daemon.json",
        "host": f"unix://{folder / 'docker.sock'}",
        "bridge": "none",
        "iptables": "false",
        "ip-forward": "false",
        "ip-masq": "false",
    }
    command = ["dockerd", *(f"--{name}={value}" for name, value in options.items())]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, "PATH": SEARCH_PATH},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _wait_until_it_answers(engine: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        answered = subprocess.run(["docker", "version"], env=engine.environment, capture_output=True)
        if answered.returncode == 0:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            raise EngineUnavailableError("dockerd does not start: " + " | ".join(last))
        time.sleep(0.2)


def _unmount_below(folder: Path) -> None:
    """What a killed container leaves mounted would be emptied by removing the folder."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in sorted((one for one in mounts if one.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], capture_output=True)


def _roomy_memory(needed_bytes: int) -> Path | None:
    """The file system in memory, if it has so much room and the machine twice as much: it is gone much faster."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or psutil.virtual_memory().available < 2 * needed_bytes:
        return None
    return memory if shutil.disk_usage(memory).free > needed_bytes else None


def _debian(cache: Path) -> Path:
    """The archive of a Debian like this machine's."""
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    key = hashlib.sha256(" ".join([suite, platform.machine(), *PACKAGES]).encode()).hexdigest()[:12]
    archive = cache / f"{suite}-{key}.tar"
    if not archive.exists():
        # dpkg waits for the disk after each file.
        with tempfile.TemporaryDirectory(dir=_roomy_memory(4 * 2**30) or cache) as working:
            tree, partial = Path(working) / "root", archive.with_suffix(".partial")
            options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
            environment = {"PATH": SEARCH_PATH, "DEBIAN_FRONTEND": "noninteractive"}
            run(["debootstrap", *options, suite, str(tree)], environment)
            unread = [f"--exclude=./{path}" for path in ("var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*")]
            run(["tar", "--create", f"--file={partial}", f"--directory={tree}", *unread, "."], environment)
            partial.replace(archive)
    return archive


def _wheels(cache: Path) -> Path:
    """A folder with the locked dependencies."""
    locks = [ROOT / "requirements/build.txt", ROOT / "requirements/runtime.txt"]
    # Debian's Python is older than ours by some patches: what the lock keeps for such ones is wanted as well.
    texts = [path.read_text(encoding="utf-8").replace(" ; python_full_version < '3.11.3'", "") for path in locks]
    folder = cache / f"wheels-{hashlib.sha256(''.join(texts).encode()).hexdigest()[:12]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as working:
            wanted, got = Path(working) / "wanted.txt", Path(working) / "wheels"
            for text in texts:
                wanted.write_text(text, encoding="utf-8")
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--require-hashes"]
                run([*pip, "--requirement", str(wanted), "--dest", str(got)], dict(os.environ))
            got.rename(folder)
    return folder
