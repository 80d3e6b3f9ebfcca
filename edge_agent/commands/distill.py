"""`edge-agent distill`: make a draft head for a target, out of the target's own answers."""

from __future__ import annotations

import importlib.util
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from shared.errors import ConfigError

if TYPE_CHECKING:
    from edge_agent.distill.curve_plot import CurvePoint
    from edge_agent.distill.evaluation import Acceptance
    from edge_agent.distill.recipe import Trained


def distill(
    target: Annotated[str, typer.Argument(help="Catalogue name, file:PATH, or hf:ORG/REPO/FILE.gguf.")],
    output: Annotated[Path, typer.Option(help="the head's directory; it is replaced when the new head is ready")],
    folder: Annotated[
        Path | None, typer.Option(help="where the work is kept, to go on from; in the models' cache by default")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=1000, help="tokens that the target answers to train on")] = 500_000,
    max_ids: Annotated[int, typer.Option(min=64, help="most ids that the head can propose")] = 16_384,
    epochs: Annotated[int, typer.Option(min=1, help="times that training sees every answer")] = 3,
    rate: Annotated[float, typer.Option(min=1e-6, max=1.0, help="highest learning rate")] = 3e-4,
    batch: Annotated[
        int, typer.Option(min=64, help="positions of a batch: with fewer, training takes more steps")
    ] = 3072,
    start_from: Annotated[
        Path | None, typer.Option(help="a head to train further, of this target or of --made-for", metavar="HEAD")
    ] = None,
    made_for: Annotated[
        str | None,
        typer.Option(
            help="the model that the head of --start-from was first made for, with the same tokens as this target: the "
            "head is fitted to this target's hidden states, keeps its own size, and gets ids to its own",
            metavar="MODEL",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of prompts, sampling and training")] = 1,
    prompts: Annotated[
        Path | None, typer.Option(help="file to measure acceptance on: an object a line with category and turns")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="folder of your own texts, of the kind that your users send: plain .txt files, a passage a paragraph "
            "or a line. Prompts are made of them beside ours"
        ),
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(help="also train on 1/8, 1/4 and 1/2 of the answers and draw the curve", metavar="SVG"),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="threads; the usable cores by default")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="where models are kept")] = None,
) -> None:
    """Train a draft head for a target. Needs the extra `train` (PyTorch); uses a GPU when there is one.

    Every stage goes on where Ctrl-C, `kill` or a crash stopped it: call the same command again. The defaults take hours
    on a CPU.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("distill needs PyTorch: pip install 'souschef-edge[train]'")
    from edge_agent.distill.curve_plot import extrapolate, plot_curve
    from edge_agent.distill.evaluation import measure_cost
    from edge_agent.distill.recipe import Distillation, Machine, Recipe
    from edge_agent.distill.shipped_text import TextRoots, own_pools
    from edge_agent.distill.trainer import TrainingPlan
    from edge_agent.speedup_plot import check_plot_path
    from shared.cpus import usable_cpus
    from shared.models.cache import ModelCache
    from shared.models.progress import RichProgress
    from shared.models.pull import pull

    if made_for is not None and start_from is None:
        raise ConfigError(
            "--made-for needs --start-from, a head's directory: it says which model that head was made for"
        )
    # Who stops the job keeps what was answered, whether by Ctrl-C or by `kill`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if curve is not None:
        check_plot_path(curve)
    own = own_pools(texts, seed) if texts is not None else None
    cache, console = ModelCache(cache_dir), Console()
    num_threads = threads or usable_cpus()
    plan = TrainingPlan(epochs=epochs, peak_rate=rate, batch_positions=batch)
    recipe = Recipe(num_answer_tokens=answer_tokens, max_ids=max_ids, seed=seed, plan=plan, start_from=start_from)
    with RichProgress() as progress:
        path = pull(target, cache, progress=progress)
        if made_for is not None:
            recipe = replace(recipe, made_for=pull(made_for, cache, progress=progress))
        kept = folder or cache.root / "distill" / path.name
        run = Distillation(path, kept, recipe, Machine.here(num_threads), progress)
        records = run.answer(run.compose_prompts(TextRoots(), own))
        trained = run.train(records)
        manifest = run.export(trained, output)
        found = run.evaluate(output, prompts, num_threads) if prompts is not None else {}
        points = run.learning_curve(records, trained) if curve is not None else []
    console.print(_training_table(trained))
    if found:
        console.print(_acceptance_table(found))
    if curve is not None:
        plot_curve(curve, points, f"draft head of {target}")
        console.print(_curve_table(points, extrapolate(points, 10 * points[-1].num_tokens)))
    cost = measure_cost(output, path, num_threads)
    console.print(
        f"{output}: {manifest.total_bytes / 1e6:.1f} MB, {manifest.num_ids:,} ids that are "
        f"{trained.vocabulary.coverage:.1%} of the answers; a step costs {cost:.3f} of a pass of the target"
    )


def _training_table(trained: Trained) -> Table:
    table = Table("", "loss", title=f"answers held out, after {trained.num_answer_tokens:,} tokens")
    for position in range(len(trained.report.acceptance)):
        table.add_column(f"position {position + 1}" + (", given those before" if position else ""), justify="right")
    for name, report in (("untrained", trained.untrained), ("trained", trained.report)):
        table.add_row(name, f"{report.loss:.3f}", *(f"{rate:.3f}" for rate in report.acceptance))
    return table


def _acceptance_table(found: dict[str, Acceptance]) -> Table:
    from edge_agent.distill.evaluation import DEPTH, mean_rates

    table = Table("category", "tokens", *(f"position {number + 1}" for number in range(DEPTH)), title="acceptance")
    for category, acceptance in found.items():
        rates = (f"{rate:.3f}" for rate in acceptance.rates())
        table.add_row(category, str(acceptance.reached[0]), *rates)
    table.add_section()
    table.add_row("mean", "", *(f"{rate:.3f}" for rate in mean_rates(found)))
    return table


def _curve_table(points: list[CurvePoint], tenfold: list[float]) -> Table:
    table = Table(
        "answer tokens", *(f"position {number + 1}" for number in range(len(tenfold))), title="learning curve"
    )
    for point in points:
        table.add_row(f"{point.num_tokens:,}", *(f"{rate:.3f}" for rate in point.acceptance))
    table.add_row(f"{10 * points[-1].num_tokens:,} (extrapolated)", *(f"{rate:.3f}" for rate in tenfold))
    return table
