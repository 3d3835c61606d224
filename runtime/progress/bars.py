"""Bars: progress bars on a terminal, drawn with rich."""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from .display import Display, shortened, status
from .estimate import TimeEstimate


class Bars(Display):
    """One bar with the elapsed and the remaining time; it disappears when its stage ends."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._estimate = TimeEstimate(time.monotonic())
        self._progress = Progress(
            TextColumn("{task.fields[stage]:<9}"),
            BarColumn(bar_width=24),
            _Status(self),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"), markup=False),
            console=self._console,
            transient=True,
            refresh_per_second=2,  # per second: enough for figures in seconds, and cheap compared with the work
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def enter(self, stage: str) -> None:
        self._estimate = TimeEstimate(time.monotonic())
        self._task = self._progress.add_task("", stage=stage, total=None)

    def update(self, text: str, done: float, total: float) -> None:
        self._estimate.update(done, total, time.monotonic())
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, description=shortened(text))

    def leave(self, stage: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        self._progress.stop()

    def status(self) -> str:
        """The elapsed and the remaining time, as text."""
        now = time.monotonic()
        return status(self._estimate, self._estimate.left(now), now)


class _Status(ProgressColumn):
    def __init__(self, bars: Bars) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._bars = bars

    def render(self, task: Task) -> Text:
        return Text(self._bars.status())
