"""`edge-agent sustain`: ten minutes on a simulated device, with the policy and without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from edge_agent.config import EdgeSettings, Preset, load_settings
from edge_agent.measured_input import read_curve
from shared.errors import ConfigError

if TYPE_CHECKING:
    from edge_agent.sustain import SustainPlan, SustainRun

QUESTIONS = (
    "Write a Python class for a bank account with deposit, withdraw and transfer, each with a docstring.",
    "Here is a function:\n\ndef area(width, height):\n    return width * height\n\ndef perimeter(width, height):\n"
    "    return 2 * (width + height)\n\nRewrite it with type hints and docstrings.",
    "List ten kitchen tools and say in one sentence each what they are for.",
    "Explain in simple words why the sky is blue.",
)
"""Code, an edit, a list and prose: what drafts well and what doesn't."""

POLICIES = {"phone": "phone", "board": "board", "laptop": "server"}


def sustain(
    minutes: Annotated[float, typer.Option(min=2.0, max=120.0, help="of the device's time")] = 10.0,
    profile: Annotated[str, typer.Option(help="phone, board or laptop")] = "phone",
    time_scale: Annotated[
        float, typer.Option(min=1.0, max=100.0, help="how many times as fast the device heats as the model decodes")
    ] = 10.0,
    rtt_ms: Annotated[float, typer.Option(min=0.0, max=5000.0, help="round trip to the simulated cloud")] = 40.0,
    cloud_speed: Annotated[
        float,
        typer.Option(min=0.1, max=100.0, help="passes of the simulated cloud over the device's own at full clock"),
    ] = 1.0,
    curve: Annotated[
        str | None,
        typer.Option(
            help="ms of a pass over 1, 2, … positions: 29,35,43 or a file of GET /v1/policy; measured here by default",
            metavar="CURVE",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="also draw a picture", metavar="FILE")] = None,
    preset: Annotated[Preset | None, typer.Option(help="pair of models; only the target is used")] = None,
    target: Annotated[str | None, typer.Option(help="model that answers")] = None,
    config: Annotated[Path | None, typer.Option(help="settings file")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="where models are kept")] = None,
    threads: Annotated[int | None, typer.Option(help="inference threads; the usable cores by default")] = None,
) -> None:
    """Decode the same prompts on a simulated hot device: without a policy, with it, and with it and a cloud.

    A simulation: the model and its text are real, so are the times of its passes; the device and the cloud are models.
    """
    from edge_agent.speedup_plot import check_plot_path

    if plot is not None:
        check_plot_path(plot)
    flags = {"preset": preset, "target": target, "config": config, "cache_dir": cache_dir, "threads": threads}
    settings = load_settings({**flags, "draft": "none"})
    costs_ms = read_curve(curve).values if curve else ()
    plan, runs = asyncio.run(_simulated(settings, profile, minutes, time_scale, rtt_ms / 1e3, cloud_speed, costs_ms))
    console = Console()
    console.print(summary_table(runs, plan))
    console.print(minute_table(runs))
    console.print("A simulation: real model, real text, measured times of passes; the device and the cloud are models.")
    if plot is not None:
        from edge_agent.sustain_plot import plot_sustain

        plot_sustain(plot, runs, plan)


async def _simulated(
    settings: EdgeSettings,
    profile: str,
    minutes: float,
    time_scale: float,
    rtt_s: float,
    cloud_speed: float,
    costs_ms: Sequence[float],
) -> tuple[SustainPlan, list[SustainRun]]:
    from edge_agent.device import Device
    from edge_agent.loading import load_engine
    from edge_agent.policy_controller import PolicyEngine, Senses
    from edge_agent.serve import fetch_models
    from edge_agent.simulated_phone import find_profile
    from edge_agent.sustain import SustainPlan, run_all
    from edge_agent.thresholds import PRESETS, choose_preset

    device = find_profile(profile)
    fetch_models(settings)
    engine = await load_engine(settings, Device("push"), Senses(), lambda *_: None)
    try:
        if not isinstance(engine.policy, PolicyEngine):
            raise ConfigError("the simulation needs the policy engine")
        template, tokenizer = engine.chat_template, engine.tokenizer
        plan = SustainPlan(
            profile=device,
            thresholds=PRESETS[choose_preset(POLICIES[profile])],
            prompts=[tuple(template.encode(tokenizer, [{"role": "user", "content": text}])) for text in QUESTIONS],
            curve=[cost / 1e3 for cost in costs_ms] or engine.policy.costs.curve.values,
            stop_ids=frozenset(tokenizer.eos_ids),
            minutes=minutes,
            time_scale=time_scale,
            rtt_s=rtt_s,
            cloud_speed=cloud_speed,
        )
        return plan, await run_all(engine.target, plan)
    finally:
        await engine.close()


def summary_table(runs: Sequence[SustainRun], plan: SustainPlan) -> Table:
    """What each setup keeps of its first minute's speed, and at what energy."""
    title = (
        f"simulated {plan.profile.name}, {plan.minutes:g} minutes, time x{plan.time_scale:g}; "
        f"a cloud {plan.cloud_speed:g} times as fast, {plan.rtt_s * 1e3:g} ms away"
    )
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for column in ("first minute", "last 30 %", "kept", "J/token", "by radio", "tokens", "on cloud"):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.setup.value,
            f"{run.first_minute:.1f} tok/s",
            f"{run.last_part:.1f} tok/s",
            f"{run.retained:.0%}",
            f"{run.joules_per_token:.3f}",
            f"{run.radio_share:.0%}",
            f"{run.num_tokens:,}",
            f"{run.cloud_share:.0%}",
        )
    return table


def minute_table(runs: Sequence[SustainRun]) -> Table:
    """Speed and temperature by the minute of the device's time."""
    table = Table("minute", title="tokens a second and °C by the minute of the device's time")
    for run in runs:
        table.add_column(run.setup.value, justify="right")
    for minute in range(int(runs[0].seconds // 60)):
        cells = [
            f"{run.rate(60.0 * minute, 60.0 * (minute + 1)):.1f}  {run.temperature_at(60.0 * minute + 30.0):.1f} °C"
            for run in runs
        ]
        table.add_row(str(minute + 1), *cells)
    return table
