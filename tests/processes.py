"""Our own commands as processes of their own, on free ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

REPOSITORY = Path(__file__).parent.parent
START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0


@contextmanager
def serving(module: str, arguments: Sequence[str]) -> Iterator[str]:
    """`python -m MODULE ARGUMENTS`: yields the address that it says it listens on; ended however the block ends."""
    with serving_process(module, arguments) as (address, _):
        yield address


@contextmanager
def serving_process(
    module: str, arguments: Sequence[str], settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The same with its process. settings: more of its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SOUSCHEF_")}
    environment = (
        kept | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "COLUMNS": "200", "TERM": "dumb"} | settings
    )
    with tempfile.TemporaryDirectory() as folder, Path(folder, "output").open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield _address(process, Path(folder, "output")), process
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], output: Path) -> str:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        said = output.read_text(errors="replace")
        found = re.search(r"listens on (?:http://)?(\S+?:\d+)", said)
        if found:
            return f"http://{found[1]}"
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the server did not start; it said:\n{output.read_text(errors='replace')[-3000:]}")
