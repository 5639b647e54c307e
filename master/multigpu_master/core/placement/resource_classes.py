"""Queued tasks that are interchangeable for placement: of one queue, priority and shape, the oldest first.

A task that is removed from the middle (cancelled, expired, adopted) leaves a hollow entry. The entry is dropped when it
is the first or when most of its stretch is hollow; before that, a task that is put back fills its entry again.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from multigpu_master.core.model import Queue, Shape, Stretch, Task, Worker
from multigpu_master.core.placement.ranking import Ranking

# Entries of a stretch.
STRETCH = 1024
# A task that is put back is sorted in among this many first tasks; behind them, retries may be out of order.
SORTED_IN = 64


class Backlog:
    """The resource classes of one queue that differ only in priority and partition: their tasks need the same model."""

    __slots__ = ("base", "classes", "no_room_for_model", "ranking", "size", "waits_to_grow")

    def __init__(self, base: Shape) -> None:
        self.base = base  # without a partition
        self.classes = 0
        self.size = 0  # queued tasks
        self.ranking: Ranking | None = None  # of the workers, by the last strategy used
        self.no_room_for_model = False  # a worker has room in its window, but none for the model
        self.waits_to_grow = False  # a worker has room, but needs a larger backlog


class ResourceClass:
    __slots__ = ("backlog", "base", "priority", "queue", "shape", "size", "stretches", "ticket", "wait_list")

    def __init__(self, queue: Queue, priority: int, shape: Shape, backlog: Backlog) -> None:
        self.queue = queue
        self.priority = priority
        self.shape = shape
        self.backlog = backlog
        self.base = backlog.base  # the shape for strategies that don't partition
        self.stretches: deque[Stretch] = deque()
        self.size = 0  # entries that are not hollow
        self.ticket = 0  # of its valid entry in the heap of offered classes; 0: it has none
        self.wait_list: WaitList | None = None  # where it is parked, or was last

    def key(self) -> tuple[str, int, Shape]:
        return self.queue.name, self.priority, self.shape

    def entries(self) -> Iterator[Task]:
        """The tasks of all entries, hollow ones too, in order."""
        return chain.from_iterable(stretch.tasks for stretch in self.stretches)

    def head(self) -> Task | None:
        """The oldest waiting task. Drops the hollow entries before it."""
        stretches = self.stretches
        while stretches:
            tasks = stretches[0].tasks
            while tasks:
                task = tasks[0]
                if task.waiting:
                    return task
                task.stretch = None
                tasks.popleft()
            stretches.popleft()
        return None

    def append(self, task: Task) -> None:
        stretches = self.stretches
        if not stretches or len(stretches[-1].tasks) >= STRETCH:
            stretches.append(Stretch())
        stretch = task.stretch = stretches[-1]
        stretch.tasks.append(task)

    def put_back(self, task: Task) -> None:
        """Reinserts a task in the order of task_ids."""
        if task.stretch is not None:
            return  # its hollow entry is filled again
        older: list[Task] = []
        while len(older) < SORTED_IN and (head := self.head()) is not None and head.task_id < task.task_id:
            older.append(self.pop())
        for each in (task, *reversed(older)):
            self._prepend(each)

    def _prepend(self, task: Task) -> None:
        stretches = self.stretches
        if not stretches or len(stretches[0].tasks) >= STRETCH:
            stretches.appendleft(Stretch())
        stretch = task.stretch = stretches[0]
        stretch.tasks.appendleft(task)

    def pop(self) -> Task:
        """Removes and returns the head. Call it right after `head` only."""
        task = self.stretches[0].tasks.popleft()
        task.stretch = None
        return task

    def clear(self) -> None:
        for task in self.entries():
            task.stretch = None
        self.stretches.clear()

    def hollow(self, task: Task) -> None:
        """Makes the entry of a waiting task hollow."""
        stretch = task.stretch
        assert stretch is not None, "a waiting task has an entry"
        stretch.left += 1
        tasks = stretch.tasks
        if 2 * stretch.left > len(tasks):
            stretch.left = 0
            for _ in range(len(tasks)):
                each = tasks.popleft()
                if each.waiting and each is not task:
                    tasks.append(each)
                else:
                    each.stretch = None


# (priority, task_id of the head, ticket, class)
Entry = tuple[int, int, int, ResourceClass]


class WaitList:
    """Parked classes blocked by the same condition: if the first class finds no worker, none does. They wait until one
    of `workers` changes or, without a `shape`, has room in its window.
    """

    __slots__ = ("heap", "home", "key", "shape", "workers")

    def __init__(
        self, home: "dict[Any, WaitList]", key: object, workers: dict[Worker, None], shape: Shape | None
    ) -> None:  # fmt: skip
        self.home = home
        self.key = key
        self.workers = workers
        self.shape = shape
        self.heap: list[Entry] = []
