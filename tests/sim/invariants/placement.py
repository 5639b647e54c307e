"""No task waits that could run, none precedes one of higher rank, and caches equal a recount."""

from collections.abc import Sequence

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Shape, Task, Worker, partition_of, shape_of
from multigpu_master.core.placement.obstacles import obstacles
from multigpu_master.core.placement.resource_classes import ResourceClass
from multigpu_master.core.scheduler import Core
from multigpu_master.strategies.base import Strategy

from tests.sim.world import ViolationError, check


class Placement:
    """See the module. Watches every choice of a worker."""

    def __init__(self, core: Core) -> None:
        self._core = core
        placement = core.state.placement
        self._choose, placement.choose = placement.choose, self._chosen  # type: ignore[method-assign]

    def caches(self) -> None:
        """What the fleet remembers is what it would find."""
        fleet = self._core.fleet
        for shape, found in fleet._eligible.items():
            able = [w for w in fleet.workers.values() if fleet.unfit(w, shape) is None]
            check(list(found) == able, "the fleet forgot who can take %s", shape)
        for worker in fleet.workers.values():
            has_room = worker.accepting and not worker.full
            known = (worker in fleet.open) == has_room or (has_room and worker in self._core.fleet.freed)
            check(known, "%s takes work and has room: %s; that is not known", worker.worker_id, has_room)
        for shape, count in fleet._resident.items():
            able = [w for w in fleet.workers.values() if fleet.unfit(w, shape) is None]
            has = [w for w in able if w.accepting and fleet.load_s(w, shape) == 0.0]
            check(len(has) == count, "the fleet forgot who has the model of %s", shape)

    def nothing_idles(self, commands: Sequence[ev.Command], tasks: list[Task]) -> None:
        """No task waits that could run, and none went before one that had the better right."""
        core = self._core
        waiting: dict[tuple[str, Shape], list[Task]] = {}
        for task in tasks:
            if not core.queues[task.spec.queue].paused:
                strategy = core.strategy_of(core.queues[task.spec.queue])
                partition = partition_of(task.partition_key) if strategy.pinned else -1
                waiting.setdefault((task.spec.queue, shape_of(task.spec, partition)), []).append(task)
        for (queue, shape), alike in waiting.items():
            strategy = core.strategy_of(core.queues[queue])
            best = self._best(strategy, shape, len(alike))
            if best is not None:
                raise ViolationError(f"task {alike[0].task_id} waits, though {best.worker_id} could have it")
        for lease in (x for c in commands if isinstance(c, ev.Dispatch) for x in c.leases):
            self._fair(lease, waiting)
            self._fair_to_others(lease, waiting)

    def _fair(self, lease: Lease, waiting: dict[tuple[str, Shape], list[Task]]) -> None:
        spec = lease.task.spec
        strategy = self._core.strategy_of(self._core.queues[spec.queue])
        partition = partition_of(lease.task.partition_key) if strategy.pinned else -1
        for task in waiting.get((spec.queue, shape_of(spec, partition)), ()):
            mine, its = (spec.priority, lease.task.task_id), (task.spec.priority, task.task_id)
            check(mine < its, "task %s went before task %s", lease.task.task_id, task.task_id)

    def _fair_to_others(self, lease: Lease, waiting: dict[tuple[str, Shape], list[Task]]) -> None:
        """Nor of those of another shape that the same worker could have had instead. What needs memory or a model is
        left out: whether it could be had just then can't be told any more.
        """
        core, worker = self._core, lease.worker
        mine = lease.task.spec.priority, lease.task.task_id
        for (queue, shape), tasks in waiting.items():
            strategy = core.strategy_of(core.queues[queue])
            if strategy.pinned or shape.memory_bytes or shape.model or core.fleet.unfit(worker, shape) is not None:
                continue
            if core.fleet.model_of(worker, shape) or strategy.excludes(shape, worker, core.fleet) is not None:
                continue
            for task in tasks:
                its = task.spec.priority, task.task_id
                check(mine < its, "task %s went before task %s of another shape", lease.task.task_id, task.task_id)

    def _chosen(self, strategy: Strategy, resource_class: ResourceClass) -> Worker | None:
        """The ranking that is kept says what a ranking made anew says, whenever it is asked."""
        found, fleet = self._choose(strategy, resource_class), self._core.fleet
        shape = resource_class.shape if strategy.pinned else resource_class.base
        best = self._best(strategy, shape, resource_class.backlog.size)
        if found is None or best is None:
            check(
                found is best, "the ranking says %s, the fleet %s", found and found.worker_id, best and best.worker_id
            )
        elif found is not best:
            mine = strategy.score(shape, found, fleet), found.last_dispatch
            its = strategy.score(shape, best, fleet), best.last_dispatch
            check(mine == its, "%s ranks first, %s should", found.worker_id, best.worker_id)
        return found

    def _best(self, strategy: Strategy, shape: Shape, queued: int) -> Worker | None:
        """The worker to take the shape, found the slow way; None if none may now."""
        fleet = self._core.fleet
        able = [w for w in fleet.workers.values() if fleet.unfit(w, shape) is None]
        if strategy.pinned:
            able = [w for w in able if w.accepting and strategy.excludes(shape, w, fleet) is None]
            able.sort(key=lambda w: (strategy.score(shape, w, fleet), w.worker_id))
            return able[0] if able and not obstacles(fleet, strategy, shape, able[0]) else None
        free = [w for w in able if not obstacles(fleet, strategy, shape, w)]
        free = [w for w in free if strategy.min_backlog(shape, w, fleet) <= queued or fleet.reserved(w, shape)]
        return min(free, key=lambda w: (strategy.score(shape, w, fleet), w.last_dispatch), default=None)
