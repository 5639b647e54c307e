"""Decides, for strategies that compare workers, which workers may get a task now, and which of these gets it. Explains
why a worker may not get a task. Dispatch, recall and explain use it. (pins.py is for pinned strategies.)
"""

from collections.abc import Collection
from heapq import heappop, heappush
from typing import NamedTuple

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.placement.resource_classes import Backlog
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.residency import Block

# Why a worker may not get a task now. EXCLUDED: by the strategy, or because it has too little device memory.
NO_OBSTACLE, EXCLUDED, NO_ROOM_FOR_MODEL = range(3)
# Limit of the models that an explanation names.
NAMED_MAX = 8


def insufficient_free_bytes(worker: Worker, shape: Shape) -> int | None:
    """The device memory that is left for one more lease, in bytes, if it is too little for the shape: the reported free
    memory, minus what the worker's leases require. None: it is enough, or unknown.
    """
    if not shape.memory_bytes:
        return None
    free = worker.memory_free_bytes()
    if free is None:
        return None
    if shape.world_size > 1:  # a rank is its worker's only lease, so all other models can be unloaded
        residency = worker.residency
        own = residency.id_of_name.get(shape.model, shape.model)
        free += sum([model.memory_bytes for model in residency.reported.values() if model.model != own])
    free -= worker.leased_memory_bytes
    return free if free < shape.memory_bytes else None


def obstacle_now(fleet: Fleet, strategy: Strategy, shape: Shape, worker: Worker) -> int:
    """Returns what keeps an eligible, accepting worker from getting a task of this shape now: EXCLUDED,
    NO_ROOM_FOR_MODEL or NO_OBSTACLE.
    """
    if insufficient_free_bytes(worker, shape) is not None or strategy.excludes(shape, worker, fleet) is not None:
        return EXCLUDED
    if fleet.any_offered_by_id and fleet.model_block(worker, shape) is not None:
        return NO_ROOM_FOR_MODEL
    return NO_OBSTACLE


def backlog_suffices(fleet: Fleet, strategy: Strategy, shape: Shape, worker: Worker, queued: int) -> bool:
    """Whether `queued` tasks are enough for the worker to get one, or it has a load reservation for their model."""
    return strategy.min_backlog(shape, worker, fleet) <= queued or fleet.reserved(worker, shape)


def is_one_of(worker: Worker, named: tuple[str, ...]) -> bool:
    """Whether a worker, or its device, is among these worker_ids and device_keys."""
    return worker.device_key in named or worker.worker_id in named


def obstacles(fleet: Fleet, strategy: Strategy, shape: Shape, worker: Worker) -> list[str]:
    """Why an eligible worker can't get a task of this shape now, as texts for people. Does not consider the size of the
    backlog, pins, and devices on which the task broke an engine.
    """
    why = []
    if not worker.session:
        why.append("lost")
    if worker.cordon is not None:
        why.append(f"cordoned: {worker.cordon.reason}" if worker.cordon.reason else "cordoned")
    if worker.quarantined:
        why.append(f"quarantined: {_illness(worker)}")
    if worker.draining:
        why.append("draining")
    if worker.stopping:
        why.append("stopping")
    if worker.leases_limit is not None and len(worker.leases) >= worker.leases_limit:
        task_id = next((lease.task.task_id for lease in worker.leases.values() if lease.gang is not None), 0)
        why.append(f"runs a rank of task {task_id}" if task_id else "reserved for a task that several workers run")
    if worker.window_full:
        leases, allowed = len(worker.leases), worker.pace.leases_max
        if worker.shares:
            why.append(f"window full ({leases} leases)")
        elif leases > allowed:
            why.append(f"window full ({leases} leases; the limit was lowered to {allowed})")
        else:
            why.append(f"window full ({leases} of {allowed} leases)")
    if worker.leased_bytes >= worker.info.window_bytes:
        why.append(f"window full ({worker.leased_bytes} of {worker.info.window_bytes} bytes)")
    if (free := insufficient_free_bytes(worker, shape)) is not None:
        why.append(f"{shape.memory_bytes} bytes of device memory required, its leases leave {max(0, free)}")
    if (block := fleet.model_block(worker, shape)) is not None:
        why.append(_describe_block(fleet, worker, shape, block))
    if (excluded := strategy.excludes(shape, worker, fleet)) is not None:
        why.append(excluded)
    return why


def _describe_block(fleet: Fleet, worker: Worker, shape: Shape, block: Block) -> str:
    residency, model = worker.residency, fleet.model_id(worker, shape.kind, shape.model)
    if block is not Block.NO_ROOM:
        return f"model {model}: {block.value}"
    others = sorted(m for m in residency.in_use() if m != model)
    named = ", ".join(others[:NAMED_MAX]) + (", ..." if len(others) > NAMED_MAX else "")
    needed, limit = residency.memory_of(model), residency.limit_bytes
    return f"no room for model {model}: it needs {needed} of {limit} bytes, and {named} are in use"


def _illness(worker: Worker) -> str:
    reasons = [reason.message or reason.code for reason in worker.health.reasons]
    if worker.check_open:
        asked = "an operator asked for a check" if worker.check_at_once else "different tasks failed on it"
        reasons.append(f"{asked}, and its device has not passed a check yet")
    return "; ".join(reasons) or "its device is being checked"


class Place(NamedTuple):
    """A worker's place among the candidates: the lowest gets the task. The worker_id breaks ties, so that no two Worker
    objects are compared.
    """

    score: float
    newest_lease_number: int
    worker_id: str
    change_count: int  # the worker's, when the place was computed
    worker: Worker
    obstacle: int


class Candidates:
    """The workers that may get tasks of a backlog, the lowest score first. Valid while no worker gains room, at most
    for one event. If the first worker of the heap has changed (a lease was granted), best() computes its score again;
    other changed workers keep their old scores until they come first.

    `among`: the workers that may have gained room after the backlog was blocked; only these are compared. None:
    compares all workers, and resets the flags `too_few_tasks` and `model_blocked` of the backlog. Sets these flags
    when workers are left out for these reasons.

    `places` has workers' places from earlier events, for the same strategy and shape. A place is valid until its
    worker's change_count changes. The caller drops all places when the fleet's eligible workers or estimates change.
    """

    __slots__ = ("_backlog", "_fleet", "_heap", "_places", "compared")

    def __init__(
        self, fleet: Fleet, backlog: Backlog, places: dict[Worker, Place], among: Collection[Worker] | None = None
    ) -> None:
        self._fleet = fleet
        self._backlog = backlog
        self._places = places
        self._heap: list[Place] = []
        with_room, eligible = fleet.with_room, fleet.eligible(backlog.shape)
        if among is None:
            backlog.too_few_tasks = backlog.model_blocked = False
            among, _ = sorted((with_room, eligible), key=len)
        for worker in among:
            if worker in with_room and worker in eligible:
                self._add(worker)
        self.compared = len(among)

    def best(self) -> Worker | None:
        """The worker for the backlog's first task; None: no worker may get it now."""
        heap, fleet, backlog = self._heap, self._fleet, self._backlog
        strategy, shape = backlog.strategy, backlog.shape
        while heap:
            worker = heap[0].worker
            if heap[0].change_count != worker.change_count:
                heappop(heap)
                if worker in fleet.with_room:
                    self._add(worker)
            elif backlog_suffices(fleet, strategy, shape, worker, backlog.size):
                return worker
            else:
                heappop(heap)
                backlog.too_few_tasks = True
        return None

    def _add(self, worker: Worker) -> None:
        """Adds a worker to the heap, unless it may not get the backlog's tasks now."""
        place = self._places.get(worker)
        if place is None or place.change_count != worker.change_count:
            place = self._places[worker] = self._place(worker)
        if place.obstacle == NO_OBSTACLE:
            heappush(self._heap, place)
        elif place.obstacle == NO_ROOM_FOR_MODEL:
            self._backlog.model_blocked = True

    def _place(self, worker: Worker) -> Place:
        fleet, strategy, shape = self._fleet, self._backlog.strategy, self._backlog.shape
        obstacle = obstacle_now(fleet, strategy, shape, worker)
        score = strategy.score(shape, worker, fleet) if obstacle == NO_OBSTACLE else 0.0
        return Place(score, worker.newest_lease_number, worker.worker_id, worker.change_count, worker, obstacle)


def allowed_and_best(fleet: Fleet, backlog: Backlog, avoided: tuple[str, ...]) -> tuple[list[Worker], Worker | None]:
    """Returns the eligible and accepting workers, except those that `avoided` (device_keys and worker_ids) names; and
    of these, the worker with the lowest score that may get a task now (None: there is none).
    """
    strategy, shape = backlog.strategy, backlog.shape
    allowed = [w for w in fleet.eligible(shape) if w.accepting and not is_one_of(w, avoided)]
    free = [w for w in allowed if not w.full and not obstacle_now(fleet, strategy, shape, w)]
    first = min(free, key=lambda w: (strategy.score(shape, w, fleet), w.newest_lease_number), default=None)
    return allowed, first
