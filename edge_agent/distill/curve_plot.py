"""The learning curve as a picture: acceptance over answer tokens, and the line through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

COLOURS = ("#0072b2", "#d55e00", "#009e73")


@dataclass(frozen=True)
class CurvePoint:
    """Acceptance at positions 1, 2 … (each given those before) of a head trained on so many answer tokens."""

    num_tokens: int
    acceptance: tuple[float, ...]


def extrapolate(points: Sequence[CurvePoint], num_tokens: int) -> list[float]:
    """What a straight line over the logarithm of the tokens gives, for each position; at most 1."""
    x = np.log([point.num_tokens for point in points])
    lines = [np.polyfit(x, y, 1) for y in zip(*(point.acceptance for point in points), strict=True)]
    return [min(1.0, float(slope * np.log(num_tokens) + start)) for slope, start in lines]


def plot_curve(path: Path, points: Sequence[CurvePoint], title: str) -> None:
    """Measured points and the line through them up to ten times the data."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [point.num_tokens for point in points]
    far = [sizes[0], 10 * sizes[-1]]
    ends = [extrapolate(points, size) for size in far]
    for position, colour in zip(range(len(points[0].acceptance)), COLOURS, strict=False):
        label = f"position {position + 1}" + (" given those before" if position else "")
        axes.plot(sizes, [point.acceptance[position] for point in points], "o", color=colour, label=label)
        axes.plot(far, [end[position] for end in ends], ":", color=colour)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1000:,.0f}k"))
    axes.set_xlabel("answer tokens trained on")
    axes.set_ylabel("acceptance")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="dotted: a line over log(tokens)")
    figure.savefig(path)
