"""`Timers` runs callbacks. `Expiries` yields the tasks that have passed one of their time limits.

An expiry is a small tuple, because a million tasks may have several expiries each. Most tasks end before their time
limits. So a sweep, which removes the expiries of ended tasks in small steps, begins each time the number of expiries
has doubled since the last sweep.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum
from heapq import heappop, heappush

from multigpu_master.core.model import Task
from multigpu_master.core.task_table import TaskTable

SWEEP_MIN = 1024  # fewer expiries are not swept
SWEEP_STEP = 4  # expiries that a sweep checks whenever an expiry is added
# Limit of due expiries that one event handles; also of ephemeral outcomes whose result_ttl is over, and of overdue
# tasks that dispatch ends.
DUE_MAX = 256


class TimeLimit(IntEnum):
    """A time limit of a task."""

    DEADLINE = 0
    QUEUE_TIMEOUT = 1
    RUN_TIMEOUT = 2


# When the time limit passes (seconds since 1970), the task_id, and which time limit.
Expiry = tuple[float, int, TimeLimit]


class Timers:
    """Runs callbacks in order of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []  # (when_s, tie, callback)
        self._next_tie = 0  # different for each timer, so that no two callbacks are compared

    def at(self, when_s: float, callback: Callable[[float], None]) -> None:
        """Calls callback(now) at when_s or later. A callback that sets a timer must set it for later than `now`: fire()
        runs all due timers.
        """
        self._next_tie += 1
        heappush(self._heap, (when_s, self._next_tie, callback))

    def fire(self, now: float) -> None:
        """Runs the due callbacks."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            heappop(heap)[2](now)

    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None


class Expiries:
    """The expiries of unsettled tasks.

    A sweep removes the expiries of settled tasks in small steps, so that no event takes long. The heap becomes `_old`
    when it has more than `_sweep_at` expiries. Then each call of `at` takes up to SWEEP_STEP expiries from `_old`, and
    moves those of unsettled tasks to the new heap.
    """

    def __init__(self, tasks: TaskTable) -> None:
        self._tasks = tasks
        self._heap: list[Expiry] = []
        self._old: list[Expiry] = []
        self._sweep_at = SWEEP_MIN

    def at(self, when_s: float, task: Task, limit: TimeLimit) -> None:
        heappush(self._heap, (when_s, task.task_id, limit))
        old = self._old
        if not old:
            if len(self._heap) > self._sweep_at:
                self._old, self._heap = self._heap, []
            return
        for _ in range(min(SWEEP_STEP, len(old))):
            expiry = old.pop()  # a heap without its last item is still a heap
            if self._task(expiry) is not None:
                heappush(self._heap, expiry)
        if not old:
            self._sweep_at = 2 * len(self._heap) + SWEEP_MIN

    def due(self, now: float) -> Iterator[tuple[float, Task, TimeLimit]]:
        """Removes at most DUE_MAX due expiries; call it again for the others. Yields the time, task and time limit of
        each, unless the task is settled. The caller may add expiries meanwhile.
        """
        for _ in range(DUE_MAX):
            heap = self._first()
            if not heap or heap[0][0] > now:
                return
            expiry = heappop(heap)
            task = self._task(expiry)
            if task is not None:
                yield expiry[0], task, expiry[2]

    def next_s(self) -> float | None:
        heap = self._first()
        return heap[0][0] if heap else None

    def _first(self) -> list[Expiry]:
        """Of the two heaps, the one with the earliest expiry."""
        heap, old = self._heap, self._old
        return old if old and (not heap or old[0] < heap[0]) else heap

    def _task(self, expiry: Expiry) -> Task | None:
        """The task of an expiry; None: the task is settled."""
        task = self._tasks.get(expiry[1])
        return task if task is not None and task.outcome is None else None
