"""How the parts that take minutes say how far they are."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class ProgressListener(Protocol):
    """Told again and again how far a stage is."""

    def __call__(self, stage: str, done: float, total: float) -> None:
        """`done` of `total` of the stage: bytes, or a fraction of 1.0; a total of 0 means that nobody knows."""


class NullProgress:
    """Nobody listens."""

    def __call__(self, stage: str, done: float, total: float) -> None:
        """Does nothing."""


class RichProgress:
    """Bars on a terminal, one a stage; on anything else a line when a stage begins. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[size]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._stage: str | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: float, total: float) -> None:
        """Moves the stage's bar; a new stage gets a new one."""
        if self._task is None or stage != self._stage:
            self._begin(stage)
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total or None, size=_size(done, total))

    def _begin(self, stage: str) -> None:
        self._stage = stage
        self._task = self._bars.add_task(stage, total=None, size="")
        if not self._console.is_terminal:
            self._console.print(stage, highlight=False, markup=False)


def _size(done: float, total: float) -> str:
    """Megabytes for bytes, a percentage for a fraction."""
    if total <= 1.0:
        return f"{done:.0%}" if total else ""
    return f"{done / 1e6:,.0f} / {total / 1e6:,.0f} MB"
