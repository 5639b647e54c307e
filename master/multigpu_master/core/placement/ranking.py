"""Which worker gets a task: a ranking for each strategy and shape, kept in a heap.

A ranking holds (score, last dispatch, worker) for every worker that may have a task of its shape now. Scores change
only when a worker changes, and the fleet logs that; a ranking reads on in the log, pushes the changed workers again,
and skips entries whose worker has changed since. Workers that are not worth it for so few tasks stand aside, by the
number of tasks that would make them so. A dispatch costs a few heap operations, whatever the size of the fleet.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from multigpu_master.core.model import Shape, Worker, WorkerInfo
from multigpu_master.core.placement.lanes import Crowd, Lane
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.residency import Block

if TYPE_CHECKING:
    from multigpu_master.strategies.base import Strategy

RANKINGS_MAX = 1024
PINS_MAX = 16_384
# So many workers with room are looked at one by one.
FEW = 4
# When so many workers come at once every shape's worker is sought anew, once somebody asks.
CAME_MAX = 16
# A worker that is not worth it for so many tasks never is.
QUEUED_MAX = 1 << 40
# So many models that take up the room are named.
NAMED_MAX = 8


def busy(fleet: Fleet, strategy: "Strategy", shape: Shape, worker: Worker) -> list[str]:
    """Why an eligible worker can't have a task of this shape right now; empty if it can."""
    why = []
    if not worker.session:
        why.append("lost")
    if worker.cordoned:
        why.append(f"cordoned: {worker.cordon_reason}" if worker.cordon_reason else "cordoned")
    if worker.quarantined:
        why.append(f"quarantined: {_illness(worker)}")
    if worker.draining:
        why.append("draining")
    if worker.stopping:
        why.append("stopping")
    if len(worker.leases) >= worker.allowed:
        why.append(f"window full ({len(worker.leases)} of {worker.allowed} leases)")
    if worker.leased_bytes >= worker.info.window_bytes:
        why.append(f"window full ({worker.leased_bytes} of {worker.info.window_bytes} bytes)")
    if (free := short_of_memory(worker, shape)) is not None:
        why.append(f"{shape.memory_bytes} bytes of device memory required, {free} free")
    if (block := fleet.blocked(worker, shape)) is not None:
        why.append(_crowded(fleet, worker, shape, block))
    if (own := strategy.excludes(shape, worker, fleet)) is not None:
        why.append(own)
    return why


def _crowded(fleet: Fleet, worker: Worker, shape: Shape, block: Block) -> str:
    """Why a model gets no place on a worker, in words."""
    residency, model = worker.residency, fleet.model_id(worker, shape.kind, shape.model)
    if block is not Block.NO_ROOM:
        return f"model {model}: {block.value}"
    others = sorted(m for m in residency.in_use() if m != model)
    named = ", ".join(others[:NAMED_MAX]) + (", ..." if len(others) > NAMED_MAX else "")
    needed, limit = residency.memory_of(model), residency.limit_bytes
    return f"no room for model {model} ({needed} of {limit} bytes): {named} are in use"


def _illness(worker: Worker) -> str:
    """Why a worker is quarantined, in words."""
    reasons = [reason.message or reason.code for reason in worker.health.reasons]
    if worker.suspected:
        reasons.append("different tasks failed on it, and the check of its device is not passed yet")
    return "; ".join(reasons) or "its device is being checked"


def short_of_memory(worker: Worker, shape: Shape) -> int | None:
    """The worker's free device memory, in bytes, if it is too little for the shape; None: it will do or is unknown."""
    if not shape.memory_bytes:
        return None
    free = worker.memory_free_bytes()
    if free is None:
        return None
    free -= worker.leased_memory_bytes
    return free if free < shape.memory_bytes else None


def barred(fleet: Fleet, strategy: "Strategy", shape: Shape, worker: Worker) -> bool:
    """Whether an eligible worker that takes work can't have a task of this shape now, whatever room its window has."""
    return (
        short_of_memory(worker, shape) is not None
        or strategy.excludes(shape, worker, fleet) is not None
        or (fleet.planned and fleet.blocked(worker, shape) is not None)
    )


def worthwhile(fleet: Fleet, strategy: "Strategy", shape: Shape, worker: Worker, queued: int) -> bool:
    """Whether the strategy finds a worker worth it for so many tasks, or their model's turn has come there."""
    return strategy.worth(shape, worker, fleet, queued) or fleet.has_turn(worker, shape)


def is_one_of(worker: Worker, named: tuple[str, ...]) -> bool:
    """Whether a worker, or its device, is among these worker_ids and device_keys."""
    return worker.device_key in named or worker.worker_id in named


# (score, last dispatch, version, tie, worker)
Entry = tuple[float, int, int, int, Worker]


class Ranking:
    """The workers that may have a task of one shape now, by one strategy's score."""

    __slots__ = (
        "_aside", "_averages", "_cursor", "_enough", "_fleet", "_heap", "_members", "_pushed", "_resident", "_shape",
        "_ties", "crowded", "strategy",
    )  # fmt: skip

    def __init__(self, fleet: Fleet, strategy: "Strategy", shape: Shape) -> None:
        self._fleet = fleet
        self.strategy = strategy
        self._shape = shape
        self._heap: list[Entry] = []
        self._aside: list[tuple[int, int, Entry]] = []  # (how many tasks make it worth it, tie, entry)
        self._enough = 0  # for the last one that was set aside
        self._resident = 0  # how many workers had the model when those aside were judged
        self._pushed: dict[Worker, int] = {}  # the version under which a worker was looked at last
        self._members = -1
        self._averages = -1
        self._cursor = 0
        self._ties = 0
        self.crowded: dict[Worker, None] = {}  # those that have no room for the model

    def best(self, queued: int) -> Worker | None:
        """The worker that ranks first among those worth it for `queued` tasks; None if none may have one now."""
        self._catch_up()
        heap, fleet, worth = self._heap, self._fleet, self.strategy.worth
        if self._aside:
            self._bring_back(queued)
        while heap:
            worker = heap[0][4]
            if heap[0][2] != worker.version:
                heappop(heap)
            elif worth(self._shape, worker, fleet, queued) or fleet.has_turn(worker, self._shape):
                return worker
            else:
                self._set_aside(heappop(heap), queued)
        return None

    def has_room(self) -> bool:
        """Whether any worker could have a task, worth it or not. Only right after `best` found none."""
        aside = self._aside
        while aside and aside[0][2][2] != aside[0][2][4].version:
            heappop(aside)
        return bool(aside)

    def _set_aside(self, entry: Entry, queued: int) -> None:
        """Keeps an entry whose worker is not worth it for so few tasks until there are enough."""
        worker, aside = entry[4], self._aside
        if not aside:
            self._resident = self._fleet.resident_workers(self._shape)
        enough = self._enough = self._worth_from(worker, queued)
        heappush(aside, (enough, entry[3], entry))
        if len(aside) > 64 + 4 * len(self._pushed):
            aside[:] = [e for e in aside if e[2][2] == e[2][4].version]
            heapify(aside)

    def _worth_from(self, worker: Worker, too_few: int) -> int:
        """The least number of tasks for which a worker is worth it, by halving. It is tried first what it was for the
        last one, since workers are much alike.
        """
        shape, fleet, worth = self._shape, self._fleet, self.strategy.worth
        enough = max(too_few + 1, self._enough)
        while enough < QUEUED_MAX and not worth(shape, worker, fleet, enough):
            too_few, enough = enough, 2 * enough
        middle = enough - 1
        while enough < QUEUED_MAX and enough - too_few > 1:
            if worth(shape, worker, fleet, middle):
                enough = middle
            else:
                too_few = middle
            middle = (too_few + enough) // 2
        return enough

    def _bring_back(self, queued: int) -> None:
        """Returns those aside that may be worth it by now to the heap."""
        aside = self._aside
        if self._resident != self._fleet.resident_workers(self._shape):
            for _, _, entry in aside:
                heappush(self._heap, entry)
            aside.clear()
        while aside and aside[0][0] <= queued:
            heappush(self._heap, heappop(aside)[2])

    def _catch_up(self) -> None:
        fleet = self._fleet
        end = fleet.changes_base + len(fleet.changes)
        anew = self._members != fleet.membership or self._averages != fleet.averages
        if anew or self._cursor < fleet.changes_base:
            self._heap.clear()
            self._aside.clear()
            self._pushed.clear()
            self.crowded.clear()
            for worker in fleet.eligible(self._shape):
                self._look_at(worker)
            self._members = fleet.membership
            self._averages = fleet.averages
        else:
            pushed = self._pushed  # which has all that are eligible
            for worker in fleet.changes[self._cursor - fleet.changes_base :]:
                if pushed.get(worker, worker.version) != worker.version:
                    self._look_at(worker)
        self._cursor = end

    def _look_at(self, worker: Worker) -> None:
        self._pushed[worker] = worker.version
        if self.crowded:
            self.crowded.pop(worker, None)
        if not worker.accepting or worker.full:
            return
        if short_of_memory(worker, self._shape) is not None:
            return
        if self.strategy.excludes(self._shape, worker, self._fleet) is not None:
            return
        if self._fleet.planned and self._fleet.blocked(worker, self._shape) is not None:
            self.crowded[worker] = None
            return
        score = self.strategy.score(self._shape, worker, self._fleet)
        heap = self._heap
        self._ties += 1
        heappush(heap, (score, worker.last_dispatch, worker.version, self._ties, worker))
        if len(heap) > 64 + 4 * len(self._pushed):
            # Mostly stale entries that never came to the top.
            heap[:] = [e for e in heap if e[2] == e[4].version]
            heapify(heap)


class Pin(NamedTuple):
    """Where a pinned strategy has a shape go."""

    strategy: "Strategy"
    first: tuple[float, str, Worker] | None  # (score, worker_id, worker); None: nobody may have it


class Placement:
    """Every ranking in use, and for pinned strategies every shape's worker."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._rankings: dict[tuple[str, Shape], Ranking] = {}
        self._pins: dict[tuple[str, Shape], Pin] = {}
        self._pins_members = -1
        self._members: dict[Worker, WorkerInfo] = {}  # who took tasks when the pins were last looked at

    def choose(self, strategy: "Strategy", lane: Lane) -> Worker | None:
        """The worker for the next of a lane's tasks; None if it must wait."""
        if strategy.pinned:
            worker = self.pin(strategy, lane.shape)
            if worker is None or worker.full or short_of_memory(worker, lane.shape) is not None:
                return None
            return worker if self._fleet.blocked(worker, lane.shape) is None else None
        crowd = lane.crowd
        if len(self._fleet.open) <= FEW:
            return self._of_few(strategy, crowd)
        ranking = crowd.ranking
        if ranking is None or ranking.strategy is not strategy:
            ranking = crowd.ranking = self._ranking(strategy, crowd.base)
        worker = ranking.best(crowd.live)
        crowd.crowded = bool(ranking.crowded)
        crowd.waits_to_grow = worker is None and ranking.has_room()
        return worker

    def _of_few(self, strategy: "Strategy", crowd: Crowd) -> Worker | None:
        """The same by a look at each worker that has room. While those are few it costs less than a ranking for each of
        many shapes.
        """
        fleet, shape = self._fleet, crowd.base
        able, best, first, crowd.crowded, aside = fleet.eligible(shape), None, (0.0, 0), False, False
        for worker in fleet.open:
            if worker not in able or (shape.memory_bytes and short_of_memory(worker, shape) is not None):
                continue
            if strategy.excludes(shape, worker, fleet) is not None:
                continue
            if fleet.planned and fleet.blocked(worker, shape) is not None:
                crowd.crowded = True
            elif not (strategy.worth(shape, worker, fleet, crowd.live) or fleet.has_turn(worker, shape)):
                aside = True
            else:
                rank = strategy.score(shape, worker, fleet), worker.last_dispatch
                if best is None or rank < first:
                    best, first = worker, rank
        crowd.waits_to_grow = best is None and aside
        return best

    def elsewhere(
        self, strategy: "Strategy", shape: Shape, apart: tuple[str, ...]
    ) -> tuple[list[Worker], Worker | None]:
        """The workers that take such tasks, but for these devices (device_key) and workers (worker_id); and the one of
        them that may have one now and ranks first.
        """
        fleet = self._fleet
        others = [w for w in fleet.eligible(shape) if w.accepting and not is_one_of(w, apart)]
        free = [w for w in others if not w.full and not barred(fleet, strategy, shape, w)]
        first = min(free, key=lambda w: (strategy.score(shape, w, fleet), w.last_dispatch), default=None)
        return others, first

    def _ranking(self, strategy: "Strategy", shape: Shape) -> Ranking:
        key = (strategy.name, shape)
        ranking = self._rankings.get(key)
        if ranking is None:
            if len(self._rankings) >= RANKINGS_MAX:
                self._rankings.clear()
            ranking = self._rankings[key] = Ranking(self._fleet, strategy, shape)
        return ranking

    def pin(self, strategy: "Strategy", shape: Shape) -> Worker | None:
        """The one worker that a pinned strategy gives the shape to, with or without room."""
        if self._pins_members != self._fleet.membership:
            self._move_pins()
        if len(self._pins) >= PINS_MAX:
            self._pins.clear()
        key = (strategy.name, shape)
        pin = self._pins.get(key)
        if pin is None:
            pin = self._pins[key] = Pin(strategy, self._first(strategy, shape, self._members))
        return pin.first[2] if pin.first is not None else None

    def _first(self, strategy: "Strategy", shape: Shape, workers: Iterable[Worker]) -> tuple[float, str, Worker] | None:
        """The one of these that ranks first for the shape, with its score and id."""
        fleet = self._fleet
        eligible = fleet.eligible(shape._replace(partition=-1))
        able = [w for w in workers if w in eligible and strategy.excludes(shape, w, fleet) is None]
        return min([(strategy.score(shape, w, fleet), w.worker_id, w) for w in able], default=None)

    def _move_pins(self) -> None:
        """Workers came, went or changed: only what was pinned to one that is gone is sought anew, and one that came
        takes what it ranks first for.
        """
        before, fleet = self._members, self._fleet
        now = self._members = {w: w.info for w in fleet.workers.values() if w.accepting}
        self._pins_members = fleet.membership
        came = [w for w, info in now.items() if before.get(w) is not info]
        if not came and len(now) == len(before):
            return  # something else changed
        if len(came) > CAME_MAX:
            self._pins.clear()
        for key, (strategy, first) in list(self._pins.items()):
            if first is not None and now.get(first[2]) is not before[first[2]]:
                del self._pins[key]
            elif came:
                firsts = [each for each in (first, self._first(strategy, key[1], came)) if each is not None]
                self._pins[key] = Pin(strategy, min(firsts, default=None))
