"""`edge-agent calibrate`: what passes cost on this machine, shown as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from edge_agent.calibration import measure_curve
from edge_agent.config import EdgeSettings
from edge_agent.serve import fetch_models
from shared.models.cache import ModelCache
from shared.models.directory import open_model_directory
from shared.models.pull import pull
from shared.onnx_lm import OnnxModel


def print_calibration(settings: EdgeSettings) -> None:
    """Measure and print c(m) of the target, and a draft's cost per token where there is a draft.

    Raises:
        ModelError: a model can't be had.
    """
    fetch_models(settings)
    cache = ModelCache(settings.cache_dir)
    console = Console()
    target = pull(settings.target, cache)
    model = OnnxModel(target, context_length=settings.context_length, num_threads=settings.threads)
    curve = measure_curve(model.new_cache())
    table = Table("positions m", "c(m), ms", "c(m) / c(1)", "tokens/s at full acceptance")
    for m, seconds in enumerate(curve, start=1):
        table.add_row(str(m), f"{seconds * 1000:.1f}", f"{seconds / curve[0]:.2f}", f"{m / seconds:.1f}")
    console.print(f"{settings.target}: {open_model_directory(target).weight_bytes / 1e6:,.0f} MB of weights")
    console.print(table)
    if settings.has_draft:
        draft = pull(settings.draft, cache, role="draft")
        draft_model = OnnxModel(draft, context_length=settings.context_length, num_threads=settings.threads)
        cost = measure_curve(draft_model.new_cache(), positions=(1,))[0]
        console.print(f"{settings.draft} drafts a token in {cost * 1000:.1f} ms, {cost / curve[0]:.2f} of c(1)")
