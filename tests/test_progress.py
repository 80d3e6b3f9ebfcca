"""Bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from shared.models.progress import RichProgress


def _shown(*, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, no_color=True)
    with RichProgress(console) as progress:
        for done in (0, 25_000_000, 50_000_000):
            progress("downloading m", done, 50_000_000)
        progress("waiting [for] another", 0, 0)
        for done in (0.25, 1.0):
            progress("building m", done, 1.0)
    return output.getvalue()


def test_a_terminal_sees_a_bar_for_each_stage() -> None:
    shown = _shown(terminal=True)
    assert "50 / 50 MB" in shown
    assert "100%" in shown
    assert "waiting [for] another" in shown


def test_a_log_sees_a_line_for_each_stage() -> None:
    assert _shown(terminal=False).splitlines() == ["downloading m", "waiting [for] another", "building m"]
