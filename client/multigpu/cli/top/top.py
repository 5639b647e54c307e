"""`mgpuctl top`: the fleet, live, with keys.

Three threads ask the master and put what it says into a queue: one has the stream of workers, one asks for queues,
tasks and figures again and again, one carries out orders. The main thread owns the view: it takes from the queue, reads
keys and draws. So neither a slow master nor a slow terminal stops the other.
"""

import contextlib
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import click

from multigpu.cli import TerminatedError, show
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure
from multigpu.cli.options import master_option
from multigpu.cli.rpc import PAGE_SIZE_MAX, Master
from multigpu.cli.top import state as top_state
from multigpu.cli.top.state import Order, Verb, View
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1 import task_service_pb2 as service

if TYPE_CHECKING:
    from multigpu.cli.top import terminal as top_terminal

POLL_INTERVAL_S = 1.0
# GetStats counts what the journal holds: less often.
STATS_EVERY = 3
DRAW_INTERVAL_S = 0.2
RETRY_S = 0.5
TASKS_MAX = 200

Change = Callable[[View], None]


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl top", "The fleet, live; ? shows the keys, q ends it."),
        ("mgpuctl top | cat", "One picture, for a log."),
    ),
)
@master_option
def top(address: str) -> None:
    """A live view of devices, queues and running tasks; keys to drain, cordon, cancel.

    Goes on through restarts of the master. Without a terminal it prints one picture and ends.
    """
    with Master(address) as master:
        if sys.stdin.isatty() and sys.stdout.isatty():
            live(master)
        else:
            show.note("mgpuctl: no terminal here: one picture")
            print_once(master)


def print_once(master: Master) -> None:
    """One frame, as long as it needs to be."""
    from multigpu.cli.top import frame as top_frame  # noqa: PLC0415  rich is for those who draw

    view = View(address=master.address)
    view.workers = {worker.worker_id: worker for worker in master.list_workers()}
    ask_stats(master)(view)
    ask_work(master)(view)
    width = shutil.get_terminal_size((80, 24)).columns
    height = 14 + sum(max(1, len(rows)) for rows in (view.workers, view.queues, view.tasks))
    for text in top_frame.frame(view, width, max(height, top_frame.HEIGHT_MIN)).plain.splitlines()[:-1]:
        show.line(text.rstrip())


def live(master: Master) -> None:
    """Draws until q or Ctrl-C."""
    from rich.console import Console  # noqa: PLC0415  rich is for those who draw
    from rich.live import Live  # noqa: PLC0415

    from multigpu.cli.top import frame as top_frame  # noqa: PLC0415  termios is for terminals
    from multigpu.cli.top import terminal as top_terminal  # noqa: PLC0415  termios is for terminals

    master.call(master.admin.ListWorkers, admin.ListWorkersRequest(page_size=1))  # no master: say so, and end
    view = View(address=master.address)
    console = Console(highlight=False)
    with (
        contextlib.suppress(EOFError),
        top_terminal.keyboard() as keyboard,
        Feed(master, keyboard.wake) as feed,
        Live(console=console, screen=True, auto_refresh=False) as screen,
    ):
        try:
            while True:
                columns, lines = top_terminal.size(sys.stdout.fileno())
                screen.update(top_frame.frame(view, columns, lines), refresh=True)
                for key in next_keys(keyboard):
                    order = top_state.press(view, key)
                    if order is not None and order.verb is Verb.QUIT:
                        return
                    if order is not None:
                        feed.orders.put(order)
                feed.apply(view)
        except TerminatedError:
            raise
        except KeyboardInterrupt:
            return


def next_keys(keyboard: "top_terminal.Keyboard") -> list[str]:
    """The keys that were pressed, at once; none when there is something new to draw, but not too soon."""
    begun_at = time.monotonic()
    timeout_s = POLL_INTERVAL_S
    while True:
        keys = keyboard.keys(timeout_s)
        timeout_s = begun_at + DRAW_INTERVAL_S - time.monotonic()
        if keys or timeout_s <= 0:
            return keys


class Feed:
    """What the master says, as changes of a view, from threads of its own."""

    def __init__(self, master: Master, wake: Callable[[], None]) -> None:
        """`wake` is called whenever there is something to apply."""
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._master = master
        self._changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._wake = wake
        self._stream: Any = None

    def __enter__(self) -> Self:
        for run in (self._follow_workers, self._poll, self._carry_out):
            threading.Thread(target=run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.orders.put(None)
        if self._stream is not None:
            self._stream.cancel()

    def apply(self, view: View) -> None:
        """Puts all that came into the view."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._changes.get_nowait()(view)

    def _put(self, change: Change) -> None:
        self._changes.put(change)
        self._wake()

    def _follow_workers(self) -> None:
        while not self._stopped.is_set():
            try:
                fresh = True
                self._stream = self._master.admin.WatchWorkers(admin.WatchWorkersRequest())
                for answer in self._stream:
                    self._put(_workers_changed(answer, fresh=fresh))
                    fresh = False
            except Exception:  # noqa: BLE001  whatever it is, _poll meets it too, and says it
                self._stopped.wait(RETRY_S)

    def _poll(self) -> None:
        count = 0
        while not self._stopped.is_set():
            try:
                if count % STATS_EVERY == 0:
                    self._put(ask_stats(self._master))
                self._put(ask_work(self._master))
                count += 1
            except Failure as failure:
                self._put(_said("trouble", str(failure)))
                count = 0
            self._stopped.wait(POLL_INTERVAL_S)

    def _carry_out(self) -> None:
        while (order := self.orders.get()) is not None:
            try:
                message = carry_out(self._master, order)
            except Failure as failure:
                message = str(failure)
            self._put(_said("message", message))


def carry_out(master: Master, order: Order) -> str:
    """Does what a key asked for. What it came to, in words. Raises Failure."""
    if order.verb is Verb.CANCEL:
        request = service.CancelRequest(task_ids=[int(order.target)], reason="cancelled in mgpuctl top")
        answer = master.call(master.tasks.Cancel, request)
        return f"task {order.target}: {'cancelled' if answer.cancelled_task_ids else 'had ended before'}"
    if order.verb is Verb.DRAIN:
        master.call(master.admin.DrainWorker, admin.DrainWorkerRequest(worker_id=order.target))
        return f"{order.target}: draining; u ends it"
    if order.verb is Verb.CORDON:
        reason = "cordoned in mgpuctl top"
        master.call(master.admin.CordonWorker, admin.CordonWorkerRequest(worker_id=order.target, reason=reason))
        return f"{order.target}: cordoned; u ends it"
    assert order.verb is Verb.UNCORDON
    master.call(master.admin.UncordonWorker, admin.UncordonWorkerRequest(worker_id=order.target))
    return f"{order.target}: takes tasks again"


def ask_stats(master: Master) -> Change:
    stats = master.call(master.admin.GetStats, admin.GetStatsRequest())

    def change(view: View) -> None:
        before = view.stats
        if before is not None and before.start_time == stats.start_time:
            seconds = show.seconds_of(stats.server_time) - show.seconds_of(before.server_time)
            view.rate = max(0, stats.succeeded - before.succeeded) / seconds if seconds > 0 else view.rate
        view.stats = stats

    return change


def ask_work(master: Master) -> Change:
    """Queues, and the tasks that run."""
    queues = master.call(master.admin.ListQueues, admin.ListQueuesRequest(page_size=PAGE_SIZE_MAX)).queues
    leased = service.TaskFilter(states=[task_pb2.TASK_STATE_LEASED])
    answer = master.call(master.tasks.List, service.ListRequest(filter=leased, page_size=TASKS_MAX))

    def change(view: View) -> None:
        # Those with something under way before those that rest.
        view.queues = sorted(queues, key=lambda queue: (not queue.queued and not queue.leased, queue.queue))
        view.tasks = sorted(answer.tasks, key=lambda task: int(task.task_id))
        view.more_tasks = bool(answer.next_page_token)
        view.trouble = ""

    return change


def _workers_changed(answer: admin.WatchWorkersResponse, *, fresh: bool) -> Change:
    def change(view: View) -> None:
        if fresh:
            view.workers.clear()
        for worker_id in answer.removed_worker_ids:
            view.workers.pop(worker_id, None)
        for worker in answer.workers:
            view.workers[worker.worker_id] = worker

    return change


def _said(field: str, text: str) -> Change:
    return lambda view: setattr(view, field, text)
