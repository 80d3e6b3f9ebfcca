"""All that one `bench` found, as JSON and as a table."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from rich.table import Table
from typing_extensions import TypedDict

from edge_agent.bench.measure import Run
from edge_agent.bench.summary import FORMAT, ContenderFigures, Spread, raw, summarise
from edge_agent.engine import Engine
from edge_agent.policy_controller import PolicyEngine
from shared.cpus import usable_cpus


class Conditions(TypedDict):
    """What was measured, and on what. verify_ms: c(1), c(2), … of the target. weight_bytes: of the files;
    draft_memory_bytes: what the draft model adds to memory once it is loaded (a look-up adds next to nothing)."""

    format: int
    at: str
    machine: str
    cores: int
    onnxruntime: str
    model: str
    target_weight_bytes: int
    draft: str | None
    draft_weight_bytes: int
    draft_memory_bytes: int
    gamma: int
    max_tokens: int
    repeats: int
    prompts: int
    energy_source: str
    verify_ms: list[float]
    draft_token_ms: dict[str, float]


class BenchReport(TypedDict):
    """The JSON of `bench --json`."""

    conditions: Conditions
    contenders: list[ContenderFigures]
    runs: list[dict[str, Any]]


def conditions(
    engine: Engine,
    energy_source: str,
    *,
    gamma: int,
    max_tokens: int,
    repeats: int,
    prompts: int,
    draft_memory_bytes: int = 0,
) -> Conditions:
    """What is measured, and on what."""
    costs = engine.policy.costs if isinstance(engine.policy, PolicyEngine) else None
    return {
        "format": FORMAT,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": usable_cpus(),
        "onnxruntime": metadata.version("onnxruntime"),
        "model": engine.model_name,
        "target_weight_bytes": engine.target.weight_bytes,
        "draft": engine.draft.name if engine.draft else None,
        "draft_weight_bytes": engine.draft.weight_bytes if engine.draft else 0,
        "draft_memory_bytes": draft_memory_bytes,
        "gamma": gamma,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "prompts": prompts,
        "energy_source": energy_source,
        "verify_ms": [round(value * 1e3, 3) for value in costs.curve.values] if costs else [],
        "draft_token_ms": {name: round(cost * 1e3, 4) for name, cost in costs.draft_costs.items()} if costs else {},
    }


def bench_report(found: Conditions, names: Sequence[str], runs: Sequence[Run]) -> BenchReport:
    """Conditions, the figures of the named contenders, and every single run."""
    return {"conditions": found, "contenders": summarise(names, runs), "runs": [raw(run) for run in runs]}


@dataclass(frozen=True)
class Row:
    """One figure of all contenders as it is shown; a dash is unknown."""

    label: str
    cells: tuple[str, ...]


def rows(report: BenchReport) -> list[Row]:
    """The figures that are shown, each with its quartiles under it where it has some."""
    shown: list[Row] = []

    def add(label: str, cell: Callable[[ContenderFigures], str]) -> None:
        shown.append(Row(label, tuple(cell(figures) for figures in report["contenders"])))

    def add_spread(label: str, spread: Callable[[ContenderFigures], Spread | None], digits: int) -> None:
        add(label, lambda figures: _median(spread(figures), digits))
        add("  quartiles", lambda figures: _quartiles(spread(figures)))

    add_spread("tokens/s", lambda figures: figures["tokens_per_second"], 1)
    add("speed-up, decoding", lambda figures: _number(figures["decode_speedup"], 2, "×"))
    add("speed-up, overall", lambda figures: _number(figures["speedup"], 2, "×"))
    add_spread("first token, s", lambda figures: figures["first_token_s"], 2)
    add_spread("whole answer, s", lambda figures: figures["latency_s"], 2)
    add("drafts accepted", lambda figures: _percent(figures["acceptance_rate"]))
    add("tokens a round", lambda figures: _number(figures["tokens_per_round"], 2))
    add("time drafting", lambda figures: _percent(figures["drafting_share"]))
    add("CPU s a token", lambda figures: _number(figures["cpu_s_per_token"], 4))
    add("joules a token", lambda figures: _number(figures["joules_per_token"], 3))
    add("same text as direct", lambda figures: _same(figures["equal_texts"]))
    return shown


def table(report: BenchReport) -> Table:
    """Medians and quartiles, a contender a column."""
    found = report["conditions"]
    draft = f"; draft {found['draft']}, {found['draft_memory_bytes'] / 1e6:,.0f} MB more" if found["draft"] else ""
    shown = Table(
        title=f"{found['model']}, {found['target_weight_bytes'] / 1e6:,.0f} MB{draft}. "
        f"{found['prompts']} prompts, {found['repeats']} times, up to {found['max_tokens']} tokens; medians",
        caption=f"Drafters alone draft {found['gamma']} tokens a round; auto is the policy. "
        f"Energy: {found['energy_source']}.",
    )
    shown.add_column("", no_wrap=True)
    for figures in report["contenders"]:
        shown.add_column(figures["name"], justify="right")
    for row in rows(report):
        shown.add_row(row.label, *row.cells, style="dim" if row.label.startswith(" ") else None)
    return shown


def _same(equal: list[int] | None) -> str:
    return f"{equal[0]}/{equal[1]}" if equal else "–"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _median(value: Spread | None, digits: int) -> str:
    return "–" if value is None else f"{value['median']:.{digits}f}"


def _quartiles(value: Spread | None) -> str:
    return "–" if value is None else f"{value['p25']:.3g}–{value['p75']:.3g}"
