"""The simulator's picture: speed-up over gamma, simulated points on the closed form's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from edge_agent.simulate import SpeedupRow
from shared.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
STYLES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"))
"""Okabe and Ito's colours, told apart by their markers too."""


def check_plot_path(path: Path) -> None:
    """Refuse a file name that has no picture format.

    Raises:
        ConfigError: another suffix, or no such folder.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder doesn't exist")


def plot_speedup(path: Path, rows: Mapping[str, Sequence[SpeedupRow]], title: str) -> None:
    """Draw one line a workload into a file whose suffix names the format."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (label, series), (color, marker) in zip(rows.items(), STYLES * len(rows), strict=False):
        gammas = [row.gamma for row in series]
        best = max(series, key=lambda row: row.speedup_closed_form)
        axes.plot(gammas, [row.speedup_closed_form for row in series], color=color, linewidth=1.5)
        axes.errorbar(
            gammas,
            [row.speedup_simulated for row in series],
            yerr=[row.ci95 for row in series],
            color=color,
            marker=marker,
            linestyle="none",
            capsize=3,
            label=f"{label}, alpha {series[-1].alpha:.2f}: best {best.speedup_closed_form:.2f} at {best.gamma}",
        )
    axes.axhline(1.0, color="0.4", linewidth=1, linestyle=":")
    axes.set_xlabel("gamma: draft tokens a round")
    axes.set_ylabel("speed-up over direct decoding")
    axes.set_title(title, loc="left")
    axes.set_xticks([row.gamma for row in next(iter(rows.values()))])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="points: simulated, 95% interval; lines: closed form")
    figure.savefig(path, dpi=150)
