"""Ours against llama.cpp on the same GGUF and prompts: side by side in one run, medians, ratios.

    python -m benchmarks [--preset small] [--prompts specbench.jsonl] [--tokens 64] [--repeats 3]

Each contender is a server in a process of its own. Every prompt goes to each of them in turn before the next prompt, so
that a slow spell of the machine falls on all. Each request begins with other words than the ones before, so that no
prompt cache helps one side only. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.client import Timing, chat
from benchmarks.servers import ServerProcess, Usage, edge_agent, llama_server
from edge_agent.config import PRESETS, Preset
from edge_agent.scenarios import Scenario, built_in, read_scenarios
from shared.models.cache import ModelCache
from shared.models.pull import fetch_gguf


@dataclass(frozen=True)
class Contender:
    """A server and the fields that choose its way of decoding."""

    name: str
    server: ServerProcess
    fields: dict[str, Any]


@dataclass
class Measured:
    """All that one contender did. cpu_s covers the requests alone."""

    timings: dict[str, list[Timing]]
    cpu_s: float = 0.0

    def tokens_per_second(self, category: str | None = None) -> float:
        """Median over the requests of a category, or of all."""
        chosen = [t for key, values in self.timings.items() if category in (None, key) for t in values]
        return statistics.median(t.tokens_per_second for t in chosen if t.num_tokens > 8)

    def first_token_s(self) -> float:
        """Median time to the first token."""
        return statistics.median(t.first_token_s for values in self.timings.values() for t in values)

    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(t.num_tokens for values in self.timings.values() for t in values)


def measure(
    contenders: Sequence[Contender], scenarios: Sequence[Scenario], num_tokens: int, repeats: int, console: Console
) -> dict[str, Measured]:
    """Interleaved runs of every scenario on every contender."""
    measured = {c.name: Measured(defaultdict(list)) for c in contenders}
    for contender in contenders:
        chat(contender.server.url, "Say hello.", 8, **contender.fields)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=repeats * len(scenarios) * len(contenders))
        for repeat in range(repeats):
            for number, scenario in enumerate(scenarios):
                for contender in contenders:
                    before = contender.server.usage()
                    text = f"{_greeting(repeat, number)} {scenario.text}"
                    timing = chat(contender.server.url, text, num_tokens, **contender.fields)
                    record = measured[contender.name]
                    record.timings[scenario.category].append(timing)
                    record.cpu_s += contender.server.usage().cpu_s - before.cpu_s
                    progress.advance(task)
    return measured


def report(measured: dict[str, Measured], baseline: str, usages: dict[str, Usage], console: Console) -> None:
    """Ratios against the baseline, by category and overall."""
    base = measured[baseline]
    table = Table("contender", title=f"tokens a second, and the ratio to {baseline}")
    categories = list(base.timings)
    for column in (*categories, "geometric mean", "first token", "CPU s a token", "resident MB"):
        table.add_column(column, justify="right")
    for name, record in measured.items():
        ratios = [record.tokens_per_second(c) / base.tokens_per_second(c) for c in categories]
        cells = [f"{record.tokens_per_second(c):.1f} ({r:.2f})" for c, r in zip(categories, ratios, strict=True)]
        first = record.first_token_s()
        table.add_row(
            name,
            *cells,
            f"{statistics.geometric_mean(ratios):.3f}",
            f"{first * 1e3:.0f} ms ({first / base.first_token_s():.2f})",
            f"{record.cpu_s / record.num_tokens():.4f}",
            f"{usages[name].resident_bytes / 1e6:.0f}",
        )
    console.print(table)


def _greeting(repeat: int, number: int) -> str:
    return f"Request {repeat + 1}{chr(97 + number % 26)}:"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", type=Preset, choices=list(Preset), default=Preset.SMALL)
    parser.add_argument("--prompts", type=Path, help="a Spec-Bench file; the built-in scenarios by default")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, help="only the first N prompts")
    arguments = parser.parse_args()
    console = Console(width=200)
    scenarios = (read_scenarios(arguments.prompts) if arguments.prompts else built_in())[: arguments.limit]
    target = str(PRESETS[arguments.preset]["target"])
    gguf = str(fetch_gguf(target, ModelCache()))
    with ExitStack() as stack:
        # Two of ours, so that neither finds its prompt in a cache that the other has filled.
        direct, auto = (
            stack.enter_context(edge_agent(name, "--preset", arguments.preset.value)) for name in ("direct", "auto")
        )
        llama = stack.enter_context(llama_server("llama.cpp", gguf))
        contenders = [
            Contender("llama.cpp", llama, {}),
            Contender("ours, direct", direct, {"souschef": {"speculation": "off"}}),
            Contender("ours, auto", auto, {"souschef": {"speculation": "auto"}}),
        ]
        measured = measure(contenders, scenarios, arguments.tokens, arguments.repeats, console)
        report(measured, "llama.cpp", {c.name: c.server.usage() for c in contenders}, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
