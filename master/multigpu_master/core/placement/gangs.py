"""Gangs: tasks that several workers run at the same time, each as one rank.

A gang gets all its leases at once or none, on workers that hold no other lease; each of these workers gets no other
lease until its rank ends. If too few workers are idle, the gang's backlog reserves as many workers as it needs: their
running leases continue, leases that wait in their windows are recalled, and new ones are granted only as back-fill, see
below. One backlog at a time has a reservation, so two gangs cannot each hold half of what they need; a gang that finds
enough other idle workers begins without one. If no gang could begin within RESERVED_S, the reservation ends and the
first gang pauses for RESERVED_S; meanwhile other gangs may reserve workers, and other tasks run. The next reservation
for this gang lasts twice as long, so that tasks which run for longer than RESERVED_S cannot keep it from beginning for
ever.

A gang may have a range of sizes (world_size_min). It begins with as many workers as are idle, at most world_size; a
reservation is of world_size_min workers. When a gang with fewer than world_size workers has saved a checkpoint and
could begin again with more workers, the attempt is interrupted, uncharged; only the work since the checkpoint is lost.

Back-fill: while a reserved worker has a lease from before the reservation, the other reserved workers may get new
leases, as many as they have slots. Once the old leases have ended, the gang waits at most for the longest new one.

Each rank needs a device of its own: NCCL does not accept two ranks on one device.
"""

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable

from multigpu_master.core.attempts import TO_GROW, Attempts
from multigpu_master.core.events import Commands
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Gang, Lease, Shape, Task, Worker, shape_of
from multigpu_master.core.placement.candidates import insufficient_free_bytes, is_one_of
from multigpu_master.core.placement.resource_classes import Backlog, BacklogKey
from multigpu_master.core.restart import IdRange
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.timers import Timers
from multigpu_master.core.workers.fleet import Fleet

RESERVED_S = 60.0


class Gangs:
    """See the module."""

    def __init__(
        self, ledger: Ledger, fleet: Fleet, timers: Timers, commands: Commands, attempts: Attempts, ids: IdRange
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._timers = timers
        self._commands = commands
        self._attempts = attempts
        self._ids = ids
        # The reservation: the key of its backlog, its workers, and the first id of leases that are granted under it.
        self._key: BacklogKey | None = None
        self.reserved_idle = False  # there is a reservation, and none of its workers has a lease
        self._reserved: dict[Worker, None] = {}
        self._first_id = 0
        self._number = 0  # number of reservations so far
        # The task_id of the last gang that was interrupted to grow, the time, and its workers: their telemetry still
        # counts the gang's own memory as used.
        self._growing: tuple[int, float, dict[Worker, None]] = (0, 0.0, {})

    def update(self) -> None:
        """Call before dispatch. Ends the reservation if no gang waits for it; else limits the leases of its workers."""
        if self._key is None:
            return
        if self._key not in self._ledger.classes.backlogs:
            self._end()
            return
        self.reserved_idle = not any(worker.leases for worker in self._reserved)
        old = [worker for worker in self._reserved if self._holds_old(worker)]
        for worker in self._reserved:
            limit = worker.usable_slots if old and worker not in old else 0
            if worker.leases_limit != limit:
                worker.leases_limit = limit
                self._fleet.room_changed(worker)

    def _holds_old(self, worker: Worker) -> bool:
        """Whether a reserved worker has a lease that was granted before the reservation."""
        return any(lease_id < self._first_id for lease_id in worker.leases)

    def choose_or_reserve(self, backlog: Backlog, task: Task, now: float) -> list[Worker] | None:
        """Returns the workers for the task's ranks, by rank. None: too few are idle; then, if enough workers can become
        idle and no other backlog has a reservation, reserves these workers.
        """
        shape = backlog.shape
        reserved_here = self._reserved if self._key == backlog.key else {}
        growing, since_s, workers = self._growing
        former_workers = workers if growing == task.task_id and since_s == now else {}
        able = self._able(backlog.strategy, shape, reserved_here, former_workers)
        avoided = task.extra.broke_on_devices if task.extra is not None else ()
        # Workers on whose devices the task broke an engine come last.
        able.sort(key=lambda worker: is_one_of(worker, avoided))
        idle = _free_devices(able, shape, former_workers)
        if len(idle) >= shape.world_size_min:
            if self._key == backlog.key:
                self._end()
            return choose_workers(idle, min(len(idle), shape.world_size), shape)
        # A worker that has neither leases nor occupied slots, but is not in `idle`, lacks memory for an unknown time
        # (or shares its device with a worker in `idle`): do not reserve it. If it is reserved already, keep it: its
        # last task may not have freed its memory yet.
        able = [w for w in able if w.leases or w.occupied_slots or w in idle or w in reserved_here]
        able = one_per_device(sorted(able, key=lambda worker: (worker not in reserved_here, worker.leased_s)))
        if len(able) >= shape.world_size_min and self._key in (None, backlog.key):
            self._reserve(backlog, task, able, now)
        return None

    def _able(
        self, strategy: Strategy, shape: Shape, reserved_here: Container[Worker] = (),
        former_workers: Container[Worker] = (),
    ) -> list[Worker]:  # fmt: skip
        """The workers that could run ranks once they are idle. `reserved_here`: the workers reserved for the same
        backlog. `former_workers`: the workers that ran the task until this event.
        """
        return [
            worker
            for worker in self._fleet.eligible(shape)
            if worker.accepting
            and (worker.leases_limit is None or worker in reserved_here)
            and (worker in former_workers or strategy.excludes(shape, worker, self._fleet) is None)
            and self._fleet.model_block(worker, shape) is None
        ]

    def checkpoint_saved(self, lease: Lease, now: float) -> None:
        """Call when rank 0 has saved a checkpoint. Interrupts the attempt if it can begin again with more workers."""
        task, gang = lease.task, lease.gang
        if gang is None or gang.succeeded or len(gang.leases) == task.spec.world_size:
            return
        queue = self._ledger.queues[task.spec.queue]
        if queue.paused or self._ledger.clogged():  # the task could not begin again
            return
        shape, strategy = shape_of(task.spec), self._ledger.strategy_of(queue)
        gang_workers = {rank.worker: None for rank in gang.leases}
        # Of the gang's workers, `able` lacks those that are drained or cordoned: a new attempt could not use them.
        able = self._able(strategy, shape, gang_workers, gang_workers)
        more = len(_free_devices(able, shape, gang_workers)) > len(gang.leases)
        if more and not self._earlier_task_could_use(task, gang_workers):
            self._growing = task.task_id, now, gang_workers
            self._attempts.interrupt(lease, TO_GROW, now)

    def _earlier_task_could_use(self, task: Task, workers: Container[Worker]) -> bool:
        """Whether a waiting task that precedes this one could get one of the workers."""
        for backlog in self._ledger.classes.backlogs.values():
            head = backlog.head()
            if head is None or (head.spec.priority, head.task_id) > (task.spec.priority, task.task_id):
                continue
            if any(worker in workers for worker in self._fleet.eligible(backlog.shape)):
                return True
        return False

    def _reserve(self, backlog: Backlog, task: Task, able: Iterable[Worker], now: float) -> None:
        """Reserves world_size_min of the `able` workers for a backlog, first those that it has reserved already.

        `task` is the first of the backlog.
        """
        size = backlog.shape.world_size_min
        kept = [worker for worker in able if worker in self._reserved]
        others = [worker for worker in able if worker not in self._reserved]
        wanted = dict.fromkeys(kept + choose_workers(others, size - len(kept), backlog.shape))
        if self._key is None:
            self._key = backlog.key
            self._first_id = self._ids.next_id
            number = self._number = self._number + 1
            expired = task.extra.reservations_expired if task.extra is not None else 0
            self._timers.at(now + RESERVED_S * 2.0**expired, lambda at_s: self._expire(number, at_s))
        for worker in self._reserved:
            if worker not in wanted:
                self._end_worker_reservation(worker)
        new = [worker for worker in wanted if worker not in self._reserved]
        for worker in new:
            worker.leases_limit = 0
            self._fleet.score_changed(worker)
            waiting = [x for x in worker.leases.values() if not x.running and x.recalled_in != worker.session]
            self._commands.recall(worker, waiting)
        self._reserved = wanted
        self.update()
        if new:  # tasks that waited for room on these workers may go elsewhere
            self._ledger.classes.unblock_all()

    def _expire(self, number: int, now: float) -> None:
        """Ends the reservation with this number, if it has not ended, and pauses the first task of its backlog."""
        if self._key is None or self._number != number:
            return
        backlog = self._ledger.classes.backlogs.get(self._key)
        self._end()
        task = backlog.head() if backlog is not None else None
        if task is not None:
            task.ensure_extra().reservations_expired += 1
            self._ledger.classes.remove(self._ledger.class_of(task), task)
            self._attempts.pause(task, now, RESERVED_S)

    def _end(self) -> None:
        """Ends the reservation: another backlog may make one."""
        for worker in self._reserved:
            self._end_worker_reservation(worker)
        self._key, self._reserved, self.reserved_idle = None, {}, False
        self._ledger.classes.unblock_all()

    def _end_worker_reservation(self, worker: Worker) -> None:
        worker.leases_limit = None
        self._fleet.room_changed(worker)

    def reserved_for(self, strategy: Strategy, shape: Shape) -> list[Worker]:
        """The workers that are reserved for gangs of this shape."""
        return [*self._reserved] if self._key == (strategy.name, shape, None) else []


def _is_idle(worker: Worker, shape: Shape) -> bool:
    return not (worker.leases or worker.occupied_slots) and insufficient_free_bytes(worker, shape) is None


def _free_devices(workers: Iterable[Worker], shape: Shape, gang_workers: Container[Worker]) -> list[Worker]:
    """For each device one of the workers that are idle. Those in `gang_workers` count as idle."""
    return one_per_device(worker for worker in workers if worker in gang_workers or _is_idle(worker, shape))


def one_per_device(workers: Iterable[Worker]) -> list[Worker]:
    """The first worker of each device."""
    first: dict[str, Worker] = {}
    for worker in workers:
        first.setdefault(worker.device_key, worker)
    return list(first.values())


def choose_workers(workers: list[Worker], n: int, shape: Shape) -> list[Worker]:
    """Chooses n of these workers for ranks of the shape, and returns them by rank. Prefers the first workers of the
    list, where neither hosts nor NVLink decide.
    """
    if shape.spread_ranks:
        of_host, nth = Counter[str](), dict[Worker, int]()  # worker -> number of earlier workers of its host
        for worker in workers:
            nth[worker] = of_host[worker.info.host]
            of_host[worker.info.host] += 1
        workers = sorted(workers, key=lambda worker: nth[worker])[:n]
    return pack(workers, n)


def pack(workers: list[Worker], n: int) -> list[Worker]:
    """Chooses n workers on few hosts, and there on few groups of devices that NVLink connects. In the result, workers
    of one host are adjacent, and so are those of one group.
    """

    def host(worker: Worker) -> str:
        return worker.info.host

    def nvlink_group(worker: Worker) -> tuple[str, str]:
        return worker.info.host, min((worker.device_key, *worker.info.nvlink_peers))

    for group_of in (host, nvlink_group):
        workers = _narrowed(workers, n, group_of)
    groups = _numbers_by_size(workers, nvlink_group)
    hosts = _numbers_by_size(workers, host)
    return sorted(workers, key=lambda worker: (hosts[host(worker)], groups[nvlink_group(worker)]))[:n]


def _narrowed(workers: list[Worker], n: int, group_of: Callable[[Worker], Hashable]) -> list[Worker]:
    """The workers of the smallest group that has at least n of them; all workers, if no group has."""
    sizes = Counter(map(group_of, workers))
    fits = [each for each, size in sizes.items() if size >= n]
    if not fits:
        return workers
    best = min(fits, key=lambda each: sizes[each])
    return [worker for worker in workers if group_of(worker) == best]


def _numbers_by_size(workers: list[Worker], group_of: Callable[[Worker], Hashable]) -> dict[Hashable, int]:
    """Numbers the groups from 0, in descending order of their number of workers."""
    return {each: order for order, (each, _) in enumerate(Counter(map(group_of, workers)).most_common())}


def form_gang(leases: list[Lease]) -> None:
    """Makes the leases of one task, in the order of their ranks, a gang."""
    gang = Gang(leases)
    for rank, lease in enumerate(leases):
        lease.gang, lease.rank = gang, rank
        lease.worker.leases_limit = 0
