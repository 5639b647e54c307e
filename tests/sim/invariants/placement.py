"""No runnable task waits, no task overtakes one of higher priority, and caches equal a recomputation."""

from collections.abc import Sequence

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Shape, Task, Worker, partition_of, shape_of
from multigpu_master.core.placement.candidates import obstacle_now, obstacles
from multigpu_master.core.placement.resource_classes import Backlog
from multigpu_master.core.scheduler import Core
from multigpu_master.core.strategy import Strategy

from tests.compiled import COMPILED
from tests.sim.world import ViolationError, check


class Placement:
    """Checks these rules. Intercepts every choice of a worker, which compiled modules do not allow: of these,
    tools/test_compiled.sh compares what they do with what their sources do.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        dispatcher = core._dispatcher
        self._original_choose = dispatcher._choose
        if not COMPILED:
            dispatcher._choose = self._checked_choose  # type: ignore[method-assign]

    def caches(self) -> None:
        """Caches equal a recomputation."""
        fleet = self._core.fleet
        for shape, found in fleet._eligible.items():
            able = [w for w in fleet.workers.values() if fleet.ineligibility(w, shape) is None]
            check(list(found) == able, "cached eligible workers of %s are wrong", shape)
        for worker in fleet.workers.values():
            has_room = worker.accepting and not worker.full
            known = (worker in fleet.with_room) == has_room or (has_room and worker in self._core.fleet.maybe_freed)
            check(known, "%s has room: %s; the cache of open workers differs", worker.worker_id, has_room)
        for shape, count in fleet._resident.items():
            able = [w for w in fleet.workers.values() if fleet.ineligibility(w, shape) is None]
            has = [w for w in able if w.accepting and fleet.load_s(w, shape) == 0.0]
            check(len(has) == count, "the cached number of workers with the model of %s is wrong", shape)

    def nothing_idles(self, commands: Sequence[ev.Command], tasks: list[Task]) -> None:
        """No task waits that could run, and none was dispatched before a task of higher priority."""
        core = self._core
        waiting: dict[tuple[str, Shape], list[Task]] = {}
        for task in tasks:
            if not core.ledger.queues[task.spec.queue].paused:
                strategy = core.ledger.strategy_of(core.ledger.queues[task.spec.queue])
                partition = partition_of(task.partition_key) if strategy.pinned else -1
                waiting.setdefault((strategy.name, shape_of(task.spec, partition)), []).append(task)
        for (name, shape), same_shape in waiting.items():
            strategy = core.ledger.strategies[name]
            if shape.world_size > 1:
                if core.ids.end - core.ids.next_id >= shape.world_size:
                    self._no_gang_idles(strategy, shape, same_shape[0])
                continue
            best = self._best(strategy, shape, len(same_shape))
            if best is not None:
                raise ViolationError(f"task {same_shape[0].task_id} waits, though {best.worker_id} could run it")
        for lease in (x for c in commands if isinstance(c, ev.Dispatch) for x in c.leases):
            self._check_order_in_shape(lease, waiting)
            self._check_order_across_shapes(lease, waiting)

    def _no_gang_idles(self, strategy: Strategy, shape: Shape, task: Task) -> None:
        """A gang begins once enough workers are idle, and reserves busy ones before."""
        core, gangs = self._core, self._core.gangs
        mine = gangs.reserved_for(strategy, shape)
        able = [w for w in core.fleet.workers.values() if core.fleet.ineligibility(w, shape) is None]
        free = [w for w in able if w in mine or w.leases_limit is None]
        free = [w for w in free if w.accepting and not obstacle_now(core.fleet, strategy, shape, w)]
        idle = {w.device_key for w in free if not (w.leases or w.occupied_slots)}
        check(len(idle) < shape.world_size_min, "task %s waits, though %s workers are idle", task.task_id, len(idle))
        reserved = [w for w in core.fleet.workers.values() if w.leases_limit is not None]
        for worker in reserved:
            ranks = [x for x in worker.leases.values() if x.gang is not None]
            check(ranks or worker in gangs._reserved, "%s is reserved for nothing", worker.worker_id)

    def _check_order_in_shape(self, lease: Lease, waiting: dict[tuple[str, Shape], list[Task]]) -> None:
        spec = lease.task.spec
        strategy = self._core.ledger.strategy_of(self._core.ledger.queues[spec.queue])
        partition = partition_of(lease.task.partition_key) if strategy.pinned else -1
        for task in waiting.get((strategy.name, shape_of(spec, partition)), ()):
            leased_key, waiting_key = (spec.priority, lease.task.task_id), (task.spec.priority, task.task_id)
            check(leased_key < waiting_key, "task %s went before task %s", lease.task.task_id, task.task_id)

    def _check_order_across_shapes(self, lease: Lease, waiting: dict[tuple[str, Shape], list[Task]]) -> None:
        """The same check across shapes. Skips tasks that need memory or a model: whether the worker could have run them
        at that instant is unknown.
        """
        core, worker = self._core, lease.worker
        if lease.gang is not None:
            return  # it had a reservation
        leased_key = lease.task.spec.priority, lease.task.task_id
        for (name, shape), tasks in waiting.items():
            strategy = core.ledger.strategies[name]
            if shape.world_size > 1:  # tasks of one worker may fill what it cannot use yet
                continue
            if (
                strategy.pinned
                or shape.memory_bytes
                or shape.model
                or core.fleet.ineligibility(worker, shape) is not None
            ):
                continue
            if core.fleet.model_of(worker, shape) or strategy.excludes(shape, worker, core.fleet) is not None:
                continue
            for task in tasks:
                waiting_key = task.spec.priority, task.task_id
                check(leased_key < waiting_key, "task %s before %s of another shape", lease.task.task_id, task.task_id)

    def _checked_choose(self, backlog: Backlog, now: float) -> Worker | None:
        """The chosen worker is the best of all."""
        first = backlog.classes.first()
        assert first is not None, "a backlog has tasks"
        found, fleet, strategy = self._original_choose(backlog, now), self._core.fleet, backlog.strategy
        shape = first.shape if strategy.pinned else backlog.shape
        best = self._best(strategy, shape, backlog.size)
        if found is None or best is None:
            ids = found and found.worker_id, best and best.worker_id
            check(found is best, "the dispatcher chose %s; the best of all is %s", *ids)
        elif found is not best:
            found_score = strategy.score(shape, found, fleet), found.newest_lease_number
            best_score = strategy.score(shape, best, fleet), best.newest_lease_number
            check(found_score == best_score, "%s ranks first, %s should", found.worker_id, best.worker_id)
        return found

    def _best(self, strategy: Strategy, shape: Shape, queued: int) -> Worker | None:
        """The worker for the shape by a full ranking; None if no worker can run it now."""
        fleet = self._core.fleet
        able = [w for w in fleet.workers.values() if fleet.ineligibility(w, shape) is None]
        if strategy.pinned:
            able = [w for w in able if w.accepting and strategy.excludes(shape, w, fleet) is None]
            able.sort(key=lambda w: (strategy.score(shape, w, fleet), w.worker_id))
            return able[0] if able and not obstacles(fleet, strategy, shape, able[0]) else None
        free = [w for w in able if not obstacles(fleet, strategy, shape, w)]
        free = [w for w in free if strategy.min_backlog(shape, w, fleet) <= queued or fleet.reserved(w, shape)]
        return min(free, key=lambda w: (strategy.score(shape, w, fleet), w.newest_lease_number), default=None)
