"""Pins: the worker to which a pinned strategy assigns a shape."""

from collections.abc import Iterable

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.info import WorkerInfo

PINS_MAX = 16_384
# When more workers than this have joined since the last check of the pins, all pins are dropped, and computed again
# when they are next needed.
JOINED_MAX = 16


# A worker's (score, worker_id, worker): the lowest ranks first.
ScoredWorker = tuple[float, str, Worker]


class Pins:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # None: no accepting worker can get the tasks.
        self._pins: dict[tuple[Strategy, Shape], ScoredWorker | None] = {}
        # As of the last check of the pins: the accepting workers, and fleet.eligibility_changes (-1: no check yet).
        self._members: dict[Worker, WorkerInfo] = {}
        self._eligibility_changes = -1

    def worker_for(self, strategy: Strategy, shape: Shape) -> Worker | None:
        """The worker to which a pinned strategy assigns the shape, whether or not it has room now."""
        if self._eligibility_changes != self._fleet.eligibility_changes:
            self._move_pins()
        if len(self._pins) >= PINS_MAX:
            self._pins.clear()
        key = strategy, shape
        if key not in self._pins:
            self._pins[key] = self._first(strategy, shape, self._members)
        first = self._pins[key]
        return first[2] if first is not None else None

    def _first(self, strategy: Strategy, shape: Shape, workers: Iterable[Worker]) -> ScoredWorker | None:
        """The eligible worker that ranks first for the shape; None: there is none."""
        fleet = self._fleet
        eligible = fleet.eligible(shape._replace(partition=-1))  # its cache has one entry for all partitions
        able = [w for w in workers if w in eligible and strategy.excludes(shape, w, fleet) is None]
        return min([(strategy.score(shape, w, fleet), w.worker_id, w) for w in able], default=None)

    def _move_pins(self) -> None:
        """Adapts the pins to a changed fleet: removes pins to workers that no longer accept leases or have another
        info, and moves a pin to a worker that joined if that worker ranks first.
        """
        before, fleet = self._members, self._fleet
        now = self._members = {w: w.info for w in fleet.workers.values() if w.accepting}
        self._eligibility_changes = fleet.eligibility_changes
        joined = [w for w, info in now.items() if before.get(w) is not info]
        if not joined and len(now) == len(before):
            return  # no accepting worker joined, left or got another info
        if len(joined) > JOINED_MAX:
            self._pins.clear()
        for key, first in list(self._pins.items()):
            if first is not None and now.get(first[2]) is not before[first[2]]:
                del self._pins[key]
            elif joined:
                firsts = [each for each in (first, self._first(*key, joined)) if each is not None]
                self._pins[key] = min(firsts, default=None)
