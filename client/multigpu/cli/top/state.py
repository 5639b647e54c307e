"""What `mgpuctl top` knows and what its keys do: no terminal, no network, no clock in here.

Whatever comes from the master is put into a `View`; `press` turns a key into a change of the view or into an order that
the caller carries out. A line stays marked by what it is, not by where it stands: lines move while a person looks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from multigpu.cli.fleet import device_columns
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2

PAGE_ROWS = 10


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
    """What the caller is to do. `target`: a worker's id, or a task's in decimal."""

    verb: Verb
    target: str = ""


@dataclass(slots=True)
class View:
    """All that is on the screen."""

    address: str
    workers: dict[str, admin.Worker] = field(default_factory=dict)
    queues: Sequence[admin.Queue] = ()
    tasks: Sequence[task_pb2.Task] = ()
    # There are more running tasks than were asked for.
    more_tasks: bool = False
    stats: admin.GetStatsResponse | None = None
    # Tasks that succeeded, a second; None: not known yet.
    rate: float | None = None
    # Why nothing new comes from the master; empty: it does.
    trouble: str = ""

    pane: Pane = Pane.DEVICES
    # What is marked in each pane, by its key; what is gone leaves the mark at the top.
    marked: dict[Pane, str] = field(default_factory=dict)
    sort: int = 0
    reverse: bool = False
    help: bool = False
    # Waits for a yes.
    asked: Order | None = None
    # What the last order came to.
    message: str = ""


def _none_last(figure: float | None) -> tuple[bool, float]:
    """The largest first, what isn't told last."""
    return figure is None, -(figure or 0.0)


Key = Callable[[admin.Worker], tuple[object, ...]]
SORTS: tuple[tuple[str, Key], ...] = (
    ("worker", lambda w: (w.worker_id,)),
    ("health", lambda w: (-device_columns.HEALTH_WORDS.index(device_columns.health_word(w)), not w.quarantined)),
    ("busy", lambda w: _none_last(device_columns.value(w, "utilization"))),
    ("memory", lambda w: _none_last(device_columns.memory_share(w))),
    ("temperature", lambda w: _none_last(device_columns.value(w, "temperature_celsius"))),
    ("power", lambda w: _none_last(device_columns.value(w, "power_watts"))),
    ("leases", lambda w: (-w.leases,)),
)


def devices(view: View) -> list[admin.Worker]:
    """The workers in the order of the screen."""
    key = SORTS[view.sort][1]
    found = sorted(view.workers.values(), key=lambda worker: (key(worker), worker.worker_id))
    return found[::-1] if view.reverse else found


def keys_of(view: View, pane: Pane) -> list[str]:
    """The keys of a pane's lines, in the order of the screen."""
    if pane is Pane.DEVICES:
        return [worker.worker_id for worker in devices(view)]
    if pane is Pane.QUEUES:
        return [queue.queue for queue in view.queues]
    return [str(task.task_id) for task in view.tasks]


def marked_row(view: View, pane: Pane) -> int:
    """Where the mark stands. 0 if what was marked is gone, or there is nothing."""
    keys = keys_of(view, pane)
    key = view.marked.get(pane, "")
    return keys.index(key) if key in keys else 0


def press(view: View, key: str) -> Order | None:
    """A key was pressed: "q", "up", "page_down", "escape"… What the caller is to do, if anything."""
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
        _move(view, key)
    elif key in ("tab", "right", "left", "back_tab"):
        panes = list(Pane)
        view.pane = panes[(panes.index(view.pane) + (1 if key in ("tab", "right") else -1)) % len(panes)]
    elif key == "s":
        view.sort = (view.sort + 1) % len(SORTS)
    elif key == "r":
        view.reverse = not view.reverse
    elif key in ORDERS:
        return _order(view, *ORDERS[key])
    return None


MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page_up": -PAGE_ROWS, "page_down": PAGE_ROWS, "home": None, "end": None}
# Key -> what it does, the pane that it is about, whether a yes is asked for.
ORDERS = {
    "d": (Verb.DRAIN, Pane.DEVICES, True),
    "c": (Verb.CORDON, Pane.DEVICES, False),
    "u": (Verb.UNCORDON, Pane.DEVICES, False),
    "x": (Verb.CANCEL, Pane.TASKS, True),
}


def _move(view: View, key: str) -> None:
    keys = keys_of(view, view.pane)
    if not keys:
        return
    step = MOVES[key]
    row = marked_row(view, view.pane) + step if step is not None else 0 if key == "home" else len(keys) - 1
    view.marked[view.pane] = keys[max(0, min(row, len(keys) - 1))]


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
    """What the person is asked before an order is carried out."""
    assert view.asked is not None
    target = view.asked.target
    if view.asked.verb is Verb.CANCEL:
        return f"Cancel task {target}? [y/N]  Its outcome will be CANCELLED."
    worker = view.workers.get(target)
    leases = f"{worker.leases:,}" if worker is not None else "no"
    name = device_columns.short_names(list(view.workers)).get(target, target)
    return f"Drain {name}? [y/N]  No new tasks; its {leases} leases may finish."
