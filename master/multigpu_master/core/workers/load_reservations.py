"""Load reservations: models that wait for room get it in the order in which they began to ask for it.

Tasks whose model is placed nowhere wait while models in use fill every worker's memory, and new tasks for the models in
use could make them wait for ever. So once the first task of a backlog has waited as long as its model takes to load,
the model asks for a reservation of a worker. A worker is reserved for one model at a time, and not before the cooldown
after its last loading is over; of the models that ask, the one that has asked longest gets the worker. The least
recently used models that must make room get no new leases there; their leases end as usual, and then the waiting model
gets its lease. A reservation takes no room from pinned models, nor from models with leases of a more important
priority.

So if n other models ask, a model waits for at most n + 1 periods before it begins to load. A period is the loading of
another model, a cooldown of the same length, and the time until the leases of the models to unload have ended.
docs/decisions/0011-residency.md has the reasoning.
"""

from multigpu_master.core.model import Worker
from multigpu_master.core.placement.resource_classes import Backlog
from multigpu_master.core.timers import Timers
from multigpu_master.core.workers.fleet import Fleet

# A backlog's first task waits at least this long before its model asks, however fast the model loads.
WAIT_MIN_S = 0.05


class LoadReservations:
    def __init__(self, fleet: Fleet, timers: Timers) -> None:
        self._fleet = fleet
        self._timers = timers
        self._watched: dict[Backlog, None] = {}  # a timer checks each while it waits for room
        self._asking: dict[Backlog, None] = {}  # backlogs that ask for a reservation, the first to ask first
        self.by_backlog: dict[Backlog, tuple[Worker, str]] = {}  # the reservations: worker and model
        self._cooling_down: dict[Worker, None] = {}  # workers with a timer for the end of their cooldown

    # --- backlogs that wait ------------------------------------------------------------------------------------------

    def watch_blocked(self, backlog: Backlog, now: float) -> None:
        """Call when no worker can take a backlog's first task, and at least one has no room for its model."""
        if backlog not in self._watched:
            self._watched[backlog] = None
            self._check_later(backlog, now)

    def _check_later(self, backlog: Backlog, now: float) -> None:
        """Checks a backlog when its first task has waited for wait_s, or if it already has, after another wait_s."""
        head, wait_s = backlog.head(), self._wait_s(backlog)
        due_s = (head.submit_s if head is not None else now) + wait_s
        self._timers.at(due_s if due_s > now else now + wait_s, lambda now: self._check(backlog, now))

    def _wait_s(self, backlog: Backlog) -> float:
        """How long the first task waits before its model asks: the shortest time to load the model on any worker."""
        fleet, shape = self._fleet, backlog.shape
        loads_s = [
            worker.residency.load_s(model)
            for worker in fleet.eligible(shape)
            if worker.session and (model := fleet.model_id(worker, shape.kind, shape.model))
        ]
        return max(WAIT_MIN_S, min(loads_s, default=WAIT_MIN_S))

    def _check(self, backlog: Backlog, now: float) -> None:
        """Stops watching a backlog that needs no reservation any more. Else, if the first task has waited long enough,
        ends a reservation that is no longer valid, and lets a backlog that has no reservation ask for one.
        """
        reservation, head = self.by_backlog.get(backlog), backlog.head()
        if head is None or self._model_usable(backlog):
            del self._watched[backlog]
            self._asking.pop(backlog, None)
            self._end(backlog)
            return
        if now >= head.submit_s + self._wait_s(backlog):
            if reservation is not None and not self._valid(backlog, *reservation):
                self._end(backlog)
            if backlog not in self.by_backlog:
                self._asking[backlog] = None
                self._reserve(backlog)
        self._check_later(backlog, now)

    def _model_usable(self, backlog: Backlog) -> bool:
        """Whether the model is placed where the tasks may use it, so that they only wait for room in a window."""
        fleet, shape = self._fleet, backlog.shape
        return any(
            w.accepting and fleet.load_s(w, shape) == 0.0 and fleet.model_block(w, shape) is None
            for w in self._candidate_workers(backlog)
        )

    def _candidate_workers(self, backlog: Backlog) -> list[Worker]:
        """The workers to which the backlog's tasks could go."""
        if backlog.strategy.pinned:
            return [backlog.pin] if backlog.pin is not None else []
        return list(self._fleet.eligible(backlog.shape))

    def _valid(self, backlog: Backlog, worker: Worker, model: str) -> bool:
        """Whether the worker of a reservation can still load the model."""
        kept = worker.accepting and worker.residency.reserved_model == model
        return kept and worker in self._candidate_workers(backlog) and self._model(backlog, worker) == model

    def _model(self, backlog: Backlog, worker: Worker) -> str:
        return self._fleet.model_id(worker, backlog.shape.kind, backlog.shape.model)

    # --- reservations ------------------------------------------------------------------------------------------------

    def _reserve(self, backlog: Backlog) -> None:
        """Reserves workers until one is reserved for this backlog: of the reservable ones that can make enough room,
        the worker with the fewest bytes to unload first. A worker that can be used by a backlog which asked earlier is
        reserved for that backlog instead.
        """
        free = [w for w in self._candidate_workers(backlog) if self._reservable(w)]
        sizes = {w: size for w in free if (size := self._bytes_to_unload(backlog, w)) is not None}
        for worker in sorted(sizes, key=lambda w: (sizes[w], w.worker_id)):
            self._reserve_for_next(worker)
            if backlog not in self._asking:
                return

    def _reservable(self, worker: Worker) -> bool:
        residency, for_gang = worker.residency, worker.leases_limit is not None
        busy = residency.reserved_model or residency.cooling_down or residency.loading_since_s or for_gang
        return worker.accepting and not busy

    def _bytes_to_unload(self, backlog: Backlog, worker: Worker) -> int | None:
        """The bytes of the models in use that must be unloaded. None: the model can't be loaded there, or it can
        without a reservation, once there is room in the window.
        """
        model = self._model(backlog, worker)
        if not model or model in worker.residency.unwanted:
            return None
        if self._fleet.model_block(worker, backlog.shape) is None:
            return None
        if backlog.strategy.excludes(backlog.shape, worker, self._fleet) is not None:
            return None
        to_unload = _models_to_unload(worker, model, self._priority(backlog))
        return None if to_unload is None else sum(map(worker.residency.memory_of, to_unload))

    @staticmethod
    def _priority(backlog: Backlog) -> int:
        head = backlog.head()
        assert head is not None, "a backlog that asks has tasks"
        return head.spec.priority

    def _begin(self, backlog: Backlog, worker: Worker) -> None:
        model = self._model(backlog, worker)
        del self._asking[backlog]
        self.by_backlog[backlog] = worker, model
        worker.residency.reserve(model, _models_to_unload(worker, model, self._priority(backlog)) or ())
        self._fleet.models_changed(worker)

    def end_abandoned(self) -> None:
        """Ends the reservations of backlogs that have no tasks any more."""
        for backlog in [backlog for backlog in self.by_backlog if not backlog.size]:
            self._end(backlog)

    def end_granted(self, backlog: Backlog) -> bool:
        """Ends the reservation of a backlog whose first task was granted a lease. Returns whether there was one."""
        reserved = backlog in self.by_backlog
        self._end(backlog)
        return reserved

    def _end(self, backlog: Backlog) -> None:
        worker, model = self.by_backlog.pop(backlog, (None, ""))
        if worker is None:
            return
        # A worker that was lost and has returned may be reserved for another backlog by now.
        others = [each for each, _ in self.by_backlog.values()]
        if worker.residency.reserved_model == model and worker not in others:
            worker.residency.end_reservation()
            self._fleet.models_changed(worker)
        self._reserve_for_next(worker)

    def _reserve_for_next(self, worker: Worker) -> None:
        """Reserves a worker for the first backlog that asks and can use it, if the worker is free."""
        if not self._reservable(worker):
            return
        for backlog in self._asking:
            able = backlog.size and worker in self._candidate_workers(backlog)
            if able and self._bytes_to_unload(backlog, worker) is not None:
                self._begin(backlog, worker)
                return

    # --- cooldown ----------------------------------------------------------------------------------------------------

    def start_cooldown_timer(self, worker: Worker) -> None:
        """Call when a worker may have loaded a model. If so, starts the timer for the end of its cooldown."""
        if worker.residency.cooling_down and worker not in self._cooling_down:
            self._cooling_down[worker] = None
            self._set_cooldown_timer(worker)

    def _set_cooldown_timer(self, worker: Worker) -> None:
        def over(now: float) -> None:
            if now < worker.residency.cooldown_until_s:
                self._set_cooldown_timer(worker)
                return
            del self._cooling_down[worker]
            worker.residency.cooling_down = False
            self._fleet.models_changed(worker)
            self._reserve_for_next(worker)

        self._timers.at(worker.residency.cooldown_until_s, over)

    def task_succeeded_on(self, worker: Worker, model: str, now: float) -> None:
        """Records that a model is loaded, because a task has succeeded on it."""
        if model in worker.residency.loading_since_s:
            worker.residency.record_loaded(model, now)
            self.start_cooldown_timer(worker)


def _models_to_unload(worker: Worker, model: str, priority: int) -> list[str] | None:
    """The models in use to unload for `model`, the least recently used first. Of these, only models that leases alone
    keep in use can go: not pinned, and without a lease of a more important priority. None: the models that must stay
    leave too little memory.
    """
    residency = worker.residency
    pinned = residency.pinned()
    important = {x.model for x in worker.leases.values() if x.task.spec.priority < priority}
    used = [m for m in residency.in_use() if m not in {model, residency.reserved_model}]
    size = sum(map(residency.memory_of, used)) + residency.memory_of(model)
    may_go = [m for m in used if m not in pinned and m not in important and m in residency.lease_counts]
    to_unload: list[str] = []
    for other in sorted(may_go, key=residency.last_use):
        if size <= residency.limit_bytes:
            break
        size -= residency.memory_of(other)
        to_unload.append(other)
    # If none stays, nothing more can be unloaded: the worker loads `model`, or rejects it as too large.
    none_stays = len(to_unload) == len(used)
    return to_unload if size <= residency.limit_bytes or none_stays else None
