"""Chooses the worker of a task.

Most strategies use a ranking of the workers for each shape. A pinned strategy assigns each shape to one worker (a pin).
"""

from collections.abc import Iterable
from typing import NamedTuple

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.placement.obstacles import is_one_of, obstructed, short_of_memory
from multigpu_master.core.placement.ranking import Ranking
from multigpu_master.core.placement.resource_classes import Backlog, ResourceClass
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.info import WorkerInfo

RANKINGS_MAX = 1024
PINS_MAX = 16_384
# At most this many workers with room in their windows are compared one by one, without a ranking.
FEW = 4
# When more workers than this join at once, all pins are dropped, and computed again when they are next needed.
JOINED_MAX = 16


class Pin(NamedTuple):
    """The worker to which a pinned strategy assigns a shape."""

    strategy: Strategy
    first: tuple[float, str, Worker] | None  # (score, worker_id, worker); None: no accepting worker is eligible


class Placement:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._rankings: dict[tuple[str, Shape], Ranking] = {}
        self._pins: dict[tuple[str, Shape], Pin] = {}
        self._pins_members = -1
        self._members: dict[Worker, WorkerInfo] = {}  # accepting workers when the pins were last checked

    def choose(self, strategy: Strategy, resource_class: ResourceClass) -> Worker | None:
        """The worker for the next task of a class; None if it must wait."""
        if strategy.pinned:
            worker = self.pin(strategy, resource_class.shape)
            if worker is None or worker.full or short_of_memory(worker, resource_class.shape) is not None:
                return None
            return worker if self._fleet.blocked(worker, resource_class.shape) is None else None
        backlog = resource_class.backlog
        if len(self._fleet.open) <= FEW:
            return self._of_few(strategy, backlog)
        ranking = backlog.ranking
        if ranking is None or ranking.strategy is not strategy:
            ranking = backlog.ranking = self._ranking(strategy, backlog.base)
        worker = ranking.best(backlog.size)
        backlog.no_room_for_model = bool(ranking.no_room_for_model)
        backlog.waits_to_grow = worker is None and ranking.has_room()
        return worker

    def _of_few(self, strategy: Strategy, backlog: Backlog) -> Worker | None:
        """The first worker in the ranking's order, found by comparing all workers with room. With few workers this
        costs less than a ranking for each of many shapes.
        """
        fleet, shape = self._fleet, backlog.base
        able, best, first, backlog.no_room_for_model, aside = fleet.eligible(shape), None, (0.0, 0), False, False
        for worker in fleet.open:
            if worker not in able or (shape.memory_bytes and short_of_memory(worker, shape) is not None):
                continue
            if strategy.excludes(shape, worker, fleet) is not None:
                continue
            if fleet.planned and fleet.blocked(worker, shape) is not None:
                backlog.no_room_for_model = True
            elif strategy.min_backlog(shape, worker, fleet) > backlog.size and not fleet.reserved(worker, shape):
                aside = True
            else:
                rank = strategy.score(shape, worker, fleet), worker.last_dispatch
                if best is None or rank < first:
                    best, first = worker, rank
        backlog.waits_to_grow = best is None and aside
        return best

    def elsewhere(
        self, strategy: Strategy, backlog: Backlog, avoided: tuple[str, ...]
    ) -> tuple[list[Worker], Worker | None]:
        """The eligible, accepting workers that are not `avoided` (device_keys and worker_ids), and the first in rank of
        those that may get a task now.
        """
        fleet, shape = self._fleet, backlog.base
        others = [w for w in fleet.eligible(shape) if w.accepting and not is_one_of(w, avoided)]
        free = [w for w in others if not w.full and not obstructed(fleet, strategy, shape, w)]
        first = min(free, key=lambda w: (strategy.score(shape, w, fleet), w.last_dispatch), default=None)
        return others, first

    def _ranking(self, strategy: Strategy, shape: Shape) -> Ranking:
        key = (strategy.name, shape)
        ranking = self._rankings.get(key)
        if ranking is None:
            if len(self._rankings) >= RANKINGS_MAX:
                self._rankings.clear()
            ranking = self._rankings[key] = Ranking(self._fleet, strategy, shape)
        return ranking

    # --- pinned strategies -------------------------------------------------------------------------------------------

    def pin(self, strategy: Strategy, shape: Shape) -> Worker | None:
        """The worker to which a pinned strategy assigns the shape, whether or not it has room now."""
        if self._pins_members != self._fleet.membership:
            self._move_pins()
        if len(self._pins) >= PINS_MAX:
            self._pins.clear()
        key = (strategy.name, shape)
        pin = self._pins.get(key)
        if pin is None:
            pin = self._pins[key] = Pin(strategy, self._first(strategy, shape, self._members))
        return pin.first[2] if pin.first is not None else None

    def _first(self, strategy: Strategy, shape: Shape, workers: Iterable[Worker]) -> tuple[float, str, Worker] | None:
        """The (score, worker_id, worker) of the eligible worker that ranks first for the shape; None: there is none."""
        fleet = self._fleet
        eligible = fleet.eligible(shape._replace(partition=-1))
        able = [w for w in workers if w in eligible and strategy.excludes(shape, w, fleet) is None]
        return min([(strategy.score(shape, w, fleet), w.worker_id, w) for w in able], default=None)

    def _move_pins(self) -> None:
        """Adapts the pins to a changed fleet: removes pins to workers that left, and moves a pin to a worker that
        joined if that worker ranks first.
        """
        before, fleet = self._members, self._fleet
        now = self._members = {w: w.info for w in fleet.workers.values() if w.accepting}
        self._pins_members = fleet.membership
        joined = [w for w, info in now.items() if before.get(w) is not info]
        if not joined and len(now) == len(before):
            return  # none joined or left
        if len(joined) > JOINED_MAX:
            self._pins.clear()
        for key, (strategy, first) in list(self._pins.items()):
            if first is not None and now.get(first[2]) is not before[first[2]]:
                del self._pins[key]
            elif joined:
                firsts = [each for each in (first, self._first(strategy, key[1], joined)) if each is not None]
                self._pins[key] = Pin(strategy, min(firsts, default=None))
