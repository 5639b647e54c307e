"""Chooses the worker of a task, for strategies that compare workers (pins.py is for pinned strategies)."""

from collections.abc import Collection
from heapq import heappop, heappush
from typing import NamedTuple

from multigpu_master.core.model import Worker
from multigpu_master.core.placement.obstacles import blocked_now, free_if_short, is_one_of
from multigpu_master.core.placement.resource_classes import Backlog
from multigpu_master.core.workers.fleet import Fleet

# Why a worker may not get the tasks now.
NO_OBSTACLE = 0
EXCLUDED = 1
NO_ROOM_FOR_MODEL = 2


class Place(NamedTuple):
    """A worker's place among the candidates: the lowest gets the task. The worker_id breaks ties, so that no two Worker
    objects are compared.
    """

    score: float
    last_dispatch: int
    worker_id: str
    version: int  # the worker's, when the place was computed
    worker: Worker
    obstacle: int


class Candidates:
    """The workers that may get tasks of a backlog, the lowest score first. Valid while no worker gains room, at most
    for one event. If the first worker of the heap has changed (a lease was granted), best() computes its score again;
    other changed workers keep their old scores until they come first.

    `among`: the workers that may have gained room after the backlog was blocked; only these are compared. None:
    compares all workers, and resets the flags `too_few_tasks` and `no_room_for_model` of the backlog. Sets these flags
    when workers are left out for these reasons.

    `places` has workers' places from earlier events, for the same strategy and shape. A place is valid until its
    worker's version changes. The caller drops all places when the fleet's members or averages change.
    """

    __slots__ = ("_backlog", "_fleet", "_heap", "_places", "looked_at")

    def __init__(
        self, fleet: Fleet, backlog: Backlog, places: dict[Worker, Place], among: Collection[Worker] | None = None
    ) -> None:
        self._fleet = fleet
        self._backlog = backlog
        self._places = places
        self._heap: list[Place] = []
        with_room, eligible = fleet.with_room, fleet.eligible(backlog.shape)
        if among is None:
            backlog.too_few_tasks = backlog.no_room_for_model = False
            among, _ = sorted((with_room, eligible), key=len)
        for worker in among:
            if worker in with_room and worker in eligible:
                self._rank(worker)
        self.looked_at = len(among)

    def best(self) -> Worker | None:
        """The worker for the backlog's first task; None: no worker may get it now."""
        heap, fleet, backlog = self._heap, self._fleet, self._backlog
        strategy, shape = backlog.strategy, backlog.shape
        while heap:
            worker = heap[0].worker
            if heap[0].version != worker.version:
                heappop(heap)
                if worker in fleet.with_room:
                    self._rank(worker)
            elif strategy.min_backlog(shape, worker, fleet) <= backlog.size or fleet.reserved(worker, shape):
                return worker
            else:
                heappop(heap)
                backlog.too_few_tasks = True
        return None

    def _rank(self, worker: Worker) -> None:
        """Adds a worker to the heap, unless it may not get the backlog's tasks now."""
        place = self._places.get(worker)
        if place is None or place.version != worker.version:
            place = self._places[worker] = self._place(worker)
        if place.obstacle == NO_OBSTACLE:
            heappush(self._heap, place)
        elif place.obstacle == NO_ROOM_FOR_MODEL:
            self._backlog.no_room_for_model = True

    def _place(self, worker: Worker) -> Place:
        fleet, strategy, shape = self._fleet, self._backlog.strategy, self._backlog.shape
        score, obstacle = 0.0, NO_OBSTACLE
        if free_if_short(worker, shape) is not None or strategy.excludes(shape, worker, fleet) is not None:
            obstacle = EXCLUDED
        elif fleet.models_by_id and fleet.model_block(worker, shape) is not None:
            obstacle = NO_ROOM_FOR_MODEL
        else:
            score = strategy.score(shape, worker, fleet)
        return Place(score, worker.last_dispatch, worker.worker_id, worker.version, worker, obstacle)


def others_and_best(fleet: Fleet, backlog: Backlog, avoided: tuple[str, ...]) -> tuple[list[Worker], Worker | None]:
    """Returns the eligible and accepting workers, except those that `avoided` (device_keys and worker_ids) names; and
    of these, the worker with the lowest score that may get a task now (None: there is none).
    """
    strategy, shape = backlog.strategy, backlog.shape
    others = [w for w in fleet.eligible(shape) if w.accepting and not is_one_of(w, avoided)]
    free = [w for w in others if not w.full and not blocked_now(fleet, strategy, shape, w)]
    first = min(free, key=lambda w: (strategy.score(shape, w, fleet), w.last_dispatch), default=None)
    return others, first
