"""Explains a task's state for `mgpuctl tasks explain`: applies the checks of dispatch to every worker."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from multigpu_master.core.admission import why_unplaceable
from multigpu_master.core.model import OutcomeState, Queue, Shape, Task, Worker, partition_of, shape_of
from multigpu_master.core.placement.candidates import backlog_suffices, is_one_of, obstacles
from multigpu_master.core.placement.gangs import one_per_device
from multigpu_master.core.placement.resource_classes import ResourceClass
from multigpu_master.core.scheduler import Core
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.workers.fleet import Fleet

# Limit of the resource classes in which the tasks ahead of a task are counted, and of the tasks that are visited.
VISITED_MAX = 10_000


@dataclass(slots=True)
class Candidate:
    """A worker, and whether it may get the task. An excluded worker has rank 0. A worker that could never take the task
    also has score 0.0.
    """

    worker: Worker
    excluded_by: list[str]
    rank: int = 0
    score: float = 0.0


@dataclass(slots=True)
class Explanation:
    summary: str
    strategy: str
    score_meaning: str
    ahead: int | None  # see _ahead()
    candidates: list[Candidate]


def explain(core: Core, task: Task, now: float) -> Explanation:
    """Explains the task's state. Lists all workers: those that may get the task in the order of their ranks, then the
    excluded ones with the reasons.
    """
    queue = core.ledger.queues.get(task.spec.queue) or Queue(task.spec.queue)  # a settled task's queue may be gone
    strategy = core.ledger.strategy_of(queue)
    shape = shape_of(task.spec, partition_of(task.partition_key))
    fleet = core.fleet
    avoided = _avoided(fleet, strategy, shape, task)
    free: list[Candidate] = []
    excluded: list[Candidate] = []
    for worker in fleet.workers.values():
        why_never = fleet.ineligibility(worker, shape)
        candidate = Candidate(worker, [why_never] if why_never else obstacles(fleet, strategy, shape, worker))
        if why_never is None and shape.world_size > 1 and worker.leases:
            candidate.excluded_by.append(f"busy with {len(worker.leases)} lease(s)")
        elif why_never is None and shape.world_size > 1 and worker.occupied_slots:
            candidate.excluded_by.append(f"cancelled calls still run in {worker.occupied_slots} slot(s)")
        if worker in avoided:
            candidate.excluded_by.append(
                "the task broke an engine on this device, and waits for another device that accepts such tasks"
            )
        if why_never is None:
            candidate.score = strategy.score(shape, worker, fleet)
        (excluded if candidate.excluded_by else free).append(candidate)
    free.sort(key=lambda c: (c.score, c.worker.newest_lease_number))
    # At least 1: this task, which queued() does not count unless it waits.
    queued = max(1, core.ledger.classes.queued(strategy, shape_of(task.spec)))
    # Gangs and pinned tasks load their model however few of them are queued.
    compared = free if shape.world_size == 1 and not strategy.pinned else []
    for candidate in [c for c in compared if not backlog_suffices(fleet, strategy, shape, c.worker, queued)]:
        candidate.excluded_by.append("too few such tasks are queued to load their model here")
        free.remove(candidate)
        excluded.append(candidate)
    pin = core.pins.worker_for(strategy, shape) if strategy.pinned and shape.world_size == 1 else None
    if pin is not None:
        for candidate in [c for c in free if c.worker is not pin]:
            free.remove(candidate)
            candidate.excluded_by.append(f"the task's key belongs to {pin.worker_id}")
            excluded.append(candidate)
    for rank, candidate in enumerate(free, 1):
        candidate.rank = rank
    excluded.sort(key=lambda c: (len(c.excluded_by), c.worker.worker_id))
    ahead = _ahead(core, task)
    before = f"{ahead or 0} older or more important task(s) wait in its queue"
    summary = _summary(core, task, free, pin, before, now)
    return Explanation(summary, strategy.name, strategy.score_meaning, ahead, free + excluded)


def _avoided(fleet: Fleet, strategy: Strategy, shape: Shape, task: Task) -> list[Worker]:
    """The workers on whose devices the task broke an engine, if it waits for other devices: see dispatch."""
    if task.extra is None or strategy.pinned or shape.world_size > 1:
        return []
    accepting = [worker for worker in fleet.eligible(shape) if worker.accepting]
    avoided = [worker for worker in accepting if is_one_of(worker, task.extra.broke_on_devices)]
    return avoided if len(avoided) < len(accepting) else []


def _ahead(core: Core, task: Task) -> int | None:
    """How many waiting tasks of the task's queue have a more important priority, or the same and a lower task_id. Some
    of these may be dispatched later than the task, because they have another shape. None: the task is leased, settled,
    or in the pause before its next attempt.
    """
    if not task.waiting:
        return None
    spec, ahead, exact_max = task.spec, 0, VISITED_MAX
    for resource_class in islice(core.ledger.classes.by_key.values(), VISITED_MAX):
        if resource_class.queue.name != spec.queue or resource_class.priority > spec.priority:
            continue
        if resource_class.priority < spec.priority:
            ahead += resource_class.size
        else:
            ahead += _older(resource_class, task.task_id, exact_max)
            exact_max = max(0, exact_max - len(resource_class.tasks))
    return ahead


def _older(resource_class: ResourceClass, task_id: int, exact_max: int) -> int:
    """The number of waiting tasks with a smaller task_id; estimated if the class has more than `exact_max` tasks."""
    tasks = resource_class.tasks
    if len(tasks) <= exact_max:
        return sum(other.task_id < task_id and other.waiting for other in tasks)
    # Not exact, as retries may be out of order, and ended tasks may leave entries; but both are few.
    return round(bisect_left(tasks, task_id, key=attrgetter("task_id")) / len(tasks) * resource_class.size)


def _summary(core: Core, task: Task, free: list[Candidate], pin: Worker | None, before: str, now: float) -> str:
    if task.outcome is not None:
        outcome = task.outcome
        where = f" on {outcome.worker_id}" if outcome.worker_id else ""
        why = f": {outcome.error.message}" if outcome.error is not None else ""
        waits = "" if task.outcome_if_ephemeral else "; the outcome is not on the master's disk yet"
        return f"{OutcomeState(outcome.state).name}{where} after {task.attempts} attempt(s){why}{waits}"
    if task.lease is not None:
        lease = task.lease
        doing = "runs" if lease.running else "waits in the window"
        return f"attempt {lease.attempt} {doing} on {lease.worker.worker_id}, leased {now - lease.dispatch_s:.1f} s ago"
    extra = task.extra
    if extra is not None and extra.not_before_s > now:
        why = f" after {extra.last_error.type}: {extra.last_error.message}" if extra.last_error is not None else ""
        return f"waits {extra.not_before_s - now:.1f} s more before attempt {task.attempts + 1}{why}"
    if core.ledger.queue(task.spec.queue).paused:
        return f"its queue {task.spec.queue!r} is paused; resume it with: mgpuctl queues resume {task.spec.queue}"
    if core.hold.active(now):
        return "the master has just started and waits for the workers it knew to come back"
    if core.ledger.clogged():
        size = core.ledger.uncommitted_bytes
        return f"outcomes of {size} bytes wait for the journal: its disk is slow or full; look at df and iostat"
    shape = shape_of(task.spec)
    if not core.fleet.placeable(shape):
        return why_unplaceable(core.fleet, task.spec, queued=True)
    if shape.world_size > 1:
        able = [w for w in core.fleet.eligible(shape) if w.accepting]
        idle = len(one_per_device(w for w in able if not (w.leases or w.occupied_slots)))
        reserved = len(core.gangs.reserved_for(core.ledger.strategy_of(core.ledger.queue(task.spec.queue)), shape))
        held = f", {reserved} are reserved for such tasks" if reserved else ""
        start = _gang_start(core, shape, now)
        needs = f"{shape.world_size_min} idle workers on different devices"
        return f"waits for {needs}: {idle} are idle{held}; {before}{start}"
    if pin is not None and pin.full:
        pinned = f"waits for {pin.worker_id}, to which its key belongs and whose window is full"
        return f"{pinned}; {before}"
    if not free:
        return f"every worker that could take it is busy or excluded; {before}"
    return f"about to be dispatched to {free[0].worker.worker_id}; {before}"


def _gang_start(core: Core, shape: Shape, now: float) -> str:
    """Says in how many seconds enough workers may be idle; "" if too few workers accept tasks, or if the estimate is
    about 0 s, because the leases have already run for their expected times.
    """
    able = one_per_device(sorted(
        (worker for worker in core.fleet.eligible(shape) if worker.accepting),
        key=lambda worker: _left_s(worker, now),
    ))  # fmt: skip
    if len(able) < shape.world_size_min:
        return ""
    left_s = _left_s(able[shape.world_size_min - 1], now)
    if left_s < 0.5:
        return ""
    return f"; judging by earlier run times, {shape.world_size_min} may be idle in {left_s:.0f} s"


def _left_s(worker: Worker, now: float) -> float:
    """In how many seconds a worker's leases are expected to have ended."""
    left = [lease.cost_s - (now - lease.running_since_s if lease.running else 0.0) for lease in worker.leases.values()]
    return sum(max(0.0, seconds) for seconds in left) / max(1, worker.usable_slots)
