"""When something is due: callbacks at an instant, and the instants after which a task's wait is over.

A task's own instants are kept as small tuples, since a million tasks may have some; most tasks end long before, so
what is no longer of interest is swept out whenever it could be half of all.
"""

from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush

from multigpu_master.core.model import Task

SWEEP_MIN = 1024


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
    """The instants of tasks, by task_id; `due` hears of those whose task has not ended by then."""

    def __init__(self, tasks: dict[int, Task], due: Callable[[Task, Due, float], None]) -> None:
        self._tasks = tasks
        self._due = due
        self._heap: list[tuple[float, int, Due]] = []
        self._sweep_at = SWEEP_MIN

    def at(self, when_s: float, task: Task, what: Due) -> None:
        """Has `due` called at when_s, unless the task has ended."""
        heappush(self._heap, (when_s, task.task_id, what))
        if len(self._heap) > self._sweep_at:
            tasks = self._tasks
            self._heap = [e for e in self._heap if (t := tasks.get(e[1])) is not None and t.outcome is None]
            heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + SWEEP_MIN

    def fire(self, now: float) -> None:
        """Tells of what is due."""
        while self._heap and self._heap[0][0] <= now:
            _, task_id, what = heappop(self._heap)
            task = self._tasks.get(task_id)
            if task is not None and task.outcome is None:
                self._due(task, what, now)

    def next_s(self) -> float | None:
        """When the next instant is."""
        return self._heap[0][0] if self._heap else None
