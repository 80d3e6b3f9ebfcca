"""A real nginx with the configuration that the compose stack uses, in a folder and on a port of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CONFIGURATION = Path(__file__).parent.parent / "deploy/nginx/nginx.conf"
PROGRAM = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def gateway(folder: Path, replicas: Sequence[str]) -> Iterator[str]:
    """The address of a gateway to these replicas ("ADDRESS:PORT")."""
    assert PROGRAM is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    text = CONFIGURATION.read_text(encoding="utf-8").replace("/tmp/", f"{folder}/")
    configuration = folder / "nginx.conf"
    configuration.write_text(text.replace("listen 8090", f"listen 127.0.0.1:{port}"), encoding="utf-8")
    # As deploy/nginx/start.sh writes it.
    servers = [f"server {replica} fail_timeout=5s;\n" for replica in replicas]
    (folder / "replicas.conf").write_text("".join(servers), encoding="utf-8")
    # Root's workers would run as a user who can't enter the folder.
    user = ["-g", "user root;"] if os.geteuid() == 0 else []
    process = subprocess.Popen([PROGRAM, "-c", str(configuration), "-e", "stderr", *user])
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
