"""The workers that may get a task of one shape now, by one strategy's score, in a heap.

A score changes only when its worker changes, and the fleet logs that. A ranking reads new entries of the log, pushes
the changed workers again, and skips heap entries whose worker has changed since. Workers that need a larger backlog are
in a second heap. So a dispatch costs a few heap operations, whatever the size of the fleet.
"""

from heapq import heapify, heappop, heappush

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.placement.obstacles import short_of_memory
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.workers.fleet import Fleet

# (score, last dispatch, version, tie, worker)
Entry = tuple[float, int, int, int, Worker]


class Ranking:
    __slots__ = (
        "_aside", "_averages", "_cursor", "_fleet", "_heap", "_members", "_pushed", "_resident", "_shape", "_ties",
        "no_room_for_model", "strategy",
    )  # fmt: skip

    def __init__(self, fleet: Fleet, strategy: Strategy, shape: Shape) -> None:
        self._fleet = fleet
        self.strategy = strategy
        self._shape = shape
        self._heap: list[Entry] = []
        self._aside: list[tuple[int, int, Entry]] = []  # (backlog that suffices, tie, entry)
        self._resident = 0  # workers that had the model when `_aside` got its first entry
        self._pushed: dict[Worker, int] = {}  # the version under which a worker was ranked last
        self._members = -1
        self._averages = -1
        self._cursor = 0
        self._ties = 0
        self.no_room_for_model: dict[Worker, None] = {}  # workers with room in their windows only

    def best(self, queued: int) -> Worker | None:
        """The first in rank of the workers for which `queued` tasks suffice; None if no worker may get a task now."""
        self._catch_up()
        heap, fleet, shape, min_backlog = self._heap, self._fleet, self._shape, self.strategy.min_backlog
        if self._aside:
            self._bring_back(queued)
        while heap:
            worker = heap[0][4]
            if heap[0][2] != worker.version:
                heappop(heap)
                continue
            needed = min_backlog(shape, worker, fleet)
            if needed <= queued or fleet.reserved(worker, shape):
                return worker
            self._set_aside(heappop(heap), needed)
        return None

    def has_room(self) -> bool:
        """Whether a larger backlog would give a task to a worker. Call it right after `best` returned None only."""
        aside = self._aside
        while aside and aside[0][2][2] != aside[0][2][4].version:
            heappop(aside)
        return bool(aside)

    def _set_aside(self, entry: Entry, needed: int) -> None:
        """Keeps an entry until its worker's backlog suffices."""
        aside = self._aside
        if not aside:
            self._resident = self._fleet.resident_workers(self._shape)
        heappush(aside, (needed, entry[3], entry))
        if len(aside) > 64 + 4 * len(self._pushed):
            aside[:] = [e for e in aside if e[2][2] == e[2][4].version]
            heapify(aside)

    def _bring_back(self, queued: int) -> None:
        """Returns the entries to the heap for which the backlog may suffice now."""
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
            self.no_room_for_model.clear()
            for worker in fleet.eligible(self._shape):
                self._rank(worker)
            self._members = fleet.membership
            self._averages = fleet.averages
        else:
            pushed = self._pushed  # has every eligible worker
            for worker in fleet.changes[self._cursor - fleet.changes_base :]:
                if pushed.get(worker, worker.version) != worker.version:
                    self._rank(worker)
        self._cursor = end

    def _rank(self, worker: Worker) -> None:
        self._pushed[worker] = worker.version
        if self.no_room_for_model:
            self.no_room_for_model.pop(worker, None)
        if not worker.accepting or worker.full:
            return
        if short_of_memory(worker, self._shape) is not None:
            return
        if self.strategy.excludes(self._shape, worker, self._fleet) is not None:
            return
        if self._fleet.planned and self._fleet.blocked(worker, self._shape) is not None:
            self.no_room_for_model[worker] = None
            return
        score = self.strategy.score(self._shape, worker, self._fleet)
        heap = self._heap
        self._ties += 1
        heappush(heap, (score, worker.last_dispatch, worker.version, self._ties, worker))
        if len(heap) > 64 + 4 * len(self._pushed):
            # Mostly stale entries that never came to the top.
            heap[:] = [e for e in heap if e[2] == e[4].version]
            heapify(heap)
