"""What a served model keeps resident, by kind, and over the size of its GGUF files.

    python -m benchmarks.memory [--preset small] [--prompt-tokens 1500]

Three times: when the agent is ready, after a short answer, and after a prompt that fills most of the context. Kinds:
the models' own files as far as they are mapped; other files (programs and libraries); everything else (the weights as
the kernels want them, caches, Python's objects).
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.servers import edge_agent
from edge_agent.config import NO_DRAFT, PRESETS, Preset
from shared.models.cache import ModelCache
from shared.models.pull import fetch_gguf

MODELS, FILES, REST = "models' files", "programs", "the rest"
KINDS = (MODELS, FILES, REST)
CONTEXT = 2048


def resident_by_kind(pid: int, models: Path) -> Counter[str]:
    """Bytes of a process that are in memory, by what they are. models: the folder of the models' files."""
    kinds: Counter[str] = Counter()
    kind = REST
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        first, *others = line.split(maxsplit=5)
        if not first.endswith(":"):
            path = others[-1] if len(others) == 5 else ""
            kind = REST if not path.startswith("/") else MODELS if path.startswith(str(models)) else FILES
        elif first == "Rss:":
            kinds[kind] += int(others[0]) * 1024
    return kinds


def main() -> None:
    """Serve the preset and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=[preset.value for preset in Preset])
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    options = parser.parse_args()
    cache = ModelCache()
    names = [PRESETS[Preset(options.preset)][role] for role in ("target", "draft")]
    gguf_bytes = sum(fetch_gguf(name, cache).stat().st_size for name in names if name != NO_DRAFT)
    table = Table(title=f"{options.preset}: MB in memory; models' GGUF files {gguf_bytes / 1e6:.0f} MB")
    for heading in ("", *KINDS, "all", "all / GGUF"):
        table.add_column(heading, justify="right" if heading else "left")

    with edge_agent("edge-agent", "--preset", options.preset, "--context-length", str(CONTEXT)) as server:

        def note(moment: str) -> None:
            kinds = resident_by_kind(server.pid, cache.root)
            megabytes = (f"{value / 1e6:.0f}" for value in (*(kinds[kind] for kind in KINDS), kinds.total()))
            table.add_row(moment, *megabytes, f"{kinds.total() / gguf_bytes:.2f}")

        def ask(text: str) -> int:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 32}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600).raise_for_status()
            return int(reply.json()["usage"]["prompt_tokens"])

        note("ready")
        ask("What is a kitchen?")
        note("after a short answer")
        tokens = ask("kitchen " * options.prompt_tokens)  # A word is a token to these models.
        note(f"after a prompt of {tokens} tokens")
    Console().print(table)


if __name__ == "__main__":
    main()
