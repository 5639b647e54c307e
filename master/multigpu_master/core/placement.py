"""Which worker gets a task: a ranking for each strategy and shape, kept in a heap.

A ranking holds (score, last dispatch, worker) for every worker that may have a task of its shape now. Scores change
only when a worker changes, and the fleet logs that; a ranking reads on in the log, pushes the changed workers again,
and skips entries whose worker has changed since. A dispatch costs a few heap operations, whatever the size of the
fleet.
"""

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from multigpu_master.core.fleet import Fleet
from multigpu_master.core.lanes import Lane
from multigpu_master.core.model import Shape, Worker

if TYPE_CHECKING:
    from multigpu_master.strategies.base import Strategy

RANKINGS_MAX = 1024
PINS_MAX = 16_384


def busy(fleet: Fleet, strategy: "Strategy", shape: Shape, worker: Worker) -> list[str]:
    """Why an eligible worker can't have a task of this shape right now; empty if it can."""
    why = []
    if not worker.session:
        why.append("lost")
    if worker.cordoned:
        why.append(f"cordoned: {worker.cordon_reason}" if worker.cordon_reason else "cordoned")
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
    if (own := strategy.excludes(shape, worker, fleet)) is not None:
        why.append(own)
    return why


def short_of_memory(worker: Worker, shape: Shape) -> int | None:
    """The worker's free device memory, in bytes, if it is too little for the shape; None: it will do or is unknown."""
    if not shape.memory_bytes:
        return None
    free = worker.memory_free_bytes()
    if free is None:
        return None
    free -= worker.leased_memory_bytes
    return free if free < shape.memory_bytes else None


class Ranking:
    """The workers that may have a task of one shape now, by one strategy's score."""

    __slots__ = ("_averages", "_cursor", "_fleet", "_heap", "_members", "_pushed", "_shape", "_strategy", "_ties")

    def __init__(self, fleet: Fleet, strategy: "Strategy", shape: Shape) -> None:
        self._fleet = fleet
        self._strategy = strategy
        self._shape = shape
        self._heap: list[tuple[float, int, int, int, Worker]] = []  # (score, last dispatch, version, tie, worker)
        self._pushed: dict[Worker, int] = {}  # the version under which a worker was looked at last
        self._members = -1
        self._averages = -1
        self._cursor = 0
        self._ties = 0

    def best(self, queued: int) -> Worker | None:
        """The worker that ranks first among those worth it for `queued` tasks; None if none may have one now."""
        self._catch_up()
        heap, worth = self._heap, self._strategy.worth
        passed_over: list[tuple[float, int, int, int, Worker]] = []
        best = None
        while heap:
            worker = heap[0][4]
            if heap[0][2] != worker.version:
                heappop(heap)
            elif worth(self._shape, worker, self._fleet, queued):
                best = worker
                break
            else:
                passed_over.append(heappop(heap))
        for entry in passed_over:
            heappush(heap, entry)
        return best

    def has_room(self) -> bool:
        """Whether any worker could have a task, worth it or not. Only right after `best`."""
        return bool(self._heap)

    def _catch_up(self) -> None:
        fleet = self._fleet
        end = fleet.changes_base + len(fleet.changes)
        anew = self._members != fleet.membership or self._averages != fleet.averages
        if anew or self._cursor < fleet.changes_base:
            self._heap.clear()
            self._pushed.clear()
            for worker in fleet.eligible(self._shape):
                self._look_at(worker)
            self._members = fleet.membership
            self._averages = fleet.averages
        else:
            eligible = fleet.eligible(self._shape)
            for i in range(self._cursor - fleet.changes_base, len(fleet.changes)):
                worker = fleet.changes[i]
                if worker in eligible and self._pushed.get(worker) != worker.version:
                    self._look_at(worker)
        self._cursor = end

    def _look_at(self, worker: Worker) -> None:
        self._pushed[worker] = worker.version
        if not worker.accepting or worker.full:
            return
        if short_of_memory(worker, self._shape) is not None:
            return
        if self._strategy.excludes(self._shape, worker, self._fleet) is not None:
            return
        score = self._strategy.score(self._shape, worker, self._fleet)
        heap = self._heap
        self._ties += 1
        heappush(heap, (score, worker.last_dispatch, worker.version, self._ties, worker))
        if len(heap) > 64 + 4 * len(self._pushed):
            # Mostly stale entries that never came to the top.
            heap[:] = [e for e in heap if e[2] == e[4].version]
            heapify(heap)


class Placement:
    """Every ranking in use, and for pinned strategies every shape's worker."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._rankings: dict[tuple[str, Shape], Ranking] = {}
        self._pins: dict[tuple[str, Shape], Worker | None] = {}
        self._pins_members = -1

    def choose(self, strategy: "Strategy", lane: Lane) -> Worker | None:
        """The worker for the next of a lane's tasks; None if it must wait."""
        if strategy.pinned:
            worker = self.pin(strategy, lane.shape)
            if worker is None or worker.full or short_of_memory(worker, lane.shape) is not None:
                return None
            return worker
        shape = lane.base
        key = (strategy.name, shape)
        ranking = self._rankings.get(key)
        if ranking is None:
            if len(self._rankings) >= RANKINGS_MAX:
                self._rankings.clear()
            ranking = self._rankings[key] = Ranking(self._fleet, strategy, shape)
        worker = ranking.best(lane.crowd.live)
        lane.crowd.waits_to_grow = worker is None and ranking.has_room()
        return worker

    def pin(self, strategy: "Strategy", shape: Shape) -> Worker | None:
        """The one worker that a pinned strategy gives the shape to, with or without room."""
        fleet = self._fleet
        if self._pins_members != fleet.membership or len(self._pins) >= PINS_MAX:
            self._pins.clear()
            self._pins_members = fleet.membership
        key = (strategy.name, shape)
        if key not in self._pins:
            base = shape._replace(partition=-1)
            able = [w for w in fleet.eligible(base) if w.accepting and strategy.excludes(shape, w, fleet) is None]
            self._pins[key] = min(able, key=lambda w: (strategy.score(shape, w, fleet), w.worker_id), default=None)
        return self._pins[key]
