"""`cloud-service capacity`: how many edges replicas carry. A simulation, and called so wherever its numbers stand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cloud_service.capacity.plan import Costs, Edges, Limits
from cloud_service.capacity.search import Target, Turn, hint_turns, most_edges
from cloud_service.capacity.simulation import Outcome
from cloud_service.config import CloudSettings, Preset, load_settings
from shared.errors import ConfigError
from shared.measured_numbers import read_numbers

CURVE_KEYS = ("verify_cost_ms", "verify_ms")
BATCH_KEYS = ("batch_ms",)
SESSIONS = (1, 2, 3, 4, 6, 8, 12, 16)
NOTE = "A simulation: measured costs, modelled edges and links, no model and no network."


def capacity(
    curve: Annotated[
        str | None,
        typer.Option(
            help="ms of a pass over 1, 2, … positions: 84,106,137 or a JSON file that holds verify_cost_ms, as the "
            "answer of /v1/handshake does; measured here by default",
            metavar="CURVE",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="ms of a pass over 1, 2, … positions of several sessions; CURVE's by default", metavar="CURVE"
        ),
    ] = None,
    prefill_ms: Annotated[float | None, typer.Option(min=0.0, help="ms of a prompt token")] = None,
    message_ms: Annotated[float, typer.Option(min=0.0, help="ms of handling between a pass and the next")] = 1.0,
    preset: Annotated[Preset | None, typer.Option(help="model to measure, where no curve is given")] = None,
    model: Annotated[str | None, typer.Option(help="model to measure, where no curve is given")] = None,
    threads: Annotated[int | None, typer.Option(help="inference threads to measure with")] = None,
    replicas: Annotated[list[int] | None, typer.Option(min=1, max=1024, help="may be repeated; 1, 2 and 4")] = None,
    max_running: Annotated[int, typer.Option(min=1, max=256, help="as the service's setting")] = 8,
    max_waiting: Annotated[int, typer.Option(min=0, max=4096, help="as the service's setting")] = 32,
    slots: Annotated[int, typer.Option(min=2, max=4096, help="caches that fit into a replica's memory")] = 64,
    gamma: Annotated[int, typer.Option(min=1, max=16, help="draft length of edges that draft")] = 4,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="of a draft token")] = 0.7,
    draft_ms: Annotated[float, typer.Option(min=0.0, help="ms of a draft token on an edge")] = 20.0,
    rtt_ms: Annotated[float, typer.Option(min=0.0, help="median round trip")] = 40.0,
    rtt_p95_ms: Annotated[float, typer.Option(min=0.0, help="one round trip in 20 takes longer")] = 120.0,
    pause_s: Annotated[float, typer.Option(min=0.0, help="mean pause of an edge between two questions")] = 60.0,
    prompt_tokens: Annotated[float, typer.Option(min=1.0, help="mean")] = 200.0,
    answer_tokens: Annotated[float, typer.Option(min=1.0, help="mean")] = 64.0,
    token_p95_ms: Annotated[
        float | None, typer.Option(min=0.0, help="good enough: 19 answers of 20 take no longer a token; 3 c(1)")
    ] = None,
    answer_p95_s: Annotated[float | None, typer.Option(min=0.0, help="good enough: 19 answers of 20")] = None,
    seconds: Annotated[float, typer.Option(min=10.0, max=86400.0, help="simulated time of each try")] = 300.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="the same seed gives the same numbers")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Simulate how many edges a replica carries, with drafts and without, and where the gamma hint should turn."""
    if curve is None:
        costs = _measured(load_settings({"preset": preset, "model": model, "threads": threads}), message_ms)
    else:
        costs = _given(curve, batch, prefill_ms, message_ms)
    target = Target(token_p95_ms, answer_p95_s)
    if target == Target():
        target = Target(token_ms=3 * costs.verify(1))
    limits = Limits(1, max_running, max_waiting, slots, max(gamma, 8))
    edges = Edges(
        8, gamma, pause_s, prompt_tokens, answer_tokens, acceptance, draft_ms, rtt_ms, max(rtt_ms, rtt_p95_ms)
    )
    kinds = {"cloud generates": 0, f"drafts of {gamma}": gamma, "drafts by hint": None}
    found = {
        (label, number): most_edges(
            costs,
            dataclasses.replace(limits, replicas=number),
            dataclasses.replace(edges, gamma=length, number=8 * number),
            target,
            seconds,
            seed,
        )
        for label, length in kinds.items()
        for number in replicas or (1, 2, 4)
    }
    turns = hint_turns(costs, limits, edges, SESSIONS, seconds, seed)
    if as_json:
        typer.echo(_as_json(costs, target, found, turns))
        return
    console = Console()
    console.print(capacity_table(found, target))
    console.print(turn_table(turns))
    console.print(NOTE)


def _given(curve: str, batch: str | None, prefill_ms: float | None, message_ms: float) -> Costs:
    verify = read_numbers(curve, CURVE_KEYS, "--curve")
    steps = read_numbers(batch, BATCH_KEYS, "--batch") if batch else []
    try:
        return Costs(verify, steps, prefill_ms, message_ms)
    except ValueError as error:
        raise ConfigError(f"--curve and --batch: {error}") from error


def _measured(settings: CloudSettings, message_ms: float) -> Costs:
    from cloud_service.capacity.measure import measure_costs
    from cloud_service.loading import fetch_model, load_model

    fetch_model(settings)
    return dataclasses.replace(measure_costs(load_model(settings).decoder), message_ms=message_ms)


def capacity_table(found: dict[tuple[str, int], Outcome], target: Target) -> Table:
    """The most edges by kind and replicas, and what they feel then."""
    wanted = [f"{target.token_ms:.0f} ms a token"] if target.token_ms is not None else []
    wanted += [f"{target.answer_s:g} s an answer"] if target.answer_s is not None else []
    table = Table(title=f"simulated: the most edges within {' and '.join(wanted)} at p95")
    table.add_column("", no_wrap=True)
    for column in ("replicas", "edges", "tok/s", "ms/token", "s/answer", "busy"):
        table.add_column(column, justify="right")
    for (label, replicas), outcome in found.items():
        felt = [f"{outcome.token_p95_ms:.0f}", f"{outcome.answer_p95_s:.1f}"] if outcome.edges else ["", ""]
        table.add_row(
            label,
            str(replicas),
            f"{outcome.edges:,}",
            f"{outcome.tokens_per_second:,.0f}",
            *felt,
            f"{outcome.busy:.0%}",
        )
    return table


def turn_table(turns: Sequence[Turn]) -> Table:
    """The best draft length by busy sessions, beside the service's rule."""
    table = Table(
        "busy sessions", "best gamma", "tokens/s", "gamma by the rule", "tokens/s", "lost",
        title="simulated: where the hint should turn (0: the cloud generates)",
    )  # fmt: skip
    for turn in turns:
        rates = turn.tokens_per_second
        table.add_row(
            str(turn.sessions),
            str(turn.best),
            f"{rates[turn.best]:.1f}",
            str(turn.rule),
            f"{rates[turn.rule]:.1f}",
            f"{turn.lost_by_rule:.0%}",
        )
    return table


def _as_json(costs: Costs, target: Target, found: dict[tuple[str, int], Outcome], turns: Sequence[Turn]) -> str:
    content = {
        "note": NOTE,
        "costs": dataclasses.asdict(costs),
        "target": dataclasses.asdict(target),
        "capacity": [
            {"kind": label, "replicas": replicas, **dataclasses.asdict(outcome)}
            for (label, replicas), outcome in found.items()
        ],
        "hint": [dataclasses.asdict(turn) | {"lost_by_rule": turn.lost_by_rule} for turn in turns],
    }
    return json.dumps(content, indent=1)
