"""`edge-agent simulate`: how much speculation gains in theory, by the rule that decides in practice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from edge_agent.measured_input import read_curve, read_rates
from edge_agent.simulate import IDEAL_CURVE, SpeedupRow, Workload, measured_workload, random_workload
from edge_agent.simulate import simulate as simulate_workload
from shared.sampling import AcceptanceRule

DISTANCES = {"near draft": 0.5, "middling draft": 1.0, "far draft": 2.0}
"""Noise on the draft's logits, for a draft model that is close to its target and for ones that are less so."""


def simulate(
    rates: Annotated[
        str | None,
        typer.Option(help="measured acceptance by position: 0.8,0.7,0.6 or a file of `bench --json`", metavar="RATES"),
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(
            help="measured cost of a pass over 1, 2, … positions: 10.5,14,18.5 or a file of GET /v1/policy; "
            "by default verifying many positions costs what one costs",
            metavar="CURVE",
        ),
    ] = None,
    draft_cost: Annotated[float, typer.Option(min=0.0, max=10.0, help="cost of a draft token in target tokens")] = 0.1,
    rule: Annotated[AcceptanceRule, typer.Option(help="acceptance rule")] = AcceptanceRule.COUPLED,
    max_gamma: Annotated[int, typer.Option(min=0, max=16, help="longest draft")] = 12,
    rounds: Annotated[int, typer.Option(min=10, max=1_000_000, help="rounds simulated for each gamma")] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="the same seed gives the same numbers")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print rows as JSON instead of a table")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="also draw a picture into this .png or .svg", metavar="FILE")
    ] = None,
) -> None:
    """Simulate speculative rounds with the real acceptance rule, beside the closed form, for gamma 0 to 12."""
    # matplotlib takes a second to import: only who wants a picture waits for it.
    if plot is not None:
        from edge_agent.speedup_plot import check_plot_path

        check_plot_path(plot)
    costs = read_curve(curve) if curve else IDEAL_CURVE
    tables = {
        workload_label: simulate_workload(
            workload, max_gamma=max_gamma, draft_cost=draft_cost, curve=costs, rule=rule, num_rounds=rounds, seed=seed
        )
        for workload_label, workload in _workloads(rates, seed).items()
    }
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for rows in tables.values() for row in rows], indent=1))
    else:
        Console().print(_table(tables, "measured" if curve else "ideal"))
    if plot is not None:
        from edge_agent.speedup_plot import plot_speedup

        title = f"{'Measured' if curve else 'Ideal'} verification cost, draft token {draft_cost:g} of a target token"
        plot_speedup(plot, tables, title)


def _workloads(rates: str | None, seed: int) -> dict[str, Workload]:
    if rates is not None:
        return {"measured acceptance": measured_workload(read_rates(rates))}
    return {label: random_workload(distance, seed=seed) for label, distance in DISTANCES.items()}


def _table(tables: dict[str, list[SpeedupRow]], kind: str) -> Table:
    """gamma down, a workload across: simulated with its interval, closed form; the best gamma marked."""
    table = Table("gamma", title=f"speed-up over direct decoding, {kind} verification cost; * best gamma")
    for label, rows in tables.items():
        table.add_column(f"{label}\nalpha {rows[-1].alpha:.2f}", justify="right", no_wrap=True)
        table.add_column("closed\nform", justify="right", style="dim")
    best = {label: max(rows, key=lambda row: row.speedup_closed_form).gamma for label, rows in tables.items()}
    for same_gamma in zip(*tables.values(), strict=True):
        cells: list[str] = []
        for label, row in zip(tables, same_gamma, strict=True):
            mark = "*" if best[label] == row.gamma else " "
            cells += [f"{row.speedup_simulated:.2f} ±{row.ci95:.2f}", f"{row.speedup_closed_form:.2f}{mark}"]
        table.add_row(str(same_gamma[0].gamma), *cells)
    return table
