"""`edge-agent bench`: direct against speculative decoding on this machine, and a peer beside them when asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from edge_agent.config import EdgeSettings, Preset, load_settings
from edge_agent.scenarios import Scenario, built_in, read_scenarios
from shared.errors import ConfigError


def bench(
    preset: Annotated[Preset | None, typer.Option(help="pair of models")] = None,
    target: Annotated[str | None, typer.Option(help="model that answers")] = None,
    draft: Annotated[str | None, typer.Option(help="model that drafts for it, or 'none'")] = None,
    head: Annotated[str | None, typer.Option(help="draft head: auto, 'none' or a directory")] = None,
    config: Annotated[Path | None, typer.Option(help="settings file")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="where models are kept")] = None,
    threads: Annotated[int | None, typer.Option(help="inference threads; the usable cores by default")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Spec-Bench file, one JSON object a line; the built-in scenarios by default")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N prompts")] = None,
    tokens: Annotated[int, typer.Option(min=8, max=4096, help="longest answer")] = 64,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="times that each prompt is asked")] = 3,
    gamma: Annotated[int, typer.Option(min=1, max=16, help="draft tokens a round of the drafters alone")] = 4,
    peer: Annotated[str | None, typer.Option(help="address of an OpenAI-compatible server to ask the same")] = None,
    peer_key: Annotated[str | None, typer.Option(help="its key", envvar="SOUSCHEF_PEER_KEY", show_envvar=False)] = None,
    peer_model: Annotated[str | None, typer.Option(help="its model; the first that it lists by default")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    report: Annotated[Path | None, typer.Option(help="also write an HTML file with pictures", metavar="FILE")] = None,
) -> None:
    """Measure direct decoding, each drafter and the policy, interleaved, on your own prompts.

    Nothing else should run meanwhile. The defaults take some minutes.
    """
    from edge_agent.bench.bench_report import table
    from edge_agent.bench.html_report import html_report

    if report is not None and not report.absolute().parent.is_dir():
        raise ConfigError(f"--report {report}: the folder doesn't exist")
    flags = {"preset": preset, "target": target, "draft": draft, "config": config, "cache_dir": cache_dir}
    settings = load_settings({**flags, "head": head, "threads": threads})
    scenarios = (read_scenarios(prompts) if prompts else built_in())[:limit]
    peers = [(peer, peer_key, peer_model)] if peer else []
    found = asyncio.run(_measured(settings, scenarios, tokens=tokens, repeats=repeats, gamma=gamma, peers=peers))
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        Console().print(table(found))
    if report is not None:
        report.write_text(html_report(found), encoding="utf-8")
        typer.echo(f"written to {report}", err=True)


async def _measured(
    settings: EdgeSettings,
    scenarios: Sequence[Scenario],
    *,
    tokens: int,
    repeats: int,
    gamma: int,
    peers: Sequence[tuple[str, str | None, str | None]],
) -> Any:
    from edge_agent.bench.bench_report import bench_report, conditions
    from edge_agent.bench.contender import Contender, local_contenders
    from edge_agent.bench.measure import measure, num_runs
    from edge_agent.bench.peer import PeerContender
    from edge_agent.device import Device
    from edge_agent.energy import choose_meter
    from edge_agent.loading import load_engine
    from edge_agent.policy_controller import Senses
    from edge_agent.thresholds import choose_preset
    from shared.models.progress import RichProgress

    console = Console(stderr=True)
    with RichProgress(console) as progress:
        engine = await load_engine(settings, Device(settings.sensors), Senses(), progress)
    try:
        async with AsyncExitStack() as stack:
            meter = choose_meter(choose_preset(settings.policy))
            predictions = any(scenario.prediction for scenario in scenarios)
            contenders: list[Contender] = [*local_contenders(engine, meter, gamma, predictions=predictions)]
            for url, key, model in peers:
                contenders.append(await stack.enter_async_context(PeerContender(url, key=key, model=model)))
            with Progress(console=console, transient=True) as bar:
                task = bar.add_task("measuring", total=num_runs(contenders, scenarios, repeats))
                runs = await measure(
                    contenders,
                    scenarios,
                    max_tokens=tokens,
                    repeats=repeats,
                    on_run=lambda run: bar.advance(task),
                )
        found = conditions(
            engine,
            meter.source,
            gamma=gamma,
            max_tokens=tokens,
            repeats=repeats,
            prompts=len(scenarios),
            draft_memory_bytes=await _draft_memory(settings),
        )
        return bench_report(found, [contender.name for contender in contenders], runs)
    finally:
        await engine.close()


async def _draft_memory(settings: EdgeSettings) -> int:
    """What the draft model adds to memory; 0 without one."""
    from edge_agent.bench.resident_memory import added_bytes
    from shared.models.cache import ModelCache
    from shared.models.pull import pull

    if not settings.has_draft:
        return 0
    directory = await asyncio.to_thread(pull, settings.draft, ModelCache(settings.cache_dir), role="draft")
    return await added_bytes(directory, settings.threads)
