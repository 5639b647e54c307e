"""Grants leases: again and again chooses a worker for the first task of the first ready backlog, until no backlog is
ready, or no worker has room and no gang can begin.
"""

from collections.abc import Callable

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.events import Commands
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Shape, Task, Worker
from multigpu_master.core.placement.candidates import (
    Candidates,
    Place,
    allowed_and_best,
    backlog_suffices,
    insufficient_free_bytes,
    is_one_of,
)
from multigpu_master.core.placement.gangs import Gangs, form_gang
from multigpu_master.core.placement.recall import Recalls
from multigpu_master.core.placement.resource_classes import Backlog, ResourceClass
from multigpu_master.core.restart import IdRange
from multigpu_master.core.timers import DUE_MAX
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.load_reservations import LoadReservations

# Limits for one event: of the backlogs that find no worker, and of the workers that are compared, over all backlogs.
# The next event, which is due at once, tries the other backlogs.
BLOCKS_MAX = 1000
COMPARED_MAX = 20_000
# A task that broke an engine pauses for this long, repeatedly, until another device has room.
ELSEWHERE_S = 0.05
# Limit of shapes for which the places of workers are kept.
PLACES_SHAPES_MAX = 64


class Dispatcher:
    def __init__(
        self, ledger: Ledger, fleet: Fleet, ids: IdRange, commands: Commands, attempts: Attempts,
        reservations: LoadReservations, recalls: Recalls, gangs: Gangs, can_grant: Callable[[float], bool],
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._fleet = fleet
        self._ids = ids
        self._commands = commands
        self._attempts = attempts
        self._reservations = reservations
        self._recalls = recalls
        self._gangs = gangs
        self._can_grant = can_grant
        self.stopped_at_s: float | None = None  # when `run` stopped at BLOCKS_MAX or COMPARED_MAX; None: it did not
        # For this event only. `_freed_workers`: by backlog that this event unblocked, the workers that may have gained
        # room since the last dispatch.
        self._candidates: dict[Backlog, Candidates] = {}
        self._freed_workers: dict[Backlog, list[Worker]] = {}
        self._compared = 0  # number of workers compared in this event, over all backlogs
        self._places: dict[tuple[str, Shape], dict[Worker, Place]] = {}  # by strategy and shape; see Candidates
        # The fleet's change counters as of the last _unblock_changed().
        self._eligibility = -1
        self._estimates = -1
        self._resident = -1

    def run(self, now: float) -> None:
        """Grants the leases that can be granted now. Stops early when BLOCKS_MAX backlogs have found no worker, when
        one finds none after COMPARED_MAX workers were compared, when it has ended DUE_MAX overdue tasks, or when no id
        is left; a later event continues.
        """
        self.stopped_at_s = None
        if not self._can_grant(now):
            return
        self._gangs.update()
        self._reservations.end_abandoned()
        self._drop_candidates()
        self._unblock_changed()
        self._compared = 0
        ledger, classes = self._ledger, self._ledger.classes
        fleet, ids, with_room = self._fleet, self._ids, self._fleet.with_room
        dispatched = dict[Worker, list[Lease]]()
        expired = blocked = 0
        gangs = self._gangs
        while (with_room or gangs.reserved_idle) and (first := classes.first()) is not None and expired < DUE_MAX:
            if ids.next_id >= ids.end:
                break
            backlog, resource_class, task = first
            limited = task.spec.deadline_s is not None or task.spec.queue_timeout_s is not None
            # Overdue: its expiry is due but beyond the first DUE_MAX, or was postponed while the task was leased.
            if limited and self._attempts.end_if_overdue(task, now):
                expired += 1
                continue
            worker = None
            if backlog.shape.world_size == 1:
                worker = self._choose(backlog, now)
            elif self._grant_gang(backlog, resource_class, task, dispatched, now):
                continue
            if worker is None:
                blocked += 1
                if blocked == BLOCKS_MAX or self._compared >= COMPARED_MAX:
                    self.stopped_at_s = now
                    break
                continue
            classes.pop_first(resource_class)
            if task.extra is not None and not backlog.strategy.pinned:
                worker = self._avoid_failed_device(task, backlog, worker)
                if worker is None:
                    self._attempts.pause(task, now, ELSEWHERE_S)
                    continue
            task.attempts += 1
            cost_s = fleet.expected_s(worker, backlog.shape, task.units)
            lease = Lease(ids.issue(), task, worker, task.attempts, now, worker.dispatches_sent + 1, cost_s)
            if ledger.record_lease(lease, now):
                # The worker will load the model, so other tasks for the model need no larger backlog to go there.
                self._drop_candidates()
                classes.unblock_all(only_too_few_tasks=True)
            if self._reservations.by_backlog and self._reservations.end_granted(backlog):
                self._drop_candidates()
                classes.unblock_all()
            dispatched.setdefault(worker, []).append(lease)
        for worker, leases in dispatched.items():
            worker.dispatches_sent += 1
            self._commands.add(ev.Dispatch(worker.session, worker.dispatches_sent, leases))
            self._recalls.watch(worker, now)

    def _grant_gang(
        self, backlog: Backlog, resource_class: ResourceClass, task: Task, dispatched: dict[Worker, list[Lease]],
        now: float,
    ) -> bool:  # fmt: skip
        """Grants all ranks of the first task of the first ready backlog. If too few workers are idle, or too few
        ids are left, blocks the backlog and returns False.
        """
        enough_ids = self._ids.end - self._ids.next_id >= backlog.shape.world_size
        workers = self._gangs.choose_or_reserve(backlog, task, now) if enough_ids else None
        self._drop_candidates()  # a reservation may have changed the room of workers
        if workers is None:
            self._ledger.classes.block(backlog, self._fleet.eligible(backlog.shape))
            return False
        self._ledger.classes.pop_first(resource_class)
        task.attempts += 1
        leases = []
        for worker in workers:
            cost_s = self._fleet.expected_s(worker, backlog.shape, task.units)
            member = Lease(self._ids.issue(), task, worker, task.attempts, now, worker.dispatches_sent + 1, cost_s)
            leases.append(member)
            dispatched[worker] = [member]
        form_gang(leases)
        self._ledger.record_gang(leases, now)
        return True

    def _choose(self, backlog: Backlog, now: float) -> Worker | None:
        """Returns the worker for the first task of the first ready backlog. If no worker can get it now, blocks the
        backlog and returns None.
        """
        fleet, pin = self._fleet, backlog.pin
        if pin is not None:
            backlog.model_blocked = fleet.model_block(pin, backlog.shape) is not None
            if not (backlog.model_blocked or pin.full or insufficient_free_bytes(pin, backlog.shape) is not None):
                return pin
        elif not backlog.strategy.pinned:
            candidates = self._candidates.get(backlog)
            if candidates is None:
                candidates = self._candidates[backlog] = Candidates(
                    fleet, backlog, self._places_for(backlog), self._freed_workers.get(backlog)
                )
                self._compared += candidates.compared
            worker = candidates.best()
            if worker is not None:
                return worker
        able = {pin: None} if pin is not None else fleet.eligible(backlog.shape)
        self._ledger.classes.block(backlog, able)
        if backlog.model_blocked:
            self._reservations.watch_blocked(backlog, now)
        return None

    def _places_for(self, backlog: Backlog) -> dict[Worker, Place]:
        key = backlog.strategy.name, backlog.shape
        places = self._places.get(key)
        if places is None:
            if len(self._places) >= PLACES_SHAPES_MAX:
                self._places.clear()
            places = self._places[key] = {}
        return places

    def _avoid_failed_device(self, task: Task, backlog: Backlog, worker: Worker) -> Worker | None:
        """Returns the chosen worker; or another, if the task should avoid the chosen one and another is free. None: the
        task broke an engine on the chosen worker's device, and has to wait for another device.
        """
        extra = task.ensure_extra()
        avoided = extra.broke_on_devices or (extra.avoid_device_or_worker,)
        if not is_one_of(worker, avoided):
            return worker
        fleet, strategy = self._fleet, backlog.strategy
        others, other = allowed_and_best(fleet, backlog, avoided)
        if extra.broke_on_devices and others and other is None:
            return None
        if other and (
            extra.broke_on_devices or backlog_suffices(fleet, strategy, backlog.shape, other, backlog.size + 1)
        ):
            return other
        return worker

    def _drop_candidates(self) -> None:
        """Call when workers may have gained room, or need a smaller backlog: all workers are compared again."""
        self._candidates.clear()
        self._freed_workers.clear()

    def _unblock_changed(self) -> None:
        """Unblocks the backlogs that may find a worker after the changes of workers since the last event."""
        fleet, classes = self._fleet, self._ledger.classes
        maybe_freed = fleet.pop_maybe_freed()
        if self._eligibility != fleet.eligibility_changes:
            classes.repin()
        if (self._eligibility, self._estimates) != (fleet.eligibility_changes, fleet.estimates_changes):
            self._places.clear()
            classes.unblock_all()
        elif classes.blocked:
            if maybe_freed:
                # A worker reserved for a gang has no room, but when its last lease has ended, the gang may begin.
                changed = [w for w in maybe_freed if w in fleet.with_room or w.leases_limit is not None]
                self._freed_workers = dict.fromkeys(classes.unblock_for(changed), changed)
            if self._resident != fleet.resident_changes:  # the fewer workers have a model, the sooner another loads it
                self._freed_workers.clear()
                classes.unblock_all(only_too_few_tasks=True)
        self._eligibility, self._estimates = fleet.eligibility_changes, fleet.estimates_changes
        self._resident = fleet.resident_changes
