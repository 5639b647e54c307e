"""Which task is next.

Tasks that are interchangeable for placement (same queue, priority and shape) stand in one lane, in order of age. The
lanes that may have something to dispatch stand in a heap by priority, then by the age of their first task. A lane
whose tasks no worker has room for is parked in a lot with those that wait for the same; when that may have changed only
the first of the lot is tried. So the cost of a dispatch depends neither on the number of tasks nor on that of lanes.

A task that leaves from the middle of a lane (cancelled, expired, adopted) leaves a hollow entry behind, which is
dropped when it comes to the front or when too many are, or is filled again if the task comes back first.
"""

from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from multigpu_master.core.model import Queue, Shape, Spec, Task, Worker

if TYPE_CHECKING:
    from multigpu_master.core.placement import Ranking

PARTITIONS = 4096
# How far into a lane a task that comes back is sorted in; beyond that, order among retries is not worth the time.
SORTED_IN = 64
# Hollow entries that are not worth a rebuild of their lane.
HOLLOW_MIN = 64


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

    __slots__ = ("base", "lanes", "live", "ranking", "waits_to_grow")

    def __init__(self, base: Shape) -> None:
        self.base = base
        self.lanes = 0
        self.live = 0  # tasks that wait in them
        self.ranking: Ranking | None = None  # of the workers, by the strategy that was asked last
        self.waits_to_grow = False  # a worker has room, but is not worth its loading for so few tasks


class Lane:
    """Tasks of one queue, priority and shape, the oldest first."""

    __slots__ = ("base", "crowd", "live", "priority", "queue", "shape", "tasks", "ticket")

    def __init__(self, queue: Queue, priority: int, shape: Shape, crowd: Crowd) -> None:
        self.queue = queue
        self.priority = priority
        self.shape = shape
        self.crowd = crowd
        self.base = crowd.base  # what decides for strategies that don't partition
        self.tasks: deque[Task] = deque()
        self.live = 0  # entries that are not hollow
        self.ticket = 0  # of its entry in the heap that counts; 0: none does

    def key(self) -> tuple[str, int, Shape]:
        return self.queue.name, self.priority, self.shape

    def keep_if(self, wanted: Callable[[Task], bool]) -> None:
        """Drops the other entries."""
        kept: deque[Task] = deque()
        for task in self.tasks:
            task.in_lane = wanted(task)
            if task.in_lane:
                kept.append(task)
        self.tasks = kept

    def head(self) -> Task | None:
        """The oldest task that waits. Drops hollow entries before it."""
        tasks = self.tasks
        while tasks:
            task = tasks[0]
            if task.waiting:
                return task
            task.in_lane = False
            tasks.popleft()
        return None


class Lot:
    """Parked lanes of a crowd that wait for the same thing: room on any worker, or on the one to which they belong."""

    __slots__ = ("heap",)

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, int, Lane]] = []  # as the heap of those to try


class Lanes:
    """Every lane, the heap of those to try, and those parked."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, int, Shape], Lane] = {}
        self.parked: dict[Lane, int] = {}  # the ticket of its entry in a lot
        self.lots: dict[Crowd, dict[Worker | None, Lot]] = {}
        self._crowds: dict[tuple[str, Shape], Crowd] = {}
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

    def add(self, lane: Lane, task: Task) -> None:
        """Puts a new task, the youngest of all, at the end of its lane."""
        task.in_lane = True
        lane.tasks.append(task)
        self._grow(lane)
        if lane.live == 1:
            self.offer(lane)

    def put_back(self, lane: Lane, task: Task) -> None:
        """Puts a task that left back to its place of age."""
        self._grow(lane)
        if not task.in_lane:
            task.in_lane = True
            older: list[Task] = []
            tasks = lane.tasks
            while tasks and len(older) < SORTED_IN and tasks[0].task_id < task.task_id:
                older.append(tasks.popleft())
            tasks.appendleft(task)
            tasks.extendleft(reversed(older))
        self.offer(lane)

    def offer(self, lane: Lane) -> None:
        """Has a lane tried again, at the place of its present head. Forgets it if nothing waits in it."""
        self.parked.pop(lane, None)
        head = lane.head()
        if head is None:
            self._forget(lane)
            return
        self._tickets += 1
        lane.ticket = self._tickets
        heappush(self._heap, (lane.priority, head.task_id, lane.ticket, lane))

    def offer_all(self) -> None:
        """Has every parked lane tried again."""
        for lane in list(self.parked):
            self.offer(lane)
        self.lots.clear()

    def offer_next(self, crowd: Crowd, worker: Worker | None) -> None:
        """Has the first lane of a lot tried again. If it fails so would the rest, which thus may stay where they are;
        if it succeeds the next one is to be offered.
        """
        lots = self.lots.get(crowd, {})
        lot = lots.get(worker)
        if lot is None:
            return
        heap = lot.heap
        while heap:
            priority, task_id, ticket, lane = heap[0]
            if self.parked.get(lane) != ticket:
                heappop(heap)
                continue
            head = lane.head()
            assert head is not None, "an empty lane is not parked"
            if head.task_id == task_id:
                heappop(heap)
                self.offer(lane)
                break
            heapreplace(heap, (priority, head.task_id, ticket, lane))
        if not heap:
            del lots[worker]
            if not lots:
                del self.lots[crowd]

    def first(self) -> tuple[Lane, Task] | None:
        """The lane to try next, and its head."""
        heap = self._heap
        while heap:
            priority, task_id, ticket, lane = heap[0]
            if ticket != lane.ticket:
                heappop(heap)
                continue
            head = lane.head()
            if head is None:
                heappop(heap)
                self._forget(lane)
            else:
                if head.task_id != task_id:
                    heapreplace(heap, (priority, head.task_id, ticket, lane))
                    if heap[0][2] != ticket:
                        continue
                return lane, head
        return None

    def take(self, lane: Lane) -> None:
        """Takes the head off the lane that came first."""
        lane.tasks.popleft().in_lane = False
        lane.live -= 1
        lane.crowd.live -= 1

    def leave(self, lane: Lane) -> None:
        """A task that waits in a lane leaves from where it stands. Its entry is hollow now; the lane is rebuilt before
        most of it is.
        """
        lane.live -= 1
        lane.crowd.live -= 1
        if lane.live == 0:
            self.parked.pop(lane, None)
            lane.keep_if(lambda _task: False)
            self._forget(lane)
        elif len(lane.tasks) > 2 * lane.live + HOLLOW_MIN:
            lane.keep_if(lambda other: other.waiting)

    def forget_queues(self, queues: Iterable[Queue]) -> None:
        """Drops the lanes of queues in which nothing waits."""
        names = {queue.name for queue in queues}
        for lane in [lane for lane in self.by_key.values() if lane.queue.name in names]:
            self.parked.pop(lane, None)
            self._forget(lane)

    def park(self, lane: Lane, worker: Worker | None) -> None:
        """Sets aside the lane that came first, for want of room on this worker, or on any."""
        entry = heappop(self._heap)
        lane.ticket = 0
        self.parked[lane] = entry[2]
        lots = self.lots.setdefault(lane.crowd, {})
        lot = lots.get(worker)
        if lot is None:
            lot = lots[worker] = Lot()
        heappush(lot.heap, entry)
        if len(lot.heap) > 2 * len(self.parked) + HOLLOW_MIN:
            lot.heap = [e for e in lot.heap if self.parked.get(e[3]) == e[2]]
            heapify(lot.heap)

    def _grow(self, lane: Lane) -> None:
        """Another task waits in the lane."""
        crowd = lane.crowd
        lane.live += 1
        crowd.live += 1
        if lane.live == 1:
            if lane.key() not in self.by_key:
                self.by_key[lane.key()] = lane
                crowd.lanes += 1
            self._crowds[lane.queue.name, crowd.base] = crowd
        if crowd.waits_to_grow:
            crowd.waits_to_grow = False
            self.offer_next(crowd, None)

    def _forget(self, lane: Lane) -> None:
        assert lane.live == 0, "nothing waits in a lane that is forgotten"
        lane.ticket = 0
        if self.by_key.pop(lane.key(), None) is not None:
            lane.crowd.lanes -= 1
            if not lane.crowd.lanes:
                del self._crowds[lane.queue.name, lane.base]
