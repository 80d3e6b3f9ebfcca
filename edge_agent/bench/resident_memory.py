"""What a model adds to memory, measured in a process of its own (`python -m edge_agent.bench.resident_memory`).

Weights are copied and packed when they are loaded, so the file's size says too little.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil

from shared.errors import ModelFileError


async def added_bytes(directory: Path, threads: int | None) -> int:
    """Growth of resident memory by loading the model and running one pass, in a child that ends again.

    Raises:
        ModelFileError: the model can't be loaded.
    """
    command = [sys.executable, "-m", "edge_agent.bench.resident_memory", str(directory), str(threads or 0)]
    child = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
    )
    output, _ = await child.communicate()
    if child.returncode != 0:
        raise ModelFileError(f"{directory} can't be loaded by itself to see what memory it takes")
    return int(output)


def main(directory: Path, threads: int) -> int:
    """The growth of this process."""
    from shared.onnx_lm import OnnxModel

    process = psutil.Process()
    before = process.memory_info().rss
    model = OnnxModel(directory, context_length=64, num_threads=threads or None)
    model.new_cache().forward([1], 1)
    return int(process.memory_info().rss - before)


if __name__ == "__main__":
    sys.stdout.write(f"{main(Path(sys.argv[1]), int(sys.argv[2]))}\n")
