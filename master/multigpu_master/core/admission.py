"""Decides whether a submitted task is rejected, and says why and what to do about it."""

import difflib

from multigpu_master.core import events as ev
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Queue, shape_of
from multigpu_master.core.restart import IdRange
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.fleet import Fleet

DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNAVAILABLE = 4, 8, 9, 14
QUEUES_MAX = 10_000
# Limit of the shapes of waiting tasks in a queue: when a worker becomes free, dispatch spends some microseconds on each
# shape that it can run.
QUEUE_SHAPES_MAX = 1_000
# Limit of names that a rejection lists.
NAMED_MAX = 20
# A rejection suggests a similar name only if there are at most this many names, and if the given name has at most this
# many characters: a longer search would delay all other clients.
NEAR_NAMES_MAX, NEAR_NAME_CHARS_MAX = 64, 64


def rejection(ledger: Ledger, fleet: Fleet, spec: Spec, now: float) -> ev.Rejection | None:
    """Returns why all tasks of this spec are rejected. None: they are not; room_rejection() then checks each task."""
    if spec.deadline_s is not None and spec.deadline_s <= now:
        return ev.Rejection(DEADLINE_EXCEEDED, "the deadline has already passed; set a later one or none")
    queues = ledger.queues
    if spec.queue not in queues and len(queues) >= QUEUES_MAX and not ledger.prune_queues():
        return ev.Rejection(RESOURCE_EXHAUSTED, f"there are {QUEUES_MAX} queues already; use one of them")
    if ledger.classes.too_many_shapes(spec, QUEUE_SHAPES_MAX):
        what = (
            f"tasks of {QUEUE_SHAPES_MAX} different requirements (kind, model, labels, device memory, workers) wait in "
            f"queue {spec.queue!r} already; use fewer of them, or try again later"
        )
        return ev.Rejection(RESOURCE_EXHAUSTED, what, ev.RETRY_DELAY_S)
    # Without a connected worker it is unknown what the fleet will run.
    shape = shape_of(spec)
    if spec.wait_for_worker or not fleet.sessions or fleet.placeable(shape):
        return None
    return ev.Rejection(FAILED_PRECONDITION, why_unplaceable(fleet, spec, queued=False))


def room_rejection(ledger: Ledger, ids: IdRange, queue: Queue, size: int) -> ev.Rejection | None:
    """Returns why the core can't accept one more task with a payload of `size` bytes: a limit is reached, or no task id
    is left. None: it can.
    """
    limits = ledger.limits
    if ids.next_id >= ids.end:
        what = "the master has no unused task ids, and waits for its journal to reserve more; try again in a moment"
        return ev.Rejection(UNAVAILABLE, what, ev.RETRY_DELAY_S)
    if ledger.unsettled >= limits.tasks_max:
        what = f"the master holds its limit of {limits.tasks_max} unsettled tasks (queue_tasks_max)"
    elif ledger.unsettled_bytes + size > limits.bytes_max:
        what = f"payloads and partial outputs would exceed {limits.bytes_max} bytes (the master's queue_bytes_max)"
    elif queue.tasks_max and queue.queued + queue.leased >= queue.tasks_max:
        what = f"queue {queue.name!r} holds its limit of {queue.tasks_max} tasks"
    elif queue.bytes_max and queue.queued_bytes + queue.leased_bytes + size > queue.bytes_max:
        what = f"payloads in queue {queue.name!r} would exceed its limit of {queue.bytes_max} bytes"
    else:
        return None
    return ev.Rejection(RESOURCE_EXHAUSTED, what + "; try again later", ev.RETRY_DELAY_S)


def why_unplaceable(fleet: Fleet, spec: Spec, *, queued: bool) -> str:
    """Returns why the fleet can't run tasks of this spec, if placeable() is false. `queued`: the task is in a queue."""
    workers = list(fleet.workers.values())
    if not workers:
        return "no worker has joined this master yet; start one"
    advice = "start a worker that can"
    if not queued:
        advice += ", or set wait_for_worker to queue the task until then"
    capabilities = [c for w in workers for c in w.info.capabilities if c.kind == spec.kind]
    offered = any(spec.model in c.models for c in capabilities)
    failed = fleet.load_error(spec.model) if spec.model and not offered else None
    if failed is not None:
        worker, error = failed
        return f"model {spec.model!r} can't be loaded on {worker.worker_id}: {error}; fix the model, or {advice}"
    kinds = sorted({c.kind for w in workers for c in w.info.capabilities})
    if spec.kind not in kinds:
        return f"no worker runs kind {spec.kind!r}{_near(spec.kind, kinds)} (the fleet runs {_listed(kinds)}); {advice}"
    models = sorted({m for c in capabilities for m in c.models})
    any_model = any(not c.models for c in capabilities)
    if spec.model and models and not any_model and spec.model not in models:
        there = f"{_near(spec.model, models)} (the fleet has {_listed(models)})"
        return f"no worker has model {spec.model!r} for kind {spec.kind!r}{there}; {advice}"
    shape = shape_of(spec)
    if devices := fleet.device_count(shape):
        what = f"{shape.world_size_min} workers, each on its own device, have to run this task at the same time"
        return f"{what}, and {devices} could; {advice}"
    why = "; ".join(f"{w.worker_id}: {fleet.ineligibility(w, shape)}" for w in workers[:5])
    return f"no worker could ever take this task ({why}); {advice}"


def _near(name: str, names: list[str]) -> str:
    """Asks whether the nearest of the names was meant; "" if no name is near, or the search would take too long."""
    search = len(names) <= NEAR_NAMES_MAX and len(name) <= NEAR_NAME_CHARS_MAX
    near = difflib.get_close_matches(name, names, n=1) if search else []
    return f", did you mean {near[0]!r}?" if near else ""


def _listed(names: list[str]) -> str:
    """The first NAMED_MAX names, and how many more there are."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"
