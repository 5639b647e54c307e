"""The state of `mgpuctl top` and the effect of its keys. No terminal, network or clock here.

The caller puts the master's data into a `View`; `press` turns a key into a change of the view or into an order that the
caller carries out. The marked line is stored by its id, because refreshes reorder the lines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from multigpu import Task
from multigpu.cli.fleet import device_columns
from multigpu.fleet import Queue, Stats, Worker


class Pane(Enum):
    DEVICES = "devices"
    QUEUES = "queues"
    TASKS = "tasks"


class Verb(Enum):
    QUIT = "quit"
    DRAIN = "drain"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Order:
    verb: Verb
    # A worker_id, or a task_id in decimal.
    target: str = ""


@dataclass(slots=True)
class View:
    """The data of the screen."""

    address: str
    workers: dict[str, Worker] = field(default_factory=dict)
    queues: Sequence[Queue] = ()
    tasks: Sequence[Task] = ()
    # More tasks run than were fetched.
    more_tasks: bool = False
    stats: Stats | None = None
    # Succeeded tasks a second; None: not known yet.
    rate: float | None = None
    # Why the master doesn't answer; empty: it does.
    trouble: str = ""

    pane: Pane = Pane.DEVICES
    # The id of the marked line of each pane. If no line has it any more, the first line is marked.
    marked: dict[Pane, str] = field(default_factory=dict)
    sort: int = 0
    reverse: bool = False
    help: bool = False
    # The order that waits for a confirmation.
    asked: Order | None = None
    # The result of the last order.
    message: str = ""


def _largest_first(number: float | None) -> tuple[bool, float]:
    """Sort key: unknown numbers come last."""
    return number is None, -(number or 0.0)


SORTS: tuple[tuple[str, Callable[[Worker], tuple[object, ...]]], ...] = (
    ("worker", lambda w: (w.worker_id,)),
    ("health", lambda w: (-device_columns.HEALTH_WORDS.index(device_columns.health_word(w)), not w.quarantined)),
    ("busy", lambda w: _largest_first(device_columns.value(w, "utilization"))),
    ("memory", lambda w: _largest_first(device_columns.memory_share(w))),
    ("temperature", lambda w: _largest_first(device_columns.value(w, "temperature_celsius"))),
    ("power", lambda w: _largest_first(device_columns.value(w, "power_watts"))),
    ("leases", lambda w: (-w.leases,)),
)


def devices(view: View) -> list[Worker]:
    """The workers in the order of the screen."""
    key = SORTS[view.sort][1]
    found = sorted(view.workers.values(), key=lambda worker: (key(worker), worker.worker_id))
    return found[::-1] if view.reverse else found


def keys_of(view: View, pane: Pane) -> list[str]:
    """The ids of a pane's lines, in the order of the screen."""
    if pane is Pane.DEVICES:
        return [worker.worker_id for worker in devices(view)]
    if pane is Pane.QUEUES:
        return [queue.queue for queue in view.queues]
    return [str(task.task_id) for task in view.tasks]


def marked_row(view: View, pane: Pane) -> int:
    keys = keys_of(view, pane)
    key = view.marked.get(pane, "")
    return keys.index(key) if key in keys else 0


MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page_up": -10, "page_down": 10, "home": -(10**9), "end": 10**9}
PANE_MOVES = {"tab": 1, "right": 1, "left": -1, "back_tab": -1}
# Key -> verb, pane in which the key works, whether it needs a confirmation.
ORDERS = {
    "d": (Verb.DRAIN, Pane.DEVICES, True),
    "c": (Verb.CORDON, Pane.DEVICES, False),
    "u": (Verb.UNCORDON, Pane.DEVICES, False),
    "x": (Verb.CANCEL, Pane.TASKS, True),
}


def press(view: View, key: str) -> Order | None:
    """Applies a key ("q", "up", "page_down", "escape"…). Returns the order that the caller must carry out, if any."""
    if view.asked is not None:
        order, view.asked = view.asked, None
        if key.lower() == "y":
            return order
        view.message = f"not done: {order.verb.value} {order.target}"
        return None
    view.message = ""
    if key in ("q", "ctrl_c"):
        return Order(Verb.QUIT)
    if view.help:
        view.help = False
    elif key in ("?", "h"):
        view.help = True
    elif key in MOVES:
        if keys := keys_of(view, view.pane):
            row = marked_row(view, view.pane) + MOVES[key]
            view.marked[view.pane] = keys[max(0, min(row, len(keys) - 1))]
    elif key in PANE_MOVES:
        panes = list(Pane)
        view.pane = panes[(panes.index(view.pane) + PANE_MOVES[key]) % len(panes)]
    elif key == "s":
        view.sort = (view.sort + 1) % len(SORTS)
    elif key == "r":
        view.reverse = not view.reverse
    elif key in ORDERS:
        return _order(view, *ORDERS[key])
    return None


def _order(view: View, verb: Verb, pane: Pane, ask: bool) -> Order | None:
    keys = keys_of(view, pane)
    if view.pane is not pane:
        view.message = f"mark one of the {pane.value} first: Tab goes there"
        return None
    if not keys:
        view.message = f"there is nothing to {verb.value}"
        return None
    order = Order(verb, keys[marked_row(view, pane)])
    if ask:
        view.asked = order
        return None
    return order


def question(view: View) -> str:
    """The question that asks the operator to confirm `view.asked`."""
    assert view.asked is not None
    target = view.asked.target
    if view.asked.verb is Verb.CANCEL:
        return f"Cancel task {target}? [y/N]  Its outcome will be CANCELLED."
    worker = view.workers.get(target)
    leases = f"{worker.leases:,}" if worker is not None else "no"
    name = device_columns.short_names(list(view.workers)).get(target, target)
    return f"Drain {name}? [y/N]  No new tasks; its {leases} leases may finish."
