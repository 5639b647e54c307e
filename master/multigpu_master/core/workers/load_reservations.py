"""Load reservations: models that wait for room are loaded in turn.

Tasks whose model is placed nowhere wait while models in use take up every worker's memory, and new tasks for those
models could block them for ever. So once the oldest task of a class has waited as long as its model takes to load, the
model gets a reservation on one worker: the one with the fewest reservations, then the fewest bytes to free. When it is
the worker's first reservation and the worker has rested from its last loading, the least recently used models that must
go get no new leases there; their leases end as usual, and then the waiting model gets its lease. A reservation takes no
room from pinned models, nor from models with leases of a more important priority.

So a model behind n others on its worker is being loaded at the latest after its own loading time, plus for each of the
n + 1 reservations: the rest (as long as the loading before it), that loading, and the time until the leases of the
models that go have ended. docs/decisions/0011-residency.md has the reasoning.
"""

from dataclasses import dataclass

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.placement.resource_classes import ResourceClass
from multigpu_master.core.state import State

# Tasks wait at least this long before they ask for a reservation, however fast their model loads.
WAIT_MIN_S = 0.05


@dataclass(slots=True, eq=False)
class Reservation:
    """A model's place in a worker's queue. `pin`: the only worker for its tasks; None: any."""

    resource_class: ResourceClass
    pin: Worker | None
    worker: Worker
    model: str


class LoadReservations:
    def __init__(self, state: State) -> None:
        self._state = state
        self._fleet = state.fleet
        self._waiting: dict[ResourceClass, None] = {}  # classes that are checked when they have waited long enough
        self.by_class: dict[tuple[Shape, Worker | None], Reservation] = {}
        self._queues: dict[Worker, list[Reservation]] = {}
        self._resting: dict[Worker, None] = {}  # workers with a timer for the end of their rest

    # --- classes that wait -------------------------------------------------------------------------------------------

    def parked(self, resource_class: ResourceClass, pin: Worker | None, now: float) -> None:
        """Call when a class found no worker: watches it if no worker has room for its model."""
        if resource_class in self._waiting or resource_class.queue.paused:
            return
        no_room = resource_class.backlog.no_room_for_model
        if pin is not None:
            no_room = self._fleet.blocked(pin, resource_class.base) is not None
        if no_room:
            self._waiting[resource_class] = None
            self._check_later(resource_class, now)

    def _check_later(self, resource_class: ResourceClass, now: float) -> None:
        """Checks a class when its head has waited long enough; if it has already, after the same time again."""
        head, wait_s = resource_class.head(), self._wait_s(resource_class)
        due_s = max(head.submit_s if head is not None else now, now - wait_s) + wait_s
        self._state.timers.at(due_s if due_s > now else now + wait_s, lambda now: self._check(resource_class, now))

    def _wait_s(self, resource_class: ResourceClass) -> float:
        fleet, shape = self._fleet, resource_class.base
        loads_s = [
            worker.residency.load_s(model)
            for worker in fleet.eligible(shape)
            if worker.session and (model := fleet.model_id(worker, shape.kind, shape.model))
        ]
        return max(WAIT_MIN_S, min(loads_s, default=WAIT_MIN_S))

    def _check(self, resource_class: ResourceClass, now: float) -> None:
        """Makes a reservation for a class that has waited long enough, if it still needs one."""
        strategy = self._state.ledger.strategy_of(resource_class.queue)
        pin = self._state.placement.pin(strategy, resource_class.shape) if strategy.pinned else None
        for old in [r for r in self.by_class.values() if r.resource_class is resource_class and r.pin is not pin]:
            self._end(old)
        reservation = self.by_class.get((resource_class.base, pin))
        if not resource_class.size or resource_class.queue.paused or self._served(resource_class, pin):
            del self._waiting[resource_class]
            if reservation is not None and reservation.resource_class is resource_class:
                self._end(reservation)
            return
        head, wait_s = resource_class.head(), self._wait_s(resource_class)
        assert head is not None, "the class has waiting tasks"
        if now >= head.submit_s + wait_s:
            if reservation is not None and not self._valid(reservation):
                self._end(reservation)
                reservation = None
            if reservation is None:
                self._reserve(resource_class, pin)
        self._check_later(resource_class, now)

    def _served(self, resource_class: ResourceClass, pin: Worker | None) -> bool:
        """Whether the class's model is placed where its tasks may use it: they only wait for room in a window."""
        fleet, base = self._fleet, resource_class.base
        workers = [pin] if pin is not None else list(fleet.eligible(base))
        return any(w.accepting and fleet.load_s(w, base) == 0.0 and fleet.blocked(w, base) is None for w in workers)

    def _valid(self, reservation: Reservation) -> bool:
        """Whether the reservation's worker can still load its model."""
        worker, shape = reservation.worker, reservation.resource_class.base
        if not worker.accepting or worker not in self._fleet.eligible(shape):
            return False
        return self._fleet.model_id(worker, shape.kind, shape.model) == reservation.model

    def _reserve(self, resource_class: ResourceClass, pin: Worker | None) -> None:
        """Makes a reservation on the best worker; none if no worker can free enough memory."""
        fleet, shape = self._fleet, resource_class.base
        strategy = self._state.ledger.strategy_of(resource_class.queue)
        best: tuple[int, int, str] | None = None
        found: Reservation | None = None
        for worker in [pin] if pin is not None else list(fleet.eligible(shape)):
            model = fleet.model_id(worker, shape.kind, shape.model)
            if not worker.accepting or not model or strategy.excludes(shape, worker, fleet) is not None:
                continue
            going = _who_goes(worker, model, resource_class.priority)
            if going is None or model in worker.residency.unwanted:
                continue
            size = sum(map(worker.residency.memory_of, going))
            rank = len(self._queues.get(worker, ())), size, worker.worker_id
            if best is None or rank < best:
                best, found = rank, Reservation(resource_class, pin, worker, model)
        if found is not None:
            self.by_class[shape, pin] = found
            self._queues.setdefault(found.worker, []).append(found)
            self._begin(found.worker)

    # --- a worker's reservations -------------------------------------------------------------------------------------

    def _begin(self, worker: Worker) -> None:
        """Begins the first reservation of a worker, if it may now."""
        residency, queue = worker.residency, self._queues.get(worker)
        if not queue or residency.room_for or residency.resting or residency.began_s:
            return
        reservation = queue[0]
        going = _who_goes(worker, reservation.model, reservation.resource_class.priority)
        if going is None:
            self._drop(reservation)  # the next check of its class makes another one
            self._begin(worker)
            return
        residency.reserve(reservation.model, going)
        self._fleet.models_changed(worker)

    def granted(self, resource_class: ResourceClass, worker: Worker) -> None:
        """Ends the reservation of a class that was granted a lease."""
        for pin in (None, worker):
            reservation = self.by_class.get((resource_class.base, pin))
            if reservation is not None:
                self._end(reservation)
                self._state.classes.offer_all()

    def _end(self, reservation: Reservation) -> None:
        self._drop(reservation)
        self._begin(reservation.worker)

    def _drop(self, reservation: Reservation) -> None:
        worker = reservation.worker
        del self.by_class[reservation.resource_class.base, reservation.pin]
        queue = self._queues[worker]
        queue.remove(reservation)
        if not queue:
            del self._queues[worker]
        if worker.residency.room_for == reservation.model:
            worker.residency.end_reservation()
            self._fleet.models_changed(worker)

    # --- rest --------------------------------------------------------------------------------------------------------

    def look_at(self, worker: Worker) -> None:
        """Call when a worker's models changed: starts the timer of its rest, or begins its next reservation."""
        residency = worker.residency
        if residency.resting and worker not in self._resting:
            self._resting[worker] = None
            self._rest(worker)
        elif not residency.resting and worker in self._queues:
            self._begin(worker)

    def _rest(self, worker: Worker) -> None:
        def over(now: float) -> None:
            if now < worker.residency.rest_until_s:
                self._rest(worker)
                return
            del self._resting[worker]
            worker.residency.resting = False
            self._fleet.models_changed(worker)
            self._begin(worker)

        self._state.timers.at(worker.residency.rest_until_s, over)

    def used(self, worker: Worker, model: str, now: float) -> None:
        """Records that a model is loaded, because a task has succeeded on it."""
        if model in worker.residency.began_s:
            worker.residency.ready(model, now)
            self.look_at(worker)


def _who_goes(worker: Worker, model: str, priority: int) -> list[str] | None:
    """The models in use to unload for `model`, the least recently used first. None: the models that may be unloaded
    (neither pinned, nor with leases of a more important priority) do not free enough memory.
    """
    residency = worker.residency
    pinned = residency.pinned() | {r.model: None for r in residency.reported.values() if r.pinned}
    important = {x.model for x in worker.leases.values() if x.task.spec.priority < priority}
    used = [m for m in residency.in_use() if m not in {model, residency.room_for}]
    size = sum(map(residency.memory_of, used)) + residency.memory_of(model)
    may_go = [m for m in used if m not in pinned and m not in important and m in residency.uses]
    going: list[str] = []
    for other in sorted(may_go, key=residency.last_use):
        if size <= residency.limit_bytes:
            break
        size -= residency.memory_of(other)
        going.append(other)
    alone = len(going) == len(used)  # if the model is larger than the worker's memory, the worker rejects it
    return going if size <= residency.limit_bytes or alone else None
