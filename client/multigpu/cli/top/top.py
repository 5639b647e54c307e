"""`mgpuctl top`: the fleet, live, with keys.

One thread polls the master and carries out orders; the main thread owns the view, reads keys and draws: a
slow master does not block the terminal.
"""

import contextlib
import queue
import shutil
import sys
import threading
from typing import Any, Self

import click
from rich.console import Console
from rich.live import Live

from multigpu.cli import show, tables
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure, TerminatedError
from multigpu.cli.rpc import PAGE_SIZE_MAX, Master, connected
from multigpu.cli.text import seconds_of
from multigpu.cli.top import frame as top_frame
from multigpu.cli.top.state import Order, Verb, View, press
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1 import task_service_pb2 as service

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
def top(master: Master) -> None:
    """A live view of devices, queues and running tasks; keys to drain, cordon, cancel.

    Continues through restarts of the master. Without a terminal it prints one picture and ends.
    """
    feed = Feed(master)
    view = View(address=master.address)
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

    def __init__(self, master: Master) -> None:
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._master = master
        self._changes: queue.SimpleQueue[Changes] = queue.SimpleQueue()
        self._polls = 0
        self._stats: admin.GetStatsResponse | None = None

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
            except Failure as failure:
                self._polls = 0
                self._changes.put({"trouble": str(failure)})

    def poll(self) -> None:
        """Fetches everything once. Raises Failure."""
        master = self._master
        changes: Changes = self._poll_stats() if self._polls % STATS_EVERY == 0 else {}
        leased = service.TaskFilter(states=[task_pb2.TASK_STATE_LEASED])
        tasks = master.call(master.tasks.List, service.ListRequest(filter=leased, page_size=TASKS_MAX))
        queues = master.call(master.admin.ListQueues, admin.ListQueuesRequest(page_size=PAGE_SIZE_MAX)).queues
        changes |= {
            "workers": {worker.worker_id: worker for worker in master.list_workers()},
            # Busy queues first.
            "queues": sorted(queues, key=lambda queue: (not queue.queued and not queue.leased, queue.queue)),
            "tasks": sorted(tasks.tasks, key=lambda task: int(task.task_id)),
            "more_tasks": bool(tasks.next_page_token),
            "trouble": "",
        }
        self._polls += 1
        self._changes.put(changes)

    def _poll_stats(self) -> Changes:
        stats = self._master.call(self._master.admin.GetStats, admin.GetStatsRequest())
        before, self._stats = self._stats, stats
        if before is not None and before.start_time == stats.start_time:
            seconds = seconds_of(stats.server_time) - seconds_of(before.server_time)
            if seconds > 0:
                return {"stats": stats, "rate": max(0, stats.succeeded - before.succeeded) / seconds}
        return {"stats": stats}

    def _carry_out(self, order: Order) -> str:
        """Returns the message for the screen."""
        master, target = self._master, order.target
        try:
            if order.verb is Verb.CANCEL:
                request = service.CancelRequest(task_ids=[int(target)], reason=f"cancelled {REASON}")
                answer = master.call(master.tasks.Cancel, request)
                return f"task {target}: {'cancelled' if answer.cancelled_task_ids else 'had ended before'}"
            if order.verb is Verb.DRAIN:
                master.call(master.admin.DrainWorker, admin.DrainWorkerRequest(worker_id=target))
                return f"{target}: draining; u ends it"
            if order.verb is Verb.CORDON:
                cordon = admin.CordonWorkerRequest(worker_id=target, reason=f"cordoned {REASON}")
                master.call(master.admin.CordonWorker, cordon)
                return f"{target}: cordoned; u ends it"
            assert order.verb is Verb.UNCORDON
            master.call(master.admin.UncordonWorker, admin.UncordonWorkerRequest(worker_id=target))
        except Failure as failure:
            return str(failure)
        return f"{target}: takes tasks again"
