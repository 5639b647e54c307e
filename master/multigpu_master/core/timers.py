"""When something is due: callbacks at an instant, and the instants after which a task's wait is over.

A task's instants are small tuples, since a million tasks may have some. Most tasks end long before, so stale instants
are swept out whenever they could be half of all.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum
from heapq import heappop, heappush

from multigpu_master.core.model import Task
from multigpu_master.core.task_table import TaskTable

SWEEP_MIN = 1024
SWEEP_STEP = 4  # old instants that are looked at for each new one
FIRE_MAX = 256  # instants in one event


class Due(IntEnum):
    """What comes due for a task."""

    DEADLINE = 0
    QUEUE_TIMEOUT = 1
    RUN_TIMEOUT = 2


# (when_s, task_id, what)
Instant = tuple[float, int, Due]


class Timers:
    """Calls back in order of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._tickets = 0

    def at(self, when_s: float, callback: Callable[[float], None]) -> None:
        """Has `callback` called with the time, at when_s or soon after. Timers that it sets must be in the future."""
        self._tickets += 1
        heappush(self._heap, (when_s, self._tickets, callback))

    def fire(self, now: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= now:
            heappop(heap)[2](now)

    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None


class Expiries:
    """The instants of unsettled tasks.

    Both lists are heaps. Once half of the instants may be stale, they become the old ones, and each new instant takes a
    few of them over that still matter: no single event pays for all.
    """

    def __init__(self, tasks: TaskTable) -> None:
        self._tasks = tasks
        self._heap: list[Instant] = []
        self._old: list[Instant] = []
        self._sweep_at = SWEEP_MIN

    def at(self, when_s: float, task: Task, what: Due) -> None:
        heappush(self._heap, (when_s, task.task_id, what))
        old = self._old
        if not old:
            if len(self._heap) > self._sweep_at:
                self._old, self._heap = self._heap, []
            return
        for _ in range(min(SWEEP_STEP, len(old))):
            instant = old.pop()  # the last of a heap: the rest is still one
            if self._task(instant) is not None:
                heappush(self._heap, instant)
        if not old:
            self._sweep_at = 2 * len(self._heap) + SWEEP_MIN

    def due(self, now: float) -> Iterator[tuple[Task, Due]]:
        """What is due, but for an event's share at most: the rest remains due. Instants may be added meanwhile."""
        for _ in range(FIRE_MAX):
            heap = self._first()
            if not heap or heap[0][0] > now:
                return
            instant = heappop(heap)
            task = self._task(instant)
            if task is not None:
                yield task, instant[2]

    def next_s(self) -> float | None:
        heap = self._first()
        return heap[0][0] if heap else None

    def _first(self) -> list[Instant]:
        """The heap with the earlier instant."""
        heap, old = self._heap, self._old
        return old if old and (not heap or old[0] < heap[0]) else heap

    def _task(self, instant: Instant) -> Task | None:
        """The task of an instant, if it has not ended."""
        task = self._tasks.get(instant[1])
        return task if task is not None and task.outcome is None else None
