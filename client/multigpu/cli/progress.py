"""Progress of long work on stderr: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from typing import Any, Self

from multigpu.cli import show
from multigpu.cli.text import clean_lines

LINE_INTERVAL_S = 10.0


class Progress:
    """Counts `unit`s; `total` is None if it is not known."""

    def __init__(self, unit: str, total: int | None, *, quiet: bool = False) -> None:
        self._unit = unit
        self._total = total
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self.begin()

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self._quiet:
            self._bar, self._task = _bar(self._unit, self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, done: int = 0) -> None:
        """Starts the clock, after waiting for a fleet. `done`: units of an earlier run."""
        self.done = self._begun_with = done
        self._started_at = self._said_at = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, completed=done)

    def add(self, count: int) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.advance(self._task, count)
            return
        now = time.monotonic()
        if not self._quiet and now - self._said_at >= LINE_INTERVAL_S:
            self._said_at = now
            of = f" of {self._total:,}" if self._total is not None else ""
            rate = (self.done - self._begun_with) / (now - self._started_at)
            show.note(f"{self.done:,}{of} {self._unit}, {rate:,.0f} a second")

    def say(self, text: str) -> None:
        """A remark that the bar doesn't overwrite."""
        if self._bar is not None:
            self._bar.console.print(clean_lines(text), markup=False, highlight=False)
        else:
            show.note(text)


def _bar(unit: str, total: int | None) -> tuple[Any, Any]:
    from rich import progress  # noqa: PLC0415  needed on a terminal only
    from rich.console import Console  # noqa: PLC0415

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Any:
            speed = task.finished_speed or task.speed
            return f"{speed:,.0f} {unit}/s" if speed else ""

    columns = (
        progress.TextColumn("{task.completed:,.0f}" + (f" of {total:,}" if total is not None else "") + f" {unit}"),
        progress.BarColumn(),
        Rate(),
        progress.TimeRemainingColumn() if total is not None else progress.TimeElapsedColumn(),
    )
    # rich's redirection would send the command's output to stderr.
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    return bar, bar.add_task(unit, total=total)
