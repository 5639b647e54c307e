"""Queued tasks, in the order in which they are dispatched: by priority, and then by task_id.

- A *resource class* has the tasks of one queue, priority and shape.
- A *backlog* has the resource classes of unpaused queues with the same strategy and shape, and, if the strategy is
  pinned (pins.py), the same worker. If no worker can take its first task, none can take the others. A backlog is
  *ready*, which means that dispatch tries it, or *blocked* until one of its workers changes.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

from multigpu_master.core.model import Queue, Shape, Task, Worker, shape_of
from multigpu_master.core.placement.pins import Pins
from multigpu_master.core.spec import Spec
from multigpu_master.core.strategy import Strategy

# put_back() compares a task only with this many tasks at the front of its class. If all of these are older, it inserts
# the task behind them, where it may precede still other older tasks.
SEARCHED_MAX = 64
# A class's deque, or a heap, with at most this many stale entries is not rebuilt.
STALE_MIN = 64


# Numbers of heap entries. All heaps share them, because an item may move from one heap to another.
_ENTRY_NUMBERS = itertools.count(1)
# The priority and the task_id of a first task.
Position = tuple[int, int]
ClassKey = tuple[str, int, Shape]  # ResourceClass.key
BacklogKey = tuple[str, Shape, Worker | None]  # Backlog.key


class _Item(Protocol):
    # The number of its entry in a heap; 0: it is in no heap.
    entry_number: int
    # The position that this entry has.
    entry_position: Position

    @property
    def position(self) -> Position: ...


I = TypeVar("I", bound=_Item)  # an item


class FirstTaskHeap(Generic[I]):
    """Resource classes, or backlogs, by the position of their first task."""

    __slots__ = ("_heap", "_items")

    def __init__(self) -> None:
        # (position, entry_number, item). An entry is stale unless its item has the same entry_number.
        self._heap: list[tuple[Position, int, I]] = []
        self._items = 0

    def update(self, item: I) -> None:
        """Adds an item, or moves it after a change of its position."""
        heap, before, position = self._heap, item.entry_number, item.position
        if before and item.entry_position == position:
            return
        item.entry_number, item.entry_position = next(_ENTRY_NUMBERS), position
        entry = position, item.entry_number, item
        if before and heap[0][1] == before:
            heapreplace(heap, entry)
            return
        heappush(heap, entry)
        self._items += not before
        if len(heap) > 2 * self._items + STALE_MIN:
            self._heap = [each for each in heap if each[2].entry_number == each[1]]
            heapify(self._heap)

    def remove(self, item: I) -> None:
        """Removes an item, if it is here."""
        self._items -= item.entry_number > 0
        item.entry_number = 0

    def first(self) -> I | None:
        heap = self._heap
        while heap:
            _, entry_number, item = heap[0]
            if item.entry_number == entry_number:
                return item
            heappop(heap)
        return None


class ResourceClass:
    """The waiting tasks of one queue, priority and shape, the oldest first. A task that ended while it waited leaves an
    entry, which is dropped when it comes first, or when most entries are of ended tasks.
    """

    __slots__ = ("backlog", "entry_number", "entry_position", "position", "priority", "queue", "shape", "size", "tasks")

    def __init__(self, queue: Queue, priority: int, shape: Shape) -> None:
        self.queue = queue
        self.priority = priority
        self.shape = shape
        self.tasks: deque[Task] = deque()
        self.size = 0  # waiting tasks
        self.position: Position = (priority, 0)
        self.backlog: Backlog | None = None  # None: nothing waits, or the queue is paused
        self.entry_number = 0  # in backlog.classes
        self.entry_position = self.position

    @property
    def key(self) -> ClassKey:
        return self.queue.name, self.priority, self.shape

    def head(self) -> Task | None:
        """The oldest waiting task."""
        tasks = self.tasks
        while tasks:
            if tasks[0].waiting:
                return tasks[0]
            tasks.popleft()
        return None

    def put_back(self, task: Task) -> None:
        """Inserts a task in the order of task_ids."""
        older: list[Task] = []
        while len(older) < SEARCHED_MAX and (head := self.head()) is not None and head.task_id < task.task_id:
            older.append(self.tasks.popleft())
        self.tasks.extendleft([task, *reversed(older)])

    def drop_ended(self, ending: Task) -> None:
        """Drops the entry of a task that ends now, if it is the first; else all stale entries, if most are stale."""
        if self.tasks[0] is ending:
            self.tasks.popleft()
        elif len(self.tasks) > 2 * self.size + STALE_MIN:
            self.tasks = deque([task for task in self.tasks if task.waiting and task is not ending])


class Backlog:
    """See the module."""

    __slots__ = (
        "classes", "entry_number", "entry_position", "model_blocked", "pin", "shape", "size", "strategy",
        "too_few_tasks",
    )  # fmt: skip

    def __init__(self, strategy: Strategy, shape: Shape, pin: Worker | None) -> None:
        self.strategy = strategy
        self.shape = shape  # without a partition
        self.pin = pin  # the only worker for its tasks, if the strategy is pinned and there is one
        self.classes: FirstTaskHeap[ResourceClass] = FirstTaskHeap()
        self.size = 0  # waiting tasks
        self.entry_number = 0  # in ResourceClasses.ready
        self.entry_position: Position = (0, 0)
        self.too_few_tasks = False  # a worker has room, but needs a larger backlog
        self.model_blocked = False  # a worker may not get these tasks now because of their model, see Block

    @property
    def key(self) -> BacklogKey:
        return self.strategy.name, self.shape, self.pin

    @property
    def position(self) -> Position:
        first = self.classes.first()
        assert first is not None, "a backlog has tasks"
        return first.position

    def head(self) -> Task | None:
        """The task to dispatch next."""
        first = self.classes.first()
        return first.head() if first is not None else None


class ResourceClasses:
    """All resource classes in which tasks wait, and their backlogs."""

    def __init__(self, strategy_of: Callable[[Queue], Strategy], pins: Pins) -> None:
        self._strategy_of = strategy_of
        self._pins = pins
        self.by_key: dict[ClassKey, ResourceClass] = {}
        self.backlogs: dict[BacklogKey, Backlog] = {}
        self.ready: FirstTaskHeap[Backlog] = FirstTaskHeap()
        self.blocked: dict[Backlog, dict[Worker, None]] = {}  # with the workers for which each waits
        self._shapes: dict[str, dict[Shape, int]] = {}  # queue -> shape without a partition -> resource classes

    # --- tasks -------------------------------------------------------------------------------------------------------

    def get(self, queue: Queue, spec: Spec, partition: int) -> ResourceClass:
        """The class of tasks of this spec and partition. A new class is stored when its first task is added."""
        shape = shape_of(spec, partition)
        found = self.by_key.get((queue.name, spec.priority, shape))
        return found if found is not None else ResourceClass(queue, spec.priority, shape)

    def too_many_shapes(self, spec: Spec, limit: int) -> bool:
        """Whether a task of this spec would add a shape to a queue that has at least `limit` shapes."""
        shapes = self._shapes.get(spec.queue, {})
        return len(shapes) >= limit and shape_of(spec) not in shapes

    def add(self, resource_class: ResourceClass, task: Task) -> None:
        """Adds a task that is younger than all others of its class."""
        resource_class.tasks.append(task)
        self._grow(resource_class)

    def put_back(self, resource_class: ResourceClass, task: Task) -> None:
        """Inserts a task in the order of task_ids."""
        resource_class.put_back(task)
        self._grow(resource_class)

    def first(self) -> tuple[Backlog, ResourceClass, Task] | None:
        """The first task of all ready backlogs, with its backlog and class; None: no backlog is ready."""
        backlog = self.ready.first()
        if backlog is None:
            return None
        resource_class = backlog.classes.first()
        assert resource_class is not None, "a backlog has tasks"
        return backlog, resource_class, resource_class.tasks[0]

    def pop_first(self, resource_class: ResourceClass) -> None:
        """Removes the task that `first` returned."""
        resource_class.tasks.popleft()
        self._shrink(resource_class)

    def remove_ended(self, resource_class: ResourceClass, task: Task) -> None:
        """Removes a waiting task that ends now."""
        resource_class.drop_ended(task)
        self._shrink(resource_class)

    def remove(self, resource_class: ResourceClass, task: Task) -> None:
        """Removes a waiting task that may come back. The time it takes grows with the number of older tasks."""
        resource_class.tasks.remove(task)
        self._shrink(resource_class)

    def _grow(self, resource_class: ResourceClass) -> None:
        """Counts a task that was added to the class."""
        resource_class.size += 1
        if resource_class.size == 1:
            self.by_key[resource_class.key] = resource_class
            shapes = self._shapes.setdefault(resource_class.queue.name, {})
            shape = resource_class.shape._replace(partition=-1)
            shapes[shape] = shapes.get(shape, 0) + 1
            if not resource_class.queue.paused:
                self._join_backlog(resource_class)
            return
        if resource_class.backlog is not None:
            self._enlarge(resource_class.backlog, resource_class, 1)

    def _enlarge(self, backlog: Backlog, resource_class: ResourceClass, count: int) -> None:
        """Adds `count` to the size of a class's backlog. Unblocks the backlog if it had too few tasks for a worker."""
        backlog.size += count
        self._reposition(backlog, resource_class)
        if backlog.too_few_tasks and backlog in self.blocked:
            self.unblock(backlog)

    def _shrink(self, resource_class: ResourceClass) -> None:
        """Subtracts a task that was removed from the class."""
        resource_class.size -= 1
        backlog = resource_class.backlog
        if resource_class.size:
            if backlog is not None:
                backlog.size -= 1
                self._reposition(backlog, resource_class)
            return
        if backlog is not None:
            backlog.size -= 1
            self._leave_backlog(resource_class)
        resource_class.tasks.clear()
        del self.by_key[resource_class.key]
        name, shape = resource_class.queue.name, resource_class.shape._replace(partition=-1)
        shapes = self._shapes[name]
        shapes[shape] -= 1
        if not shapes[shape]:
            del shapes[shape]
        if not shapes:
            del self._shapes[name]

    def _reposition(self, backlog: Backlog, resource_class: ResourceClass) -> None:
        """Moves a class, and its backlog, to the positions of their first tasks."""
        head = resource_class.head()
        assert head is not None, "it has tasks"
        if head.task_id != resource_class.position[1] or not resource_class.entry_number:
            resource_class.position = resource_class.priority, head.task_id
            backlog.classes.update(resource_class)
            if backlog not in self.blocked:
                self.ready.update(backlog)

    # --- backlogs ----------------------------------------------------------------------------------------------------

    def queued(self, strategy: Strategy, shape: Shape) -> int:
        """How many tasks of this shape (without partition) wait in unpaused queues with this strategy, which is not
        pinned.
        """
        backlog = self.backlogs.get((strategy.name, shape, None))
        return backlog.size if backlog is not None else 0

    def _join_backlog(self, resource_class: ResourceClass) -> None:
        """Adds a class to the backlog of its strategy, shape and pin."""
        strategy, shape = self._strategy_of(resource_class.queue), resource_class.shape
        pin = self._pin(strategy, shape)
        key = strategy.name, shape._replace(partition=-1) if shape.partition >= 0 else shape, pin
        backlog = self.backlogs.get(key)
        if backlog is None:
            backlog = self.backlogs[key] = Backlog(strategy, key[1], pin)
        resource_class.backlog = backlog
        self._enlarge(backlog, resource_class, resource_class.size)

    def _leave_backlog(self, resource_class: ResourceClass) -> None:
        """Removes a class from its backlog, if it is in one."""
        backlog, resource_class.backlog = resource_class.backlog, None
        if backlog is None:
            return
        backlog.classes.remove(resource_class)
        backlog.size -= resource_class.size
        if backlog.size:
            if backlog not in self.blocked:
                self.ready.update(backlog)
            return
        self.blocked.pop(backlog, None)
        self.ready.remove(backlog)
        del self.backlogs[backlog.key]

    def regroup(self, queue: str = "") -> None:
        """Call when a queue was paused or resumed, or has another strategy. "": all queues."""
        self._regroup([c for c in self.by_key.values() if queue in ("", c.queue.name)])

    def repin(self) -> None:
        """Call when the pins of pinned strategies may have changed."""
        pinned = [(c, c.backlog) for c in self.by_key.values() if c.backlog is not None and c.backlog.strategy.pinned]
        self._regroup([c for c, backlog in pinned if self._pin(backlog.strategy, c.shape) is not backlog.pin])

    def _pin(self, strategy: Strategy, shape: Shape) -> Worker | None:
        """The only worker for tasks of a shape, if the strategy is pinned; None: there is none, or tasks are gangs."""
        return self._pins.worker_for(strategy, shape) if strategy.pinned and shape.world_size == 1 else None

    def _regroup(self, changed: Iterable[ResourceClass]) -> None:
        for resource_class in changed:
            self._leave_backlog(resource_class)
            if not resource_class.queue.paused:
                self._join_backlog(resource_class)

    # --- blocked backlogs --------------------------------------------------------------------------------------------

    def block(self, backlog: Backlog, workers: dict[Worker, None]) -> None:
        """Blocks a backlog until one of the workers has changed, see Dispatcher."""
        self.ready.remove(backlog)
        self.blocked[backlog] = workers

    def unblock(self, backlog: Backlog) -> None:
        del self.blocked[backlog]
        self.ready.update(backlog)

    def unblock_for(self, changed: Iterable[Worker]) -> list[Backlog]:
        """Unblocks the backlogs that wait for one of these workers, and returns them."""
        unblocked = [b for b, workers in self.blocked.items() if not workers.keys().isdisjoint(changed)]
        for backlog in unblocked:
            self.unblock(backlog)
        return unblocked

    def unblock_all(self, *, only_too_few_tasks: bool = False) -> None:
        """Unblocks all backlogs, or only those for which a worker has room, but needs a larger backlog."""
        for backlog in [b for b in self.blocked if b.too_few_tasks or not only_too_few_tasks]:
            self.unblock(backlog)
