"""`edge-agent calibrate`: what passes cost on this machine, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from edge_agent.config import Preset, load_settings
from edge_agent.cost_model import CostCurve
from edge_agent.gamma_chooser import best_length, measured_speedup

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def calibrate(
    preset: Annotated[Preset | None, typer.Option(help="pair of models")] = None,
    target: Annotated[str | None, typer.Option(help="model that answers")] = None,
    draft: Annotated[str | None, typer.Option(help="model that drafts for it, or 'none'")] = None,
    head: Annotated[str | None, typer.Option(help="draft head: auto, 'none' or a directory")] = None,
    config: Annotated[Path | None, typer.Option(help="settings file")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="where models are kept")] = None,
    context_length: Annotated[int | None, typer.Option(help="tokens of prompt and answer together")] = None,
    threads: Annotated[int | None, typer.Option(help="inference threads; the usable cores by default")] = None,
) -> None:
    """Measure what a pass over m positions costs here, the best gamma that follows, and how near the memory's floor."""
    from edge_agent.calibration import measure_curve, measure_head
    from edge_agent.head_choice import choose_head
    from edge_agent.memory_bandwidth import measure_bandwidth
    from edge_agent.serve import fetch_models
    from shared.models.cache import ModelCache
    from shared.models.directory import open_model_directory
    from shared.models.pull import pull
    from shared.models.stored_graph import StoredGraph
    from shared.models.target_embedding import TargetEmbedding
    from shared.onnx_head import OnnxHead
    from shared.onnx_lm import OnnxModel

    flags = {"preset": preset, "target": target, "draft": draft, "config": config, "cache_dir": cache_dir}
    settings = load_settings({**flags, "head": head, "context_length": context_length, "threads": threads})
    fetch_models(settings)
    cache, console = ModelCache(settings.cache_dir), Console()
    path = pull(settings.target, cache)
    bandwidth = measure_bandwidth()
    model = OnnxModel(path, context_length=settings.context_length, num_threads=settings.threads)
    curve = CostCurve(tuple(measure_curve(model.new_cache())))
    draft_costs: dict[str, float] = {"n-gram": 0.0}
    chosen = choose_head(settings.head, path)
    if chosen is not None:
        embedding, context_length = TargetEmbedding(path), settings.context_length
        weights = OnnxHead(chosen, embedding, context_length=context_length, num_threads=settings.threads)
        draft_costs["head"], _ = measure_head(weights.new_cache(), chosen.manifest.feature_size)
    if settings.has_draft:
        draft_path = pull(settings.draft, cache, role="draft")
        drafter = OnnxModel(draft_path, context_length=settings.context_length, num_threads=settings.threads)
        draft_costs[settings.draft] = measure_curve(drafter.new_cache(), positions=(1,))[0]
    console.print(curve_table(settings.target, curve))
    console.print(gamma_table(curve, draft_costs))
    console.print(floor_table(StoredGraph(open_model_directory(path).model_path).bytes_read(), bandwidth, curve.at(1)))


def curve_table(name: str, curve: CostCurve) -> Table:
    """c(m), and what it would give if every draft token were accepted."""
    table = Table("positions m", "c(m), ms", "c(m) / c(1)", "tokens/s at full acceptance", title=f"one pass of {name}")
    for m, seconds in enumerate(curve.values, start=1):
        table.add_row(str(m), f"{seconds * 1000:.1f}", f"{seconds / curve.at(1):.2f}", f"{m / seconds:.1f}")
    return table


def gamma_table(curve: CostCurve, draft_costs: dict[str, float]) -> Table:
    """The best gamma for each acceptance and drafter, and its S = E c(1) / (c(gamma + 1) + gamma c_draft)."""
    table = Table("acceptance", title="best gamma (speed-up over direct decoding)")
    for name, cost in draft_costs.items():
        table.add_column(f"{name}\n{cost * 1000:.1f} ms a draft token", justify="right")
    for alpha in ACCEPTANCES:
        table.add_row(f"{alpha:.2f}", *(_best(curve, alpha, cost) for cost in draft_costs.values()))
    return table


def _best(curve: CostCurve, alpha: float, draft_cost: float) -> str:
    gammas: Sequence[int] = range(len(curve.values))
    gamma = max(gammas, key=lambda gamma: measured_speedup([alpha] * gamma, curve, draft_cost))
    if best_length([alpha] * len(gammas), curve, value=curve.at(1), draft_cost=draft_cost).length == 0:
        return "0 (1.00)"
    return f"{gamma} ({measured_speedup([alpha] * gamma, curve, draft_cost):.2f})"


def floor_table(bytes_read: int, bandwidth: float, direct_s: float) -> Table:
    """The time that reading the weights that a pass needs takes, and how near a direct token comes to it."""
    floor = bytes_read / bandwidth
    table = Table("", "ms a token", "reached", title="memory floor")
    table.add_row(f"P / B: {bytes_read / 1e6:,.0f} MB at {bandwidth / 1e9:.1f} GB/s", *_reached(floor, direct_s))
    table.add_row("2 P / B: activations and KV as a second trip", *_reached(2 * floor, direct_s))
    table.add_row("direct token, measured", f"{direct_s * 1000:.1f}", "")
    return table


def _reached(floor: float, direct_s: float) -> tuple[str, str]:
    return f"{floor * 1000:.1f}", f"{floor / direct_s:.0%}"
