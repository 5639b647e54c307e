"""`mgpuctl top`: the fleet, live.

From above: the master and its load; devices, the sickest first; queues, the busiest first; running tasks. Each list is
as long as it needs to be or fits. Devices that don't all fit are also shown as a line of coloured bars.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from multigpu import AdminClient, MultigpuError, Task, TaskState
from multigpu.cli import show, tables
from multigpu.cli.admin import connected
from multigpu.cli.commands import Command
from multigpu.cli.failures import TerminatedError
from multigpu.cli.fleet import device_columns
from multigpu.cli.tables import Column
from multigpu.cli.tasks import queues as queue_tables
from multigpu.cli.text import clean, since
from multigpu.fleet import Queue, Stats, Worker

POLL_INTERVAL_S = 1.0
TASKS_MAX = 200
WIDTH_MIN, HEIGHT_MIN = 40, 12
BARS = "▁▂▃▄▅▆▇█"
ALARM = "bold white on red"
QUEUES = tuple(column for column in queue_tables.COLUMNS if column.name != "LIMITS")


@dataclass(frozen=True, slots=True)
class View:
    """What the master said."""

    address: str
    stats: Stats
    # Succeeded tasks a second; None: not known yet.
    rate: float | None
    # In the order of the screen.
    workers: Sequence[Worker]
    queues: Sequence[Queue]
    # At most TASKS_MAX + 1.
    tasks: Sequence[Task]


@dataclass(frozen=True, slots=True)
class Section:
    """A list of the screen."""

    title: str
    rows: Sequence[object]
    columns: Sequence[Column]
    styles: Sequence[str]
    empty: str
    # More rows exist than these.
    more: bool = False


@click.command(
    cls=Command,
    examples=(("mgpuctl top", "The fleet, live."), ("mgpuctl top | cat", "One picture, for a log.")),
)
@connected
def top(admin: AdminClient) -> None:
    """A live view of devices, queues and running tasks, until Ctrl-C.

    Continues through restarts of the master. Without a terminal it prints one picture and ends.
    """
    view = poll(admin, None)  # fails if no master answers
    if sys.stdout.isatty() and sys.stdin.isatty():
        try:
            _refresh(admin, view)
        except TerminatedError:
            raise
        except KeyboardInterrupt:
            return
    show.note("mgpuctl: no terminal here: one picture")
    width = shutil.get_terminal_size((80, 24)).columns
    height = 14 + sum(max(1, len(rows)) for rows in (view.workers, view.queues, view.tasks))
    for text in tables.rendered(frame(view, width, height), width):
        show.line(text)


def _refresh(admin: AdminClient, view: View) -> None:
    console, problem = Console(highlight=False), ""
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(frame(view, console.width, console.height, problem), refresh=True)
            time.sleep(POLL_INTERVAL_S)
            try:
                view, problem = poll(admin, view), ""
            except MultigpuError as error:
                problem = str(error)


def poll(admin: AdminClient, before: View | None) -> View:
    """Raises MultigpuError."""
    stats, rate = admin.stats(), None
    if before and before.stats.start_time == stats.start_time and stats.server_time and before.stats.server_time:
        seconds = (stats.server_time - before.stats.server_time).total_seconds()
        rate = max(0, stats.succeeded - before.stats.succeeded) / seconds if seconds > 0 else before.rate
    tasks = islice(admin.list_tasks(states=[TaskState.LEASED]), TASKS_MAX + 1)
    return View(
        address=admin.master,
        stats=stats,
        rate=rate,
        workers=sorted(admin.list_workers(), key=sickest_first),
        queues=sorted(admin.list_queues(), key=lambda queue: (not queue.queued and not queue.leased, queue.queue)),
        tasks=sorted(tasks, key=lambda task: task.task_id),
    )


def sickest_first(worker: Worker) -> tuple[object, ...]:
    word = device_columns.health_word(worker)
    return -device_columns.HEALTH_WORDS.index(word), not worker.quarantined, worker.worker_id


def frame(view: View, width: int, height: int, problem: str = "") -> RenderableType:
    """The whole screen: `height` lines of at most `width` cells. `problem`: why the master does not answer."""
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        return Text(f"too small: mgpuctl top needs {WIDTH_MIN} columns and {HEIGHT_MIN} lines"[:width])
    lines: list[RenderableType] = [*_header(view, width)]
    if problem:
        lines.append(_line(problem, "bold red"))
    elif problems := device_columns.problems(view.workers):
        lines.append(_line(problems[0], "yellow"))
    # Each list has a title and a heading; blank lines separate them.
    rows = height - len(lines) - 3 * 2 - 2
    if rows < 3:  # one list, of devices
        return Group(*lines, *_drawn(_sections(view)[0], width, height - len(lines) - 2))
    wanted = [max(1, len(each)) for each in (view.workers, view.queues, view.tasks)]
    room = share_out(rows, wanted)
    bars = _bars(view.workers, width) if room[0] < len(view.workers) else []
    room = share_out(rows - len(bars), wanted) if bars else room
    for number, (section, most) in enumerate(zip(_sections(view), room, strict=True)):
        lines += [Text()] if number else []
        title, *table = _drawn(section, width, most)
        lines += [title, *([] if number else bars), *table]
    return Group(*lines)


def share_out(rows: int, wanted: Sequence[int]) -> list[int]:
    """Rows for devices, queues and tasks: as many as each wants, if they fit; else devices get half, and what others
    leave.
    """
    shares = (rows // 2, rows // 5, rows - rows // 2 - rows // 5)
    given = [max(1, min(pair)) for pair in zip(wanted, shares, strict=True)]
    for index in (0, 2, 1):
        given[index] += max(0, min(wanted[index] - given[index], rows - sum(given)))
    return given


def _line(text: str, style: str = "") -> Text:
    return Text(clean(text), style=style, no_wrap=True, overflow="ellipsis")


def _header(view: View, width: int) -> list[Text]:
    stats = view.stats
    rate = f" {view.rate:,.0f} a second" if view.rate is not None else ""
    first = _line(f"multigpu {view.address}  up {since(stats.start_time)}  {stats.strategy}", "bold")
    first.truncate(width - len(rate), pad=True)
    work = f"{stats.queued:,} queued, {stats.leased:,} leased, {stats.succeeded:,} done, {stats.failed:,} failed"
    dead = f", {stats.dead_lettered:,} dead letters" if stats.dead_lettered else ""
    lines = [first.append(rate), _line(work + dead)]
    lines.append(_line(device_columns.summary(view.workers) if view.workers else "no workers"))
    if stats.breaker.tripped:
        lines.append(_line("BREAKER TRIPPED: look why devices fall sick, then `mgpuctl breaker reset`", ALARM))
    if not stats.journal_writable:
        lines.append(_line("JOURNAL NOT WRITABLE: disk full, or journal_bytes_max? The master's log says", ALARM))
    return lines


def _bars(workers: Sequence[Worker], width: int) -> list[Text]:
    """Every device as one cell, on at most two lines."""
    lines = [Text() for _ in range(0, min(len(workers), 2 * width), width)]
    for index, worker in enumerate(workers[: 2 * width]):
        busy = device_columns.value(worker, "utilization")
        bar = "·" if busy is None else BARS[max(0, min(int(busy * len(BARS)), len(BARS) - 1))]
        lines[index // width].append(bar, device_columns.style(worker) or "green")
    return lines


def _sections(view: View) -> tuple[Section, Section, Section]:
    names = device_columns.short_names(sorted({task.worker_id for task in view.tasks}))
    task_columns = (
        Column("TASK", lambda task: str(task.task_id), right=True),
        Column("KIND", lambda task: task.kind),
        Column("QUEUE", lambda task: task.message.spec.queue or "default"),
        Column("AGE", lambda task: since(task.submit_time) or "-"),
        Column("TRIES", lambda task: str(task.attempts), right=True),
        Column("DONE", lambda task: f"{task.progress:.0%}" if task.message.HasField("progress") else "-", right=True),
        Column("WORKER", lambda task: names[task.worker_id]),
    )
    devices = device_columns.rows(view.workers)
    device_styles = [device_columns.style(row) for row in devices]
    queue_styles = ["yellow" if queue.paused else "" for queue in view.queues]
    return (
        Section("DEVICES", devices, device_columns.columns(view.workers), device_styles, "no worker yet"),
        Section("QUEUES", view.queues, QUEUES, queue_styles, queue_tables.EMPTY),
        Section(
            "RUNNING TASKS",
            view.tasks[:TASKS_MAX],
            task_columns,
            [""] * TASKS_MAX,
            "nothing runs",
            more=len(view.tasks) > TASKS_MAX,
        ),
    )


def _drawn(section: Section, width: int, room: int) -> list[RenderableType]:
    """A title, and the first `room` rows under a heading."""
    count, title = len(section.rows), section.title
    if count > room:
        title += f"  {room} of {count}{'+' if section.more else ''}"
    heading = _line(title, "white on grey30")
    heading.truncate(width, pad=True)
    if not count:
        return [heading, Text(section.empty, style="dim")]
    cells = tables.fit(section.rows[:room], section.columns, width)
    return [heading, tables.grid(cells, styles=section.styles[:room], one_line=True)]
