"""When something is due: callbacks at an instant, and the instants after which a task's wait is over.

A task's own instants are kept as small tuples, since a million tasks may have some; most tasks end long before, so
what is no longer of interest is swept out whenever it could be half of all.
"""

from collections.abc import Callable
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


class Timers:
    """Calls back in order of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._tickets = 0

    def at(self, when_s: float, what: Callable[[float], None]) -> None:
        """Has `what` called with the time, at when_s or soon after. What it arms in turn must lie in the future."""
        self._tickets += 1
        heappush(self._heap, (when_s, self._tickets, what))

    def fire(self, now: float) -> None:
        """Calls what is due."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            heappop(heap)[2](now)

    def next_s(self) -> float | None:
        """When the next call is due."""
        return self._heap[0][0] if self._heap else None


class Expiries:
    """The instants of tasks, by task_id; `due` hears of those whose task has not ended by then.

    Both lists are heaps. Once half of the instants may be of tasks that have ended, they become the old ones, and each
    new instant takes a few of them over that still matter: no event pays for all.
    """

    def __init__(self, tasks: TaskTable, due: Callable[[Task, Due, float], None]) -> None:
        self._tasks = tasks
        self._due = due
        self._heap: list[tuple[float, int, Due]] = []
        self._old: list[tuple[float, int, Due]] = []
        self._sweep_at = SWEEP_MIN

    def at(self, when_s: float, task: Task, what: Due) -> None:
        """Has `due` called at when_s, unless the task has ended."""
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

    def fire(self, now: float) -> None:
        """Tells of what is due: of so much that an event stays short. The rest is due at once."""
        if not self._heap and not self._old:
            return
        for _ in range(FIRE_MAX):
            heap = self._first()
            if not heap or heap[0][0] > now:
                return
            instant = heappop(heap)
            task = self._task(instant)
            if task is not None:
                self._due(task, instant[2], now)

    def next_s(self) -> float | None:
        """When the next instant is."""
        heap = self._first() if self._old else self._heap
        return heap[0][0] if heap else None

    def _first(self) -> list[tuple[float, int, Due]]:
        """The heap with the earlier instant."""
        heap, old = self._heap, self._old
        return old if old and (not heap or old[0] < heap[0]) else heap

    def _task(self, instant: tuple[float, int, Due]) -> Task | None:
        """The task of an instant, if it has not ended."""
        task = self._tasks.get(instant[1])
        return task if task is not None and task.outcome is None else None
