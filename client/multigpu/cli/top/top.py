"""`mgpuctl top`: the fleet, live, with keys.

One thread polls the master and carries out orders; the main thread owns the view, reads keys and draws: a
slow master does not block the terminal.
"""

import contextlib
import queue
import shutil
import sys
import threading
from itertools import islice
from typing import Any, Self

import click
from rich.console import Console
from rich.live import Live

from multigpu import AdminClient, MultigpuError, TaskState
from multigpu.cli import show, tables
from multigpu.cli.admin import connected
from multigpu.cli.commands import Command
from multigpu.cli.failures import TerminatedError
from multigpu.cli.top import frame as top_frame
from multigpu.cli.top.state import Order, Verb, View, press
from multigpu.fleet import Stats

POLL_INTERVAL_S = 1.0
# GetStats counts rows of the journal: it is called less often.
STATS_EVERY = 3
KEY_WAIT_S = 0.2
TASKS_MAX = 200
REASON = "by mgpuctl top"

# Fields of a View and their new values.
Changes = dict[str, Any]


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl top", "The fleet, live; ? shows the keys, q ends it."),
        ("mgpuctl top | cat", "One picture, for a log."),
    ),
)
@connected
def top(admin: AdminClient) -> None:
    """A live view of devices, queues and running tasks; keys to drain, cordon, cancel.

    Continues through restarts of the master. Without a terminal it prints one picture and ends.
    """
    feed = Feed(admin)
    view = View(address=admin.master)
    feed.poll()  # fails if no master answers
    feed.apply(view)
    if sys.stdin.isatty() and sys.stdout.isatty():
        _live(feed, view)
    else:
        show.note("mgpuctl: no terminal here: one picture")
        width = shutil.get_terminal_size((80, 24)).columns
        height = 14 + sum(max(1, len(rows)) for rows in (view.workers, view.queues, view.tasks))
        for text in tables.rendered(top_frame.frame(view, width, height), width)[:-1]:
            show.line(text)


def _live(feed: "Feed", view: View) -> None:
    """Draws until q, Ctrl-C, or the end of the terminal."""
    from multigpu.cli.top.terminal import key_input, read_keys  # noqa: PLC0415  termios is for terminals

    console = Console(highlight=False)
    with (
        contextlib.suppress(EOFError),
        key_input() as keyboard,
        feed,
        Live(console=console, screen=True, auto_refresh=False) as screen,
    ):
        try:
            drawn = None
            keys: list[str] = []
            while True:
                if feed.apply(view) or keys or console.size != drawn:
                    drawn = console.size
                    screen.update(top_frame.frame(view, drawn.width, drawn.height), refresh=True)
                keys = read_keys(keyboard, KEY_WAIT_S)
                for order in filter(None, [press(view, key) for key in keys]):
                    if order.verb is Verb.QUIT:
                        return
                    feed.orders.put(order)
        except TerminatedError:
            raise
        except KeyboardInterrupt:
            return


class Feed:
    """Polls the master and carries out orders, in a thread while it is entered."""

    def __init__(self, admin: AdminClient) -> None:
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._admin = admin
        self._changes: queue.SimpleQueue[Changes] = queue.SimpleQueue()
        self._polls = 0
        self._stats: Stats | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.orders.put(None)

    def apply(self, view: View) -> bool:
        """Puts everything new into the view. Returns whether there was anything."""
        changed = False
        with contextlib.suppress(queue.Empty):
            while True:
                for name, value in self._changes.get_nowait().items():
                    setattr(view, name, value)
                changed = True
        return changed

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                order = self.orders.get(timeout=POLL_INTERVAL_S)
                if order is None:
                    return
                self._changes.put({"message": self._carry_out(order)})
            try:
                self.poll()
            except MultigpuError as error:
                self._polls = 0
                self._changes.put({"trouble": str(error)})

    def poll(self) -> None:
        """Fetches everything once. Raises MultigpuError."""
        changes: Changes = self._poll_stats() if self._polls % STATS_EVERY == 0 else {}
        tasks = list(islice(self._admin.list_tasks(states=[TaskState.LEASED]), TASKS_MAX + 1))
        queues = self._admin.list_queues()
        changes |= {
            "workers": {worker.worker_id: worker for worker in self._admin.list_workers()},
            # Busy queues first.
            "queues": sorted(queues, key=lambda queue: (not queue.queued and not queue.leased, queue.queue)),
            "tasks": sorted(tasks[:TASKS_MAX], key=lambda task: task.task_id),
            "more_tasks": len(tasks) > TASKS_MAX,
            "trouble": "",
        }
        self._polls += 1
        self._changes.put(changes)

    def _poll_stats(self) -> Changes:
        stats = self._admin.stats()
        before, self._stats = self._stats, stats
        if before is not None and before.start_time == stats.start_time and stats.server_time and before.server_time:
            seconds = (stats.server_time - before.server_time).total_seconds()
            if seconds > 0:
                return {"stats": stats, "rate": max(0, stats.succeeded - before.succeeded) / seconds}
        return {"stats": stats}

    def _carry_out(self, order: Order) -> str:
        """Returns the message for the screen."""
        admin, target = self._admin, order.target
        try:
            if order.verb is Verb.CANCEL:
                answer = admin.cancel(int(target), reason=f"cancelled {REASON}")
                return f"task {target}: {'cancelled' if answer.cancelled_task_ids else 'had ended before'}"
            if order.verb is Verb.DRAIN:
                admin.drain_worker(target)
                return f"{target}: draining; u ends it"
            if order.verb is Verb.CORDON:
                admin.cordon_worker(target, reason=f"cordoned {REASON}")
                return f"{target}: cordoned; u ends it"
            assert order.verb is Verb.UNCORDON
            admin.uncordon_worker(target)
        except MultigpuError as error:
            return str(error)
        return f"{target}: takes tasks again"
