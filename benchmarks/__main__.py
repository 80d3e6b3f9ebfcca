"""Ours against other engines on the same weights and prompts: side by side in one run, medians, ratios.

    python -m benchmarks [--preset small] [--peers llama.cpp llama.cpp:ngram-mod genai genai:lookup …]
                         [--prompts specbench.jsonl] [--every N] [--tokens 64] [--repeats 3]

Each contender is a server in a process of its own. Every prompt goes to each of them in turn before the next prompt, so
that a slow spell of the machine falls on all. Each request begins with other words than the ones before, so that no
prompt cache helps one side only. Nothing else should run on the machine meanwhile. Peers beside llama.cpp need
`pip install souschef-edge[bench]`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.client import Timing, chat
from benchmarks.servers import ServerProcess, Usage, edge_agent, library_server, llama_server
from edge_agent.config import PRESETS, Preset
from edge_agent.memory_bandwidth import measure_bandwidth
from edge_agent.scenarios import Scenario, built_in, read_scenarios
from shared.models.cache import ModelCache
from shared.models.directory import open_model_directory
from shared.models.pull import fetch_gguf, pull
from shared.models.stored_graph import StoredGraph

DIRECT, AUTO = "ours, direct", "ours, auto"
MIN_TOKENS = 8
"""An answer that ends sooner says little of speed."""


@dataclass(frozen=True)
class Contender:
    """A server and the fields that choose its way of decoding."""

    name: str
    server: ServerProcess
    fields: dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """What all engines run: the GGUF, the directory built from it, and the GGUF of a draft model if there is one."""

    gguf: str
    directory: str
    draft_gguf: str | None


Start = Callable[[str, Weights], ServerProcess]
"""A peer by its name, ready to be entered."""


def _llama(kind: str) -> Start:
    return lambda name, weights: llama_server(name, weights.gguf, "--speculative", kind)


def _llama_with_draft(name: str, weights: Weights) -> ServerProcess:
    if weights.draft_gguf is None:
        raise SystemExit(f"{name} needs a draft model: --draft qwen2.5-coder-0.5b-instruct")
    return llama_server(name, weights.gguf, "--speculative", "draft-simple", "--draft", weights.draft_gguf)


def _genai(*flags: str) -> Start:
    return lambda name, weights: library_server(name, "genai", "--model", weights.directory, *flags)


def _openvino(*flags: str) -> Start:
    return lambda name, weights: library_server(
        name, "openvino", "--model", weights.directory, "--gguf", weights.gguf, *flags
    )


PEERS: dict[str, Start] = {
    "llama.cpp": _llama("none"),
    "llama.cpp:ngram-simple": _llama("ngram-simple"),
    "llama.cpp:ngram-mod": _llama("ngram-mod"),
    "llama.cpp:draft": _llama_with_draft,
    "genai": _genai(),
    "genai:lookup": _genai("--lookup"),
    "openvino": _openvino(),
    "openvino:lookup": _openvino("--lookup"),
}
"""Engines, each plain and with its own ways of speculation, by family:way."""


@dataclass
class Measured:
    """All that one contender did. cpu_s covers the requests alone."""

    timings: dict[str, list[Timing]]
    cpu_s: float = 0.0

    def tokens_per_second(self, category: str) -> float:
        """Median over the requests of a category."""
        return statistics.median(t.tokens_per_second for t in self.timings[category] if t.num_tokens > MIN_TOKENS)

    def first_token_s(self) -> float:
        """Median time to the first token."""
        return statistics.median(t.first_token_s for values in self.timings.values() for t in values)

    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(t.num_tokens for values in self.timings.values() for t in values)

    def cpu_per_token(self) -> float:
        """Seconds of a core."""
        return self.cpu_s / self.num_tokens()


@dataclass(frozen=True)
class Report:
    """What was measured, by contender. floor_s: the time in which the weights can be read once."""

    measured: dict[str, Measured]
    usages: dict[str, Usage]
    floor_s: float

    @property
    def categories(self) -> list[str]:
        """Those in which every contender answered at length."""
        return [
            category
            for category in self.measured[DIRECT].timings
            if all(any(t.num_tokens > MIN_TOKENS for t in m.timings[category]) for m in self.measured.values())
        ]

    def ratios(self, name: str, base: str) -> list[float]:
        """Speed of one over another's, by category."""
        one, other = self.measured[name], self.measured[base]
        return [one.tokens_per_second(c) / other.tokens_per_second(c) for c in self.categories]

    def mean(self, name: str, base: str) -> float:
        """The geometric mean of the ratios."""
        return statistics.geometric_mean(self.ratios(name, base))

    def best_ways(self) -> list[str]:
        """The fastest setting of each peer family."""
        families: dict[str, list[str]] = defaultdict(list)
        for name in self.measured:
            if name not in (DIRECT, AUTO):
                families[name.partition(":")[0]].append(name)
        return [max(names, key=lambda name: self.mean(name, DIRECT)) for names in families.values()]

    def print(self, console: Console) -> None:
        """A row a contender, then what the ratios come to."""
        table = Table("contender", *self.categories, title=f"tokens a second, and the ratio to {DIRECT}")
        for column in ("geometric mean", "first token", "CPU s a token", "resident MB"):
            table.add_column(column, justify="right")
        for name, record in self.measured.items():
            speeds = [record.tokens_per_second(category) for category in self.categories]
            ratios = self.ratios(name, DIRECT)
            table.add_row(
                name,
                *(f"{speed:.1f} ({ratio:.2f})" for speed, ratio in zip(speeds, ratios, strict=True)),
                f"{statistics.geometric_mean(ratios):.3f}",
                f"{record.first_token_s() * 1e3:.0f} ms",
                f"{record.cpu_per_token():.4f}",
                f"{self.usages[name].resident_bytes / 1e6:.0f}",
            )
        console.print(table)
        for peer in self.best_ways():
            ratios = self.ratios(AUTO, peer)
            console.print(
                f"{AUTO} over {peer}, its best way here: {statistics.geometric_mean(ratios):.3f}, "
                f"worst category {min(ratios):.2f}; {DIRECT} over it: {self.mean(DIRECT, peer):.3f}"
            )
        auto, direct = self.measured[AUTO], self.measured[DIRECT]
        worst, category = min(zip(self.ratios(AUTO, DIRECT), self.categories, strict=True))
        console.print(f"{AUTO} over {DIRECT}: {self.mean(AUTO, DIRECT):.3f}, worst {worst:.2f} ({category})")
        console.print(f"CPU seconds a token, {AUTO} over {DIRECT}: {auto.cpu_per_token() / direct.cpu_per_token():.2f}")
        speed = statistics.geometric_mean(direct.tokens_per_second(c) for c in self.categories)
        console.print(f"share of the memory's bandwidth, {DIRECT}: {self.floor_s * speed:.2f}")


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


def _greeting(repeat: int, number: int) -> str:
    return f"Request {repeat + 1}{chr(97 + number % 26)}:"


def _weights(preset: Preset, draft: str | None) -> Weights:
    target, cache = PRESETS[preset]["target"], ModelCache()
    return Weights(
        str(fetch_gguf(target, cache)),
        str(pull(target, cache)),
        None if draft is None else str(fetch_gguf(draft, cache)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", type=Preset, choices=list(Preset), default=Preset.SMALL)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=["llama.cpp"])
    parser.add_argument("--draft", help="the model that drafts in llama.cpp:draft")
    parser.add_argument("--prompts", type=Path, help="a Spec-Bench file; the built-in scenarios by default")
    parser.add_argument("--every", type=int, default=1, help="only each N-th prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    console = Console(width=200)
    scenarios = (read_scenarios(arguments.prompts) if arguments.prompts else built_in())[:: arguments.every]
    weights = _weights(arguments.preset, arguments.draft)
    read = StoredGraph(open_model_directory(Path(weights.directory)).model_path).bytes_read()
    floor_s = read / measure_bandwidth()
    with ExitStack() as stack:
        # Two of ours, so that neither finds its prompt in a cache that the other has filled.
        direct, auto = (
            stack.enter_context(edge_agent(name, "--preset", arguments.preset.value)) for name in (DIRECT, AUTO)
        )
        contenders = [
            *(Contender(name, stack.enter_context(PEERS[name](name, weights)), {}) for name in arguments.peers),
            Contender(DIRECT, direct, {"souschef": {"speculation": "off"}}),
            Contender(AUTO, auto, {"souschef": {"speculation": "auto"}}),
        ]
        measured = measure(contenders, scenarios, arguments.tokens, arguments.repeats, console)
        Report(measured, {c.name: c.server.usage() for c in contenders}, floor_s).print(console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
