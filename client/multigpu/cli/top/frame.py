"""The screen of `mgpuctl top` for a View, at any size of terminal.

From above: the master and its load; the three lists, as long as they need to be or fit; the last message; the keys. A
fleet that is longer than its list is also shown as a line of coloured bars.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from multigpu.cli import tables
from multigpu.cli.fleet import device_columns
from multigpu.cli.tables import Column
from multigpu.cli.tasks import queues
from multigpu.cli.text import clean, since
from multigpu.cli.top import state
from multigpu.cli.top.state import Pane, View
from multigpu.fleet import Worker

WIDTH_MIN, HEIGHT_MIN = 40, 12
BARS = "▁▂▃▄▅▆▇█"
ALARM = "bold white on red"
KEYS = "↑↓ move  Tab list  d drain  c/u cordon on/off  x cancel  s sort  ? help  q quit"
HELP = """
  ↑ ↓ j k      mark the line above, below
  PgUp PgDn    ten lines at once
  Home End     the first, the last
  Tab ← →      the next list: devices, queues, running tasks

  d            drain the marked device's worker: no new tasks, running ones may finish
  c            cordon it: no new tasks; it keeps the tasks that it has
  u            uncordon: ends a drain and a cordon
  x            cancel the marked task

  s r          sort devices by the next column; reverse the order
  q Ctrl-C     quit

  Devices that don't all fit are bars above the list: the higher, the busier.
  green healthy, yellow degraded, cyan recovering, red sick or lost,
  magenta cordoned
"""
QUEUES = tuple(column for column in queues.COLUMNS if column.name != "LIMITS")


@dataclass(frozen=True, slots=True)
class List:
    """A pane's rows."""

    title: str
    rows: Sequence[Any]
    columns: Sequence[Column]
    styles: Sequence[str]
    empty: str
    note: str = ""


def frame(view: View, width: int, height: int) -> RenderableType:
    """The whole screen: `height` lines of at most `width` cells."""
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        return Text(f"too small: mgpuctl top needs {WIDTH_MIN} columns and {HEIGHT_MIN} lines"[:width])
    top, bottom = _header(view, width), [_last_message(view), _line(KEYS)]
    room = height - len(top) - len(bottom)
    middle = [_line(text) for text in HELP.splitlines()] if view.help else _lists(view, width, room)
    lines = sum(_lines_of(part) for part in middle)
    return Group(*top, *(middle[:room] if view.help else middle), *[Text()] * max(0, room - lines), *bottom)


def _lines_of(part: RenderableType) -> int:
    return 1 + part.row_count if isinstance(part, Table) else 1


def _line(text: str, style: str = "") -> Text:
    return Text(clean(text), style=style, no_wrap=True, overflow="ellipsis")


def _spread(left: str, right: str, width: int, style: str) -> Text:
    """Text at both ends of a line; the left one is cut."""
    text = _line(left, style)
    text.truncate(max(0, width - len(right) - 1), pad=True)
    return text.append(f" {right}")


def _header(view: View, width: int) -> list[Text]:
    stats, master = view.stats, f"multigpu {view.address}"
    if stats is not None:
        master += f"  up {since(stats.start_time)}  {stats.strategy}"
    lines = [_spread(master, f"{view.rate:,.0f} a second" if view.rate is not None else "", width, "bold")]
    if stats is not None:
        work = f"{stats.queued:,} queued, {stats.leased:,} leased, {stats.succeeded:,} done, {stats.failed:,} failed"
        dead = f", {stats.dead_lettered:,} dead letters" if stats.dead_lettered else ""
        lines.append(_line(work + dead))
    lines.append(_line(device_columns.summary(list(view.workers.values())) if view.workers else "no workers"))
    if stats is not None and stats.breaker.tripped:
        lines.append(_line("BREAKER TRIPPED: look why devices fall sick, then `mgpuctl breaker reset`", ALARM))
    if stats is not None and not stats.journal_writable:
        lines.append(_line("JOURNAL NOT WRITABLE: disk full, or journal_bytes_max? The master's log says", ALARM))
    return lines


def _last_message(view: View) -> Text:
    if view.asked is not None:
        return _line(state.question(view), "bold black on yellow")
    if view.trouble:
        return _line(view.trouble, "bold red")
    if view.message:
        return _line(view.message, "cyan")
    if view.pane is Pane.DEVICES and view.workers:
        marked = state.devices(view)[state.marked_row(view, Pane.DEVICES)]
        for problem in device_columns.problems([marked]):
            return _line(problem, device_columns.style(marked))
    return Text()


def _lists(view: View, width: int, room: int) -> list[RenderableType]:
    lists = {Pane.DEVICES: _devices(view), Pane.QUEUES: _queues(view), Pane.TASKS: _tasks(view)}
    # Each list has a title and a heading; blank lines separate them.
    rows = room - 3 * 2 - 2
    if rows < len(Pane):
        return _drawn(view, view.pane, lists[view.pane], width, room - 2)
    wanted = {pane: max(1, len(each.rows)) for pane, each in lists.items()}
    given = share_out(rows, wanted)
    bars: list[Text] = []
    if given[Pane.DEVICES] < len(view.workers):
        bars = _bars(lists[Pane.DEVICES].rows, width)
        given = share_out(max(len(Pane), rows - len(bars)), wanted)
    parts: list[RenderableType] = []
    for pane, each in lists.items():
        title, *table = _drawn(view, pane, each, width, given[pane])
        parts += [*([Text()] if parts else []), title, *(bars if pane is Pane.DEVICES else []), *table]
    return parts


def share_out(rows: int, wanted: dict[Pane, int]) -> dict[Pane, int]:
    """Rows for each list: as many as it wants, if they fit; else devices get half, and what others leave."""
    shares = {Pane.DEVICES: rows // 2, Pane.QUEUES: rows // 5, Pane.TASKS: rows - rows // 2 - rows // 5}
    given = {pane: max(1, min(wanted[pane], share)) for pane, share in shares.items()}
    for pane in (Pane.DEVICES, Pane.TASKS, Pane.QUEUES):
        given[pane] += max(0, min(wanted[pane] - given[pane], rows - sum(given.values())))
    return given


def _bars(workers: Sequence[Worker], width: int) -> list[Text]:
    """Every device as one cell, on at most two lines."""
    lines = [Text() for _ in range(0, min(len(workers), 2 * width), width)]
    for index, worker in enumerate(workers[: 2 * width]):
        busy = device_columns.value(worker, "utilization")
        bar = "·" if busy is None else BARS[max(0, min(int(busy * len(BARS)), len(BARS) - 1))]
        lines[index // width].append(bar, device_columns.style(worker) or "green")
    return lines


def _devices(view: View) -> List:
    rows = state.devices(view)
    return List(
        "DEVICES",
        rows,
        device_columns.columns(rows),
        [device_columns.style(worker) for worker in rows],
        "no worker has connected yet",
        f"by {state.SORTS[view.sort][0]}{', reversed' if view.reverse else ''}",
    )


def _queues(view: View) -> List:
    return List("QUEUES", view.queues, QUEUES, ["yellow" if q.paused else "" for q in view.queues], queues.EMPTY)


def _tasks(view: View) -> List:
    names = device_columns.short_names(sorted({task.worker_id for task in view.tasks}))
    columns = (
        Column("TASK", lambda task: str(task.task_id), right=True),
        Column("KIND", lambda task: task.kind),
        Column("QUEUE", lambda task: task.message.spec.queue or "default"),
        Column("AGE", lambda task: since(task.submit_time) or "-"),
        Column("TRIES", lambda task: str(task.attempts), right=True),
        Column("DONE", lambda task: f"{task.progress:.0%}" if task.message.HasField("progress") else "-", right=True),
        Column("WORKER", lambda task: names[task.worker_id]),
    )
    return List("RUNNING TASKS", view.tasks, columns, [""] * len(view.tasks), "nothing runs")


def _drawn(view: View, pane: Pane, each: List, width: int, room: int) -> list[RenderableType]:
    """A title, and `room` rows around the marked one under a heading."""
    count, marked, active = len(each.rows), state.marked_row(view, pane), pane is view.pane
    start = max(0, min(marked - room // 2, count - room))
    title = each.title
    if count > room:
        more = "+" if pane is Pane.TASKS and view.more_tasks else ""
        title += f"  {start + 1}-{start + room} of {count}{more}"
    heading = _spread(title, each.note, width, "bold white on blue" if active else "white on grey30")
    if not each.rows:
        return [heading, Text(f"  {each.empty}", style="dim")]
    cells = tables.fit(each.rows, each.columns, width - 2)
    marks = ["> " if active and index == marked else "  " for index in range(count)]
    styles = [f"{style} reverse" if "> " in mark else style for style, mark in zip(each.styles, marks, strict=True)]
    window = slice(start, start + room)
    first = next(iter(cells))
    shown = {column: texts[window] for column, texts in cells.items() if column is not first}
    marked_first = [mark + text for mark, text in zip(marks, cells[first], strict=True)][window]
    named = Column(f"  {first.name}", first.cell)
    return [heading, tables.grid({named: marked_first, **shown}, styles=styles[window], one_line=True)]
