"""Models that wait for room get their turn.

Tasks whose model is nowhere in place wait while every worker's room is taken by models in use; streams of tasks for
those could keep it so for ever. So once the oldest of a lane has waited for as long as its model takes to load, the
model gets a place in one worker's queue of turns: the shortest queue, then the fewest bytes to free. When its turn
comes and the worker has rested from its last loading, the least recently used models that must go get no new leases
there; those they have end as usual, and then the model that waited gets its lease. A turn takes no room from pinned
models, nor from models with leases of a more important priority.

So a model that waits behind n others on its worker is being loaded at the latest after its own loading time, to which
each of the n + 1 turns adds the rest (as long as the loading before it), that loading, and the time that the leases of
the models that go need to end. docs/decisions/0011-residency.md has the reasoning.
"""

from dataclasses import dataclass

from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.placement.lanes import Lane

# Tasks wait at least so long before they ask for a turn, however fast their model loads.
WAIT_MIN_S = 0.05


@dataclass(slots=True, eq=False)
class Turn:
    """A model's place in a worker's queue. `pin`: its tasks may go to this worker alone."""

    lane: Lane
    pin: Worker | None
    worker: Worker
    model: str


class Turns:
    """See the module."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: dict[Lane, None] = {}  # lanes that are looked at when they have waited long enough
        self.turns: dict[tuple[Shape, Worker | None], Turn] = {}
        self._queues: dict[Worker, list[Turn]] = {}
        self._resting: dict[Worker, None] = {}  # whose rest will be over at some time

    # --- lanes that wait ---------------------------------------------------------------------------------------------

    def parked(self, lane: Lane, pin: Worker | None, now: float) -> None:
        """A lane found no worker. It may be for want of room for its model."""
        if lane in self._waiting or lane.queue.paused:
            return
        blocked = self._ledger.fleet.blocked
        crowded = blocked(pin, lane.base) is not None if pin is not None else lane.crowd.crowded
        if crowded:
            self._waiting[lane] = None
            self._look_later(lane, now)

    def _look_later(self, lane: Lane, now: float) -> None:
        """Looks at a lane again when it has waited long enough, or as long once more."""
        head, wait_s = lane.head(), self._wait_s(lane)
        due_s = max(head.submit_s if head is not None else now, now - wait_s) + wait_s
        self._ledger.timers.at(due_s if due_s > now else now + wait_s, lambda now: self._look(lane, now))

    def _wait_s(self, lane: Lane) -> float:
        fleet, shape = self._ledger.fleet, lane.base
        loads_s = [
            worker.residency.load_s(model)
            for worker in fleet.eligible(shape)
            if worker.session and (model := fleet.model_id(worker, shape.kind, shape.model))
        ]
        return max(WAIT_MIN_S, min(loads_s, default=WAIT_MIN_S))

    def _look(self, lane: Lane, now: float) -> None:
        """A lane has waited: it gets a turn, if it still needs one."""
        ledger = self._ledger
        strategy = ledger.strategy_of(lane.queue)
        pin = ledger.placement.pin(strategy, lane.shape) if strategy.pinned else None
        for old in [t for t in self.turns.values() if t.lane is lane and t.pin is not pin]:
            self._end(old)
        turn = self.turns.get((lane.base, pin))
        if not lane.live or lane.queue.paused or self._served(lane, pin):
            del self._waiting[lane]
            if turn is not None and turn.lane is lane:
                self._end(turn)
            return
        head, wait_s = lane.head(), self._wait_s(lane)
        assert head is not None, "something waits in it"
        if now >= head.submit_s + wait_s:
            if turn is not None and not self._valid(turn):
                self._end(turn)
                turn = None
            if turn is None:
                self._ask(lane, pin)
        self._look_later(lane, now)

    def _served(self, lane: Lane, pin: Worker | None) -> bool:
        """Whether its model is in place where it may be used: its tasks wait for nothing but their turn there."""
        fleet = self._ledger.fleet
        workers = [pin] if pin is not None else list(fleet.eligible(lane.base))
        return any(w.accepting and fleet.load_s(w, lane.base) == 0.0 and fleet.blocked(w, lane.base) is None
                   for w in workers)  # fmt: skip

    def _valid(self, turn: Turn) -> bool:
        """Whether its worker still is one for it."""
        worker, shape = turn.worker, turn.lane.base
        if not worker.accepting or worker not in self._ledger.fleet.eligible(shape):
            return False
        return self._ledger.fleet.model_id(worker, shape.kind, shape.model) == turn.model

    def _ask(self, lane: Lane, pin: Worker | None) -> None:
        """Gives a lane's model a place in the queue of the worker that suits best; none if no worker may make room."""
        fleet, shape = self._ledger.fleet, lane.base
        strategy = self._ledger.strategy_of(lane.queue)
        best: tuple[int, int, str] | None = None
        found: Turn | None = None
        for worker in [pin] if pin is not None else list(fleet.eligible(shape)):
            model = fleet.model_id(worker, shape.kind, shape.model)
            if not worker.accepting or not model or strategy.excludes(shape, worker, fleet) is not None:
                continue
            going = self._who_goes(worker, model, lane.priority)
            if going is None or model in worker.residency.unwanted:
                continue
            residency = worker.residency
            size = sum(residency.memory_of(m) for m in going)
            rank = len(self._queues.get(worker, ())), size, worker.worker_id
            if best is None or rank < best:
                best, found = rank, Turn(lane, pin, worker, model)
        if found is not None:
            self.turns[shape, pin] = found
            self._queues.setdefault(found.worker, []).append(found)
            self._begin(found.worker)

    # --- a worker's turns --------------------------------------------------------------------------------------------

    def _who_goes(self, worker: Worker, model: str, priority: int) -> list[str] | None:
        """Which models in use must go to make room for one, the least recently used first; None if that is not enough,
        or they are more important.
        """
        residency = worker.residency
        pinned = residency.pinned() | {r.model: None for r in residency.said.values() if r.pinned}
        important = {x.model for x in worker.leases.values() if x.task.spec.priority < priority}
        used = [m for m in residency.in_use() if m not in {model, residency.room_for}]
        size = sum(residency.memory_of(m) for m in used) + residency.memory_of(model)
        may_go = [m for m in used if m not in pinned and m not in important and m in residency.uses]
        going: list[str] = []
        for other in sorted(may_go, key=residency.last_use):
            if size <= residency.limit_bytes:
                break
            size -= residency.memory_of(other)
            going.append(other)
        alone = len(going) == len(used)  # a model larger than all room is the worker's to reject
        return going if size <= residency.limit_bytes or alone else None

    def _begin(self, worker: Worker) -> None:
        """Lets the first turn of a worker begin, if one may now."""
        residency, queue = worker.residency, self._queues.get(worker)
        if not queue or residency.room_for or residency.resting or residency.began_s:
            return
        turn = queue[0]
        going = self._who_goes(worker, turn.model, turn.lane.priority)
        if going is None:
            self._drop(turn)  # its lane asks again
            self._begin(worker)
            return
        residency.room_for = turn.model
        residency.retiring = dict.fromkeys(going)
        self._changed(worker)

    def granted(self, lane: Lane, worker: Worker) -> None:
        """A lane has got a lease: its turn is over."""
        for pin in (None, worker):
            turn = self.turns.get((lane.base, pin))
            if turn is not None:
                self._end(turn)
                self._ledger.lanes.offer_all()

    def _end(self, turn: Turn) -> None:
        self._drop(turn)
        self._begin(turn.worker)

    def _drop(self, turn: Turn) -> None:
        worker = turn.worker
        del self.turns[turn.lane.base, turn.pin]
        queue = self._queues[worker]
        queue.remove(turn)
        if not queue:
            del self._queues[worker]
        residency = worker.residency
        if residency.room_for == turn.model:
            residency.room_for, residency.retiring = "", {}
            self._changed(worker)

    def _changed(self, worker: Worker) -> None:
        self._ledger.fleet.models_changed(worker)
        self._ledger.freed[worker] = None

    # --- rest --------------------------------------------------------------------------------------------------------

    def look_at(self, worker: Worker) -> None:
        """The worker has said something of its models, or one of them was used: it may rest now, or go on."""
        residency = worker.residency
        if residency.resting and worker not in self._resting:
            self._resting[worker] = None
            self._rest(worker)
        elif not residency.resting and worker in self._queues:
            self._begin(worker)

    def _rest(self, worker: Worker) -> None:
        def over(now: float) -> None:
            residency = worker.residency
            if now < residency.rest_until_s:
                self._rest(worker)
                return
            del self._resting[worker]
            residency.resting = False
            self._changed(worker)
            self._begin(worker)

        self._ledger.timers.at(worker.residency.rest_until_s, over)

    def used(self, worker: Worker, model: str, now: float) -> None:
        """A task has succeeded on a model: it is loaded."""
        if model in worker.residency.began_s:
            worker.residency.ready(model, now)
            self.look_at(worker)
