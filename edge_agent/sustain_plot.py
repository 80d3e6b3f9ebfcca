"""The picture of `edge-agent sustain`: speed, temperature and energy over the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from edge_agent.sustain import SustainPlan, SustainRun

COLORS = ("#d55e00", "#0072b2", "#009e73")
"""Okabe and Ito's, one a setup."""

WINDOW_S = 30.0


def plot_sustain(path: Path, runs: Sequence[SustainRun], plan: SustainPlan) -> None:
    """Three panels over one time axis, into a file whose suffix names the format."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    speed, heat, energy = figure.subplots(3, sharex=True)
    for run, color in zip(runs, COLORS, strict=False):
        minutes = [moment.at_s / 60 for moment in run.moments]
        starts = [WINDOW_S / 2 * step for step in range(int(2 * run.seconds / WINDOW_S) - 1)]
        label = f"{run.setup}: {run.retained:.0%} of the first minute's speed kept"
        speed.plot(
            [(start + WINDOW_S / 2) / 60 for start in starts],
            [run.rate(start, start + WINDOW_S) for start in starts],
            color=color,
            label=label,
        )
        heat.plot(minutes, [moment.temperature_c for moment in run.moments], color=color)
        energy.plot(
            minutes,
            [moment.joules / max(moment.tokens, 1) for moment in run.moments],
            color=color,
            label=f"{run.setup}: {run.joules_per_token:.3f} J a token",
        )
    heat.axhline(plan.profile.limit_c, color="0.4", linewidth=1, linestyle=":", label="throttling begins")
    speed.set_ylabel("tokens a second")
    heat.set_ylabel("temperature, °C")
    energy.set_ylabel("joules a token so far")
    energy.set_xlabel("minutes of the device's time")
    speed.set_title(
        f"Simulated {plan.profile.name}, real model, time x{plan.time_scale:g}: with the policy and without", loc="left"
    )
    for axes in (speed, heat, energy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=None if axes is heat else 0)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
