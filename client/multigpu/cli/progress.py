"""How long work shows that it moves: a bar on a terminal, else a line now and then. On stderr, beside the answer."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from multigpu.cli import show

LINE_INTERVAL_S = 10.0


class Progress:
    """Counts `unit`s; `total` is None when nobody knows it."""

    def __init__(self, unit: str, total: int | None, *, quiet: bool = False) -> None:
        self._unit = unit
        self._total = total
        self._quiet = quiet
        self._started_at = time.monotonic()
        self._said_at = self._started_at
        self._bar: Any = None
        self._task: Any = None
        self.done = self._begun_with = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self._quiet:
            self._bar, self._task = _bar(self._unit, self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, done: int = 0) -> None:
        """The work begins now, not when the waiting for it did. `done`: what an earlier run did."""
        self.done = self._begun_with = done
        self._started_at = self._said_at = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, completed=done)

    def add(self, count: int) -> None:
        """So many more are done."""
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
            self._bar.console.print(show.clean_lines(text), markup=False, highlight=False)
        else:
            show.note(text)


def _bar(unit: str, total: int | None) -> tuple[Any, Any]:
    from rich import progress  # noqa: PLC0415  only a terminal pays for it
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
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    return bar, bar.add_task(unit, total=total)
