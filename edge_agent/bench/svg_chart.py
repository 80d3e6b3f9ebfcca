"""Two kinds of picture as inline SVG: grouped bars with whiskers, and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from edge_agent.bench.summary import Spread

WIDTH = 860
LEFT = 56
RIGHT = 16
TOP = 14
BOTTOM = 42
COLORS = ("#9a4f00", "#0a5fa5", "#2b7a4b", "#7d2d7d", "#8a6d00", "#a3261b", "#586159")


def bars(groups: Mapping[str, Mapping[str, Spread | None]], unit: str) -> str:
    """A group for each key, a bar for each contender in it; whiskers from the first to the third quartile.

    groups: {group: {contender: spread}}, the same contenders in each.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    height = 300
    top = _round_up(
        max((spread["p75"] for group in groups.values() for spread in group.values() if spread), default=1.0)
    )
    scale = (height - TOP - BOTTOM) / top
    parts = _grid(top, scale, height)
    group_width = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    bar_width = group_width * 0.8 / max(len(names), 1)
    for index, (group, spreads) in enumerate(groups.items()):
        start = LEFT + index * group_width + group_width * 0.1
        for place, name in enumerate(names):
            spread = spreads.get(name)
            if spread is None:
                continue
            x, y = start + place * bar_width, height - BOTTOM - spread["median"] * scale
            title = f"<title>{escape(group)}, {escape(name)}: {spread['median']:.3g} {escape(unit)}</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(bar_width - 2, 1):.1f}" '
                f'height="{spread["median"] * scale:.1f}" fill="{color(place)}" rx="2">{title}</rect>'
            )
            middle = x + (bar_width - 2) / 2
            low, high = (height - BOTTOM - spread[end] * scale for end in ("p25", "p75"))
            parts.append(f'<path class="whisker" d="M{middle:.1f} {low:.1f}V{high:.1f}"/>')
        parts.append(_text(start + group_width * 0.4, height - BOTTOM + 18, group, "middle"))
    return _svg(parts, height, f"{unit} by scenario and contender") + _legend(dict.fromkeys(names, True))


def lines(series: Mapping[str, Sequence[float]], unit: str, x_label: str, *, first_x: int = 1) -> str:
    """A line for each key over first_x, first_x + 1, …; a key without values only keeps its colour."""
    height = 260
    longest = max((len(values) for values in series.values()), default=0)
    top = _round_up(max((value for values in series.values() for value in values), default=1.0))
    scale = (height - TOP - BOTTOM) / top
    step = (WIDTH - LEFT - RIGHT) / max(longest - 1, 1)
    parts = _grid(top, scale, height)
    for place, (name, values) in enumerate(series.items()):
        points = [(LEFT + i * step, height - BOTTOM - value * scale) for i, value in enumerate(values)]
        path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
        parts.append(f'<path fill="none" stroke="{color(place)}" stroke-width="2.5" d="{path}"/>')
        for (x, y), value in zip(points, values, strict=True):
            title = f"<title>{escape(name)}: {value:.3g} {escape(unit)}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color(place)}">{title}</circle>')
    parts += [_text(LEFT + i * step, height - BOTTOM + 18, str(first_x + i), "middle") for i in range(longest)]
    parts.append(_text((LEFT + WIDTH) / 2, height - 6, x_label, "middle"))
    return _svg(parts, height, f"{unit} over {x_label}") + (_legend(series) if len(series) > 1 else "")


def color(place: int) -> str:
    """The colour of the n-th contender."""
    return COLORS[place % len(COLORS)]


def _grid(top: float, scale: float, height: int) -> list[str]:
    parts = []
    for i in range(5):
        value = top * i / 4
        y = height - BOTTOM - value * scale
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:.3g}", "end"))
    return parts


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(parts: Sequence[str], height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _legend(shown: Mapping[str, object]) -> str:
    """An entry for every name with something to show."""
    entries = (
        f'<li><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" rx="2" '
        f'fill="{color(place)}"/></svg> {escape(name)}</li>'
        for place, (name, content) in enumerate(shown.items())
        if content
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _round_up(value: float) -> float:
    """The next value that four even steps divide into plain numbers."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((factor * power for factor in (1, 2, 4, 6, 8) if factor * power >= value * (1 - 1e-9)), 10 * power)
