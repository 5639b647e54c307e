"""Which task is next.

Tasks that are interchangeable for placement (same queue, priority and shape) stand in one lane, in order of age. The
lanes that may have something to dispatch stand in a heap by priority, then by the age of their first task. A lane
whose tasks no worker has room for is parked in a wait list with those that wait for the same; when that may have
changed only the first of the list is tried. Mostly they wait for room in a window, whatever queue and kind they are
of. So the cost of a dispatch depends neither on the number of tasks nor on that of lanes.

A task that leaves from the middle of a lane (cancelled, expired, adopted) leaves a hollow entry behind, which is
dropped when it comes to the front or when most of its part of the lane is hollow, or is filled again if the task comes
back first.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from multigpu_master.core.model import Queue, Shape, Spec, Task, Worker

if TYPE_CHECKING:
    from multigpu_master.core.placement.ranking import Ranking

K = TypeVar("K")

PARTITIONS = 4096
# How far into a lane a task that comes back is sorted in; beyond that, order among retries is not worth the time.
SORTED_IN = 64
# So many entries at the top of a wait list's heap are looked at for what is urgent.
TOP = 7
# Entries of a part of a lane; hollow entries of a wait list that are not worth a rebuild.
PART, HOLLOW_MIN = 1024, 64


def partition_of(key: str) -> int:
    """The partition of a partition_key; -1 for no key."""
    if not key:
        return -1
    return int.from_bytes(blake2b(key.encode(), digest_size=4).digest()) % PARTITIONS


def shape_of(spec: Spec, partition: int = -1) -> Shape:
    """What decides which workers may take a task of this spec."""
    return Shape(spec.kind, spec.model, spec.labels, spec.memory_bytes, partition)


class Crowd:
    """The lanes of one queue that differ only in priority and partition, and thus may wait for the same model."""

    __slots__ = ("base", "crowded", "lanes", "live", "ranking", "waits_to_grow")

    def __init__(self, base: Shape) -> None:
        self.base = base
        self.lanes = 0
        self.live = 0  # tasks that wait in them
        self.ranking: Ranking | None = None  # of the workers, by the strategy that was asked last
        self.crowded = False  # a worker has room in its window, but none for the model
        self.waits_to_grow = False  # a worker has room, but is not worth its loading for so few tasks


class Part:
    """A stretch of a lane: so short that it can be rebuilt within an event."""

    __slots__ = ("left", "tasks")

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()
        self.left = 0  # tasks that left an entry since the last rebuild, some of which may be back


class Lane:
    """Tasks of one queue, priority and shape, the oldest first."""

    __slots__ = ("base", "crowd", "live", "parts", "priority", "queue", "shape", "ticket", "waited_in")

    def __init__(self, queue: Queue, priority: int, shape: Shape, crowd: Crowd) -> None:
        self.queue = queue
        self.priority = priority
        self.shape = shape
        self.crowd = crowd
        self.base = crowd.base  # what decides for strategies that don't partition
        self.parts: deque[Part] = deque()
        self.live = 0  # entries that are not hollow
        self.ticket = 0  # of its entry in the heap that counts; 0: none does
        self.waited_in: WaitList | None = None  # where it is parked, or was last

    def key(self) -> tuple[str, int, Shape]:
        return self.queue.name, self.priority, self.shape

    def entries(self) -> Iterator[Task]:
        """Every task that has an entry, in order."""
        return chain.from_iterable(part.tasks for part in self.parts)

    def head(self) -> Task | None:
        """The oldest task that waits. Drops hollow entries before it."""
        parts = self.parts
        while parts:
            tasks = parts[0].tasks
            while tasks:
                task = tasks[0]
                if task.waiting:
                    return task
                task.part = None
                tasks.popleft()
            parts.popleft()
        return None

    def append(self, task: Task) -> None:
        """Makes an entry at the end."""
        parts = self.parts
        if not parts or len(parts[-1].tasks) >= PART:
            parts.append(Part())
        part = task.part = parts[-1]
        part.tasks.append(task)

    def prepend(self, task: Task) -> None:
        """Makes an entry at the front."""
        parts = self.parts
        if not parts or len(parts[0].tasks) >= PART:
            parts.appendleft(Part())
        part = task.part = parts[0]
        part.tasks.appendleft(task)

    def pop(self) -> Task:
        """Takes off the first entry, which is the head's."""
        task = self.parts[0].tasks.popleft()
        task.part = None
        return task

    def clear(self) -> None:
        """Drops all entries."""
        for task in self.entries():
            task.part = None
        self.parts.clear()

    def hollow(self, task: Task) -> None:
        """A task that waits leaves its entry."""
        part = task.part
        assert part is not None, "it has one"
        part.left += 1
        tasks = part.tasks
        if 2 * part.left > len(tasks):
            part.left = 0
            for _ in range(len(tasks)):
                each = tasks.popleft()
                if each.waiting and each is not task:
                    tasks.append(each)
                else:
                    each.part = None


class WaitList:
    """Parked lanes that wait for the same, so that none of them finds a worker where the first finds none."""

    __slots__ = ("heap", "home", "key", "workers")

    def __init__(self, home: "dict[Any, WaitList]", key: object, workers: dict[Worker, None]) -> None:
        self.home = home
        self.key = key
        self.workers = workers  # of `windows`: one of these must have room
        self.heap: list[tuple[int, int, int, Lane]] = []  # as the heap of those to try


class Lanes:
    """Every lane, the heap of those to try, and those parked."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, int, Shape], Lane] = {}
        self.parked: dict[Lane, int] = {}  # the ticket of its entry in a wait list
        # Wait lists: for room in a window of any of some workers (by the id of these), in that of the worker to which
        # the tasks are pinned, or for whatever else tasks of a shape may wait (by strategy, shape and the worker to
        # which they are pinned), or for more tasks of their crowd.
        self.windows: dict[int, WaitList] = {}
        self.pins: dict[Worker, WaitList] = {}
        self.others: dict[tuple[str, Shape, Worker | None], WaitList] = {}
        self.growths: dict[Crowd, WaitList] = {}
        self._crowds: dict[tuple[str, Shape], Crowd] = {}
        self._crowds_of: dict[str, int] = {}  # how many crowds a queue has
        self._heap: list[tuple[int, int, int, Lane]] = []  # (priority, task_id of the head, ticket, lane)
        self._tickets = 0

    def lane_of(self, queue: Queue, spec: Spec, partition: int) -> Lane:
        """The lane for tasks of this spec and partition. A new one counts once a task stands in it."""
        shape = shape_of(spec, partition)
        key = (queue.name, spec.priority, shape)
        lane = self.by_key.get(key)
        if lane is None:
            base = shape._replace(partition=-1)
            lane = Lane(queue, spec.priority, shape, self._crowds.get((queue.name, base)) or Crowd(base))
        return lane

    def too_many_shapes(self, queue: str, spec: Spec, most: int) -> bool:
        """Whether a task of this spec would be of more than so many different shapes in its queue."""
        return self._crowds_of.get(queue, 0) >= most and (queue, shape_of(spec)) not in self._crowds

    def add(self, lane: Lane, task: Task) -> None:
        """Puts a new task, the youngest of all, at the end of its lane."""
        lane.append(task)
        self._grow(lane)
        if lane.live == 1:
            self.offer(lane)

    def put_back(self, lane: Lane, task: Task) -> None:
        """Puts a task that left back to its place of age."""
        self._grow(lane)
        if task.part is None:
            older: list[Task] = []
            while len(older) < SORTED_IN and (head := lane.head()) is not None and head.task_id < task.task_id:
                older.append(lane.pop())
            for each in (task, *reversed(older)):
                lane.prepend(each)
        self.offer(lane)

    def offer(self, lane: Lane) -> None:
        """Has a lane in which something waits tried again, at the place of its present head."""
        self.parked.pop(lane, None)
        head = lane.head()
        assert head is not None, "something waits in it"
        self._tickets += 1
        lane.ticket = self._tickets
        heappush(self._heap, (lane.priority, head.task_id, lane.ticket, lane))

    def offer_anew(self, lane: Lane) -> None:
        """Has a lane tried again that may wait for something else than it did."""
        offered = lane.ticket
        waiting, lane.waited_in = lane.waited_in, None
        if not offered:
            self.offer(lane)
        elif waiting is not None:
            self.offer_first(waiting)  # it was to be tried for those that wait with it

    def offer_all(self) -> None:
        """Has every parked lane tried again."""
        heap, tickets = self._heap, self._tickets
        for lane in self.parked:
            head = lane.head()
            assert head is not None, "something waits in it"
            tickets += 1
            lane.ticket, lane.waited_in = tickets, None
            heap.append((lane.priority, head.task_id, tickets, lane))
        heapify(heap)
        self._tickets = tickets
        self.parked.clear()
        for lists in (self.windows, self.pins, self.others, self.growths):
            lists.clear()

    def offer_first(self, waiting: WaitList) -> None:
        """Has the first lane of a wait list tried again. If it fails so would the rest, which thus may stay where they
        are; if it succeeds, `granted` sees to the next one.
        """
        first = self._first_of(waiting)
        if first is not None:
            heappop(waiting.heap)
            self.offer(first[3])
        if not waiting.heap and waiting.home.get(waiting.key) is waiting:
            del waiting.home[waiting.key]

    def granted(self, lane: Lane) -> None:
        """The head of the lane that came first was taken: the next to try is the first of those that waited with it.
        So one lane of a wait list is tried at a time, however many there are.
        """
        head, waiting = lane.head(), lane.waited_in
        if head is None:
            self._forget(lane)
        elif waiting is not None and (first := self._first_of(waiting)) is not None:
            entry = lane.priority, head.task_id, lane.ticket, lane
            if entry < first:
                return
            lane.ticket, self.parked[lane] = 0, lane.ticket
            heapreplace(waiting.heap, entry)
            self.offer(first[3])

    def _first_of(self, waiting: WaitList) -> tuple[int, int, int, Lane] | None:
        """The entry of a wait list's first lane, which is at the top of its heap then."""
        heap = waiting.heap
        while heap:
            priority, task_id, ticket, lane = heap[0]
            if self.parked.get(lane) != ticket:
                heappop(heap)
                continue
            head = lane.head()
            assert head is not None, "an empty lane is not parked"
            if head.task_id == task_id:
                return heap[0]
            heapreplace(heap, (priority, head.task_id, ticket, lane))
        return None

    def waiting_first(self) -> Iterator[Lane]:
        """Of each wait list the first lane, and some of those after it: they may be of other shapes."""
        for waiting in (*self.windows.values(), *self.others.values(), *self.growths.values()):
            if self._first_of(waiting) is not None:
                top = sorted(waiting.heap[:TOP])
                yield from [lane for _, _, ticket, lane in top if self.parked.get(lane) == ticket]

    def first(self) -> tuple[Lane, Task] | None:
        """The lane to try next, and its head."""
        heap = self._heap
        while heap:
            priority, task_id, ticket, lane = heap[0]
            if ticket != lane.ticket:
                heappop(heap)
                continue
            head = lane.head()
            assert head is not None, "an empty lane is not offered"
            if head.task_id != task_id:
                heapreplace(heap, (priority, head.task_id, ticket, lane))
                if heap[0][2] != ticket:
                    continue
            return lane, head
        return None

    def take(self, lane: Lane) -> None:
        """Takes the head off the lane that came first."""
        lane.pop()
        lane.live -= 1
        lane.crowd.live -= 1

    def leave(self, lane: Lane, task: Task) -> None:
        """A task that waits in a lane leaves from where it stands."""
        lane.hollow(task)
        lane.live -= 1
        lane.crowd.live -= 1
        if lane.live == 0:
            self.parked.pop(lane, None)
            lane.clear()
            self._forget(lane)

    def forget_queues(self, queues: Iterable[Queue]) -> None:
        """Drops the lanes of queues in which nothing waits."""
        names = {queue.name for queue in queues}
        for lane in [lane for lane in self.by_key.values() if lane.queue.name in names]:
            self.parked.pop(lane, None)
            self._forget(lane)

    def park(
        self, lane: Lane, lists: dict[K, WaitList], key: K, workers: dict[Worker, None] | None = None
    ) -> None:  # fmt: skip
        """Sets aside the lane that came first, in one of the wait lists."""
        waiting = lists.get(key)
        if waiting is None:
            waiting = lists[key] = WaitList(lists, key, workers or {})
        entry = self._set_aside(lane, waiting)
        heappush(waiting.heap, entry)
        if len(waiting.heap) > 2 * len(self.parked) + HOLLOW_MIN:
            waiting.heap = [e for e in waiting.heap if self.parked.get(e[3]) == e[2]]
            heapify(waiting.heap)

    def pause(self, lane: Lane) -> None:
        """Sets aside the lane that came first until all are offered."""
        self._set_aside(lane, None)

    def _set_aside(self, lane: Lane, waiting: WaitList | None) -> tuple[int, int, int, Lane]:
        entry = heappop(self._heap)
        lane.ticket = 0
        self.parked[lane] = entry[2]
        before, lane.waited_in = lane.waited_in, waiting
        if before is not None and before is not waiting:
            self.offer_first(before)  # what it waits for now is not what they wait for
        return entry

    def _grow(self, lane: Lane) -> None:
        """Another task waits in the lane."""
        crowd = lane.crowd
        lane.live += 1
        crowd.live += 1
        if lane.live == 1 and lane.key() not in self.by_key:
            self.by_key[lane.key()] = lane
            crowd.lanes += 1
            if crowd.lanes == 1:
                self._crowds[lane.queue.name, crowd.base] = crowd
                self._crowds_of[lane.queue.name] = self._crowds_of.get(lane.queue.name, 0) + 1
        if crowd.waits_to_grow:
            crowd.waits_to_grow = False
            if (waiting := self.growths.get(crowd)) is not None:
                self.offer_first(waiting)

    def _forget(self, lane: Lane) -> None:
        assert lane.live == 0, "nothing waits in a lane that is forgotten"
        offered, lane.ticket = lane.ticket, 0
        waiting, lane.waited_in = lane.waited_in, None
        if self.by_key.pop(lane.key(), None) is not None:
            lane.crowd.lanes -= 1
            if not lane.crowd.lanes:
                del self._crowds[lane.queue.name, lane.base]
                self._crowds_of[lane.queue.name] -= 1
                if not self._crowds_of[lane.queue.name]:
                    del self._crowds_of[lane.queue.name]
        if offered and waiting is not None:
            self.offer_first(waiting)  # it was to be tried for those that wait with it
