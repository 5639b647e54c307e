"""The picture that `mgpuctl top` shows of a View, for any size of terminal. Only ages are told by the clock.

From above: who the master is and what it has to do; if the devices don't all fit, each as one coloured bar; then the
three lists, each as long as it needs to be or as there is room for; then what was asked or done, and the keys.
"""

from collections.abc import Sequence

from rich.text import Text

from multigpu.cli import show
from multigpu.cli.fleet import device_columns
from multigpu.cli.top import state as top_state
from multigpu.cli.top.state import Pane, View
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2

WIDTH_MIN, HEIGHT_MIN = 40, 12
BARS = "▁▂▃▄▅▆▇█"
KEYS = "↑↓ move  Tab list  d drain  c/u cordon on/off  x cancel  s sort  ? help  q quit"
HELP = """
  ↑ ↓ j k      mark the line above, below
  PgUp PgDn    ten lines at once
  Home End     the first, the last
  Tab ← →      the next list: devices, queues, running tasks

  d            drain the marked device's worker: no new tasks, what runs may end
  c            cordon it: no new tasks; what it holds it keeps
  u            uncordon: ends a drain and a cordon
  x            cancel the marked task

  s r          sort devices by the next column; the other way round
  q Ctrl-C     quit

  Devices that don't all fit are bars above the list: the higher, the busier.
  green healthy, yellow degraded, cyan recovering, red sick or lost,
  magenta cordoned
"""


def frame(view: View, width: int, height: int) -> Text:
    """The whole screen: `height` lines of at most `width` cells."""
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        return Text(f"too small: mgpuctl top needs {WIDTH_MIN} columns and {HEIGHT_MIN} lines"[:width])
    top = [*_header(view, width)]
    bottom = [_last_word(view, width), _line(KEYS, width)]
    room = height - len(top) - len(bottom)
    middle = [Text(text) for text in HELP.splitlines()] if view.help else _lists(view, width, room)
    middle = middle[:room] + [Text()] * (room - len(middle))
    lines = [*top, *middle, *bottom]
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True).join(lines)


def _line(text: str, width: int, style: str = "") -> Text:
    return Text(device_columns.pad(show.clean(text), width).rstrip(), style=style)


def _spread(left: str, right: str, width: int, style: str = "") -> Text:
    """Text at both ends of a line; the left one gives way."""
    return Text(device_columns.pad(left, max(0, width - len(right) - 1)) + " " + right, style=style)


def _header(view: View, width: int) -> list[Text]:
    stats = view.stats
    master = f"multigpu {view.address}"
    if stats is not None:
        master += f"  up {show.age(stats, 'start_time')}  {stats.strategy}"
    rate = f"{view.rate:,.0f} a second" if view.rate is not None else ""
    lines = [_spread(show.clean(master), rate, width, "bold")]
    if stats is not None:
        work = f"{stats.queued:,} queued, {stats.leased:,} leased, {stats.succeeded:,} done, {stats.failed:,} failed"
        if stats.dead_lettered:
            work += f", {stats.dead_lettered:,} dead letters"
        lines.append(_line(work, width))
    lines.append(_line(device_columns.summary(list(view.workers.values())) if view.workers else "no workers", width))
    if stats is not None and stats.breaker.tripped:
        tripped = "BREAKER TRIPPED: look why devices fall sick, then `mgpuctl breaker reset`"
        lines.append(_line(tripped, width, "bold white on red"))
    if stats is not None and not stats.journal_writable:
        lines.append(
            _line(
                "JOURNAL NOT WRITABLE: disk full, or journal_bytes_max? The master's log says",
                width,
                "bold white on red",
            )
        )
    return lines


def _last_word(view: View, width: int) -> Text:
    if view.asked is not None:
        return _line(top_state.question(view), width, "bold black on yellow")
    if view.trouble:
        return _line(view.trouble, width, "bold red")
    if view.message:
        return _line(view.message, width, "cyan")
    # Else what is wrong with the marked device.
    workers = top_state.devices(view)
    marked = workers[top_state.marked_row(view, Pane.DEVICES)] if workers and view.pane is Pane.DEVICES else None
    wrong = device_columns.complaints([marked]) if marked is not None else []
    return _line(wrong[0], width, device_columns.style(marked)) if marked is not None and wrong else Text()


def _lists(view: View, width: int, room: int) -> list[Text]:
    workers = top_state.devices(view)
    # A title and a heading each, and a blank line between two of them.
    rows = room - 3 * 2 - 2
    wanted = {Pane.DEVICES: max(1, len(workers)), Pane.QUEUES: max(1, len(view.queues))}
    wanted[Pane.TASKS] = max(1, len(view.tasks))
    if rows < len(Pane):
        return _list(view, view.pane, workers, width, room - 2)
    strip: list[Text] = []
    given = share_out(rows, wanted)
    if given[Pane.DEVICES] < len(workers):
        strip = _bars(workers, width)
        given = share_out(max(len(Pane), rows - len(strip)), wanted)
    lines: list[Text] = []
    for pane in Pane:
        lines += [Text()] if lines else []
        lines += _list(view, pane, workers, width, given[pane], strip if pane is Pane.DEVICES else ())
    return lines


def share_out(rows: int, wanted: dict[Pane, int]) -> dict[Pane, int]:
    """Rows for each list: what it wants, if there is room; else the devices get half, and what others leave."""
    given = dict.fromkeys(wanted, 1)
    shares = {Pane.DEVICES: rows // 2, Pane.QUEUES: rows // 5, Pane.TASKS: rows - rows // 2 - rows // 5}
    for pane, share in shares.items():
        given[pane] = max(1, min(wanted[pane], share))
    for pane in (Pane.DEVICES, Pane.TASKS, Pane.QUEUES):
        given[pane] += max(0, min(wanted[pane] - given[pane], rows - sum(given.values())))
    return given


def _bars(workers: Sequence[admin.Worker], width: int) -> list[Text]:
    """Every device as one cell, in at most two lines."""
    lines = []
    for start in range(0, min(len(workers), 2 * width), width):
        line = Text()
        for worker in workers[start : start + width]:
            busy = device_columns.value(worker, "utilization")
            bar = "·" if busy is None else BARS[max(0, min(int(busy * len(BARS)), len(BARS) - 1))]
            line.append(bar, device_columns.style(worker) or "green")
        lines.append(line)
    return lines


def _list(
    view: View, pane: Pane, workers: Sequence[admin.Worker], width: int, room: int, above: Sequence[Text] = ()
) -> list[Text]:
    """A title, a heading, and `room` rows around the marked one."""
    if pane is Pane.DEVICES:
        heading, rows = _device_rows(workers, width)
        by = top_state.SORTS[view.sort][0]
        note = f"by {by}{', reversed' if view.reverse else ''}"
        empty = "no worker has connected yet"
    elif pane is Pane.QUEUES:
        heading, rows = _queue_rows(view.queues, width)
        note, empty = "", "no queue has tasks or rules"
    else:
        heading, rows = _task_rows(view.tasks, width)
        note, empty = "", "nothing runs"
    count = len(rows)
    marked = top_state.marked_row(view, pane)
    start = max(0, min(marked - room // 2, count - room))
    title = {Pane.DEVICES: "DEVICES", Pane.QUEUES: "QUEUES", Pane.TASKS: "RUNNING TASKS"}[pane]
    if count > room:
        title += f"  {start + 1}-{start + room} of {count}{'+' * (pane is Pane.TASKS and view.more_tasks)}"
    active = pane is view.pane
    lines = [_spread(title, note, width, "bold white on blue" if active else "white on grey30"), *above]
    lines.append(Text(heading if rows else f"  {empty}", style="bold" if rows else "dim"))
    for index, (text, style) in enumerate(rows[start : start + room], start):
        is_marked = active and index == marked
        whole = device_columns.pad(("> " if is_marked else "  ") + text, width)
        lines.append(Text(whole, style=f"{style} reverse" if is_marked else style))
    return lines


Rows = tuple[str, list[tuple[str, str]]]


def _device_rows(workers: Sequence[admin.Worker], width: int) -> Rows:
    grid = device_columns.fit(workers, width - 2)
    rows = [
        (device_columns.row_text(grid, cells), device_columns.style(worker))
        for cells, worker in zip(grid.rows, workers, strict=True)
    ]
    return "  " + device_columns.row_text(grid, [column.name for column in grid.columns]), rows


def _queue_rows(queues: Sequence[admin.Queue], width: int) -> Rows:
    cells = [
        (
            show.clean(queue.queue),
            "paused" if queue.paused else "open",
            f"{queue.queued:,}",
            show.size(queue.queued_bytes),
            show.duration(show.seconds_of(queue.oldest_age)) if queue.HasField("oldest_age") else "-",
            f"{queue.leased:,}",
            queue.strategy or "fleet's",
        )
        for queue in queues
    ]
    names = ("QUEUE", "STATE", "QUEUED", "BYTES", "OLDEST", "LEASED", "STRATEGY")
    heading, rows = _aligned(names, cells, width - 2, right=("QUEUED", "BYTES", "LEASED"))
    return heading, [(row, "yellow" if queue.paused else "") for row, queue in zip(rows, queues, strict=True)]


def _task_rows(tasks: Sequence[task_pb2.Task], width: int) -> Rows:
    names = device_columns.short_names(sorted({task.worker_id for task in tasks}))
    cells = [
        (
            str(task.task_id),
            show.clean(task.spec.kind),
            show.clean(task.spec.queue or "default"),
            show.age(task, "submit_time") or "-",
            str(task.attempts),
            f"{task.progress.fraction:.0%}" if task.HasField("progress") else "-",
            show.clean(names[task.worker_id]),
        )
        for task in tasks
    ]
    columns = ("TASK", "KIND", "QUEUE", "AGE", "TRIES", "DONE", "WORKER")
    heading, rows = _aligned(columns, cells, width - 2, right=("TASK", "TRIES", "DONE"))
    return heading, [(row, "") for row in rows]


def _aligned(
    names: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, right: Sequence[str]
) -> tuple[str, list[str]]:
    """Cells under their headings. If they don't fit, the widest column that is no number is cut, again and again."""
    widths = [max(len(name), *(len(row[index]) for row in rows), 0) for index, name in enumerate(names)]
    gaps = device_columns.GAP * (len(names) - 1)
    text_columns = [index for index, name in enumerate(names) if name not in right]
    while sum(widths) + gaps > width:
        widest = max(text_columns, key=lambda index: widths[index])
        if widths[widest] <= 4:
            break
        widths[widest] -= 1

    def line(cells: Sequence[str]) -> str:
        padded = zip(cells, names, widths, strict=True)
        return (" " * device_columns.GAP).join(
            device_columns.pad(cell, size, right=name in right) for cell, name, size in padded
        )

    return "  " + line(names), [line(row) for row in rows]
