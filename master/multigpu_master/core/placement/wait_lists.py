"""Which task is next.

The resource classes that may have something to dispatch are *offered*: they stand in a heap by priority, then by the
age of their first task. A class for whose tasks no worker has room is *parked* in a wait list, with those that wait for
the same; when that may have changed, only the first class of the list is offered. Most wait for room in a window,
whatever their queue and kind. So the cost of a dispatch depends neither on the number of tasks nor on that of classes.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeVar

from multigpu_master.core.model import Queue, Shape, Spec, Task, Worker, shape_of
from multigpu_master.core.placement.resource_classes import Backlog, Entry, ResourceClass, WaitList

K = TypeVar("K")

# Entries at the top of a wait list's heap that are searched for urgent tasks.
TOP = 7
# Stale entries of a wait list that are not worth a rebuild.
STALE_MIN = 64


class ResourceClasses:
    """All resource classes: the offered ones and the parked ones. See the module."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, int, Shape], ResourceClass] = {}
        self.parked: dict[ResourceClass, int] = {}  # the ticket of its entry in a wait list
        # Wait lists: for room in a window of any of some workers (by the id of these), or of the worker to which the
        # tasks are pinned; for anything else (by what its classes have in common).
        self.windows: dict[int, WaitList] = {}
        self.pins: dict[Worker, WaitList] = {}
        self.others: dict[Backlog | tuple[str, Shape, Worker | None], WaitList] = {}
        self._backlogs: dict[tuple[str, Shape], Backlog] = {}
        self._backlogs_of: dict[str, int] = {}  # how many backlogs a queue has
        self._heap: list[Entry] = []
        self._tickets = 0

    # --- tasks -------------------------------------------------------------------------------------------------------

    def get(self, queue: Queue, spec: Spec, partition: int) -> ResourceClass:
        """The class of tasks of this spec and partition. A new one is kept once a task is added."""
        shape = shape_of(spec, partition)
        found = self.by_key.get((queue.name, spec.priority, shape))
        if found is None:
            base = shape._replace(partition=-1)
            backlog = self._backlogs.get((queue.name, base)) or Backlog(base)
            found = ResourceClass(queue, spec.priority, shape, backlog)
        return found

    def too_many_shapes(self, spec: Spec, limit: int) -> bool:
        """Whether a task of this spec would add a shape to a queue that has `limit` shapes or more."""
        full = self._backlogs_of.get(spec.queue, 0) >= limit
        return full and (spec.queue, shape_of(spec)) not in self._backlogs

    def add(self, resource_class: ResourceClass, task: Task) -> None:
        resource_class.append(task)
        self._grow(resource_class)
        if resource_class.size == 1:
            self.offer(resource_class)

    def put_back(self, resource_class: ResourceClass, task: Task) -> None:
        """Puts a task that left back to its place of age."""
        self._grow(resource_class)
        resource_class.put_back(task)
        self.offer(resource_class)

    def take(self, resource_class: ResourceClass) -> None:
        """Takes the head off the class that came first."""
        resource_class.stretches[0].tasks.popleft().stretch = None
        resource_class.size -= 1
        resource_class.backlog.size -= 1

    def leave(self, resource_class: ResourceClass, task: Task) -> None:
        """A task that waits leaves from where it stands."""
        resource_class.hollow(task)
        resource_class.size -= 1
        resource_class.backlog.size -= 1
        if resource_class.size == 0:
            self.parked.pop(resource_class, None)
            resource_class.clear()
            self._forget(resource_class)

    def forget_queues(self, queues: Iterable[Queue]) -> None:
        """Drops the classes of queues in which nothing waits."""
        names = {queue.name for queue in queues}
        for resource_class in [c for c in self.by_key.values() if c.queue.name in names]:
            self.parked.pop(resource_class, None)
            self._forget(resource_class)

    def _grow(self, resource_class: ResourceClass) -> None:
        """Another task waits in the class."""
        backlog = resource_class.backlog
        resource_class.size += 1
        backlog.size += 1
        if resource_class.size == 1 and resource_class.key() not in self.by_key:
            self.by_key[resource_class.key()] = resource_class
            backlog.classes += 1
            if backlog.classes == 1:
                queue = resource_class.queue.name
                self._backlogs[queue, backlog.base] = backlog
                self._backlogs_of[queue] = self._backlogs_of.get(queue, 0) + 1
        if backlog.waits_to_grow:
            backlog.waits_to_grow = False
            if (wait_list := self.others.get(backlog)) is not None:
                self.offer_first(wait_list)

    def _forget(self, resource_class: ResourceClass) -> None:
        assert resource_class.size == 0, "nothing waits in a class that is forgotten"
        offered, resource_class.ticket = resource_class.ticket, 0
        wait_list, resource_class.wait_list = resource_class.wait_list, None
        if self.by_key.pop(resource_class.key(), None) is not None:
            backlog, queue = resource_class.backlog, resource_class.queue.name
            backlog.classes -= 1
            if not backlog.classes:
                del self._backlogs[queue, backlog.base]
                self._backlogs_of[queue] -= 1
                if not self._backlogs_of[queue]:
                    del self._backlogs_of[queue]
        if offered and wait_list is not None:
            self.offer_first(wait_list)  # it was offered on behalf of its wait list

    # --- offered classes ---------------------------------------------------------------------------------------------

    def first(self) -> tuple[ResourceClass, Task] | None:
        """The class to try next, and its head."""
        heap = self._heap
        while heap:
            priority, task_id, ticket, resource_class = heap[0]
            if ticket != resource_class.ticket:
                heappop(heap)
                continue
            head = resource_class.head()
            assert head is not None, "an empty class is not offered"
            if head.task_id != task_id:
                heapreplace(heap, (priority, head.task_id, ticket, resource_class))
                if heap[0][2] != ticket:
                    continue
            return resource_class, head
        return None

    def offer(self, resource_class: ResourceClass) -> None:
        """Has a class in which something waits tried again, at the place of its present head."""
        self.parked.pop(resource_class, None)
        heappush(self._heap, self._ticketed(resource_class))

    def _ticketed(self, resource_class: ResourceClass) -> Entry:
        """A new entry for the heap of offered classes."""
        head = resource_class.head()
        assert head is not None, "something waits in it"
        self._tickets += 1
        resource_class.ticket = self._tickets
        return resource_class.priority, head.task_id, self._tickets, resource_class

    def offer_anew(self, resource_class: ResourceClass) -> None:
        """Has a class tried again that may wait for something else than before."""
        offered = resource_class.ticket
        wait_list, resource_class.wait_list = resource_class.wait_list, None
        if not offered:
            self.offer(resource_class)
        elif wait_list is not None:
            self.offer_first(wait_list)  # it was offered on behalf of its wait list

    def offer_all(self) -> None:
        """Has every parked class tried again."""
        for resource_class in self.parked:
            resource_class.wait_list = None
            self._heap.append(self._ticketed(resource_class))
        heapify(self._heap)
        for parked in (self.parked, self.windows, self.pins, self.others):
            parked.clear()

    def offer_freed(self, freed: dict[Worker, None], open_: dict[Worker, None], *, averages_moved: bool) -> None:
        """Offers what may be dispatched now that these workers changed, of which the open ones have room."""
        roomy = [worker for worker in freed if worker in open_]
        for worker in roomy:
            if (wait_list := self.pins.get(worker)) is not None:
                self.offer_first(wait_list)
        for wait_list in list(self.windows.values()):
            if not wait_list.workers.keys().isdisjoint(roomy):
                self.offer_first(wait_list)
        for wait_list in list(self.others.values()):
            # Whether a backlog suffices may depend on the averages.
            if averages_moved or not freed.keys().isdisjoint(wait_list.workers.keys()):
                self.offer_first(wait_list)

    def offer_first(self, wait_list: WaitList) -> None:
        """Has the first class of a wait list tried again. If it fails, so would the rest, which stay parked; if it
        succeeds, `granted` offers the next one.
        """
        first = self._first_of(wait_list)
        if first is not None:
            heappop(wait_list.heap)
            self.offer(first[3])
        if not wait_list.heap and wait_list.home.get(wait_list.key) is wait_list:
            del wait_list.home[wait_list.key]

    def granted(self, resource_class: ResourceClass) -> None:
        """The head of the class that came first was taken: the next to try is the first of those that waited with it.
        So one class of a wait list is tried at a time, however many there are.
        """
        head, wait_list = resource_class.head(), resource_class.wait_list
        if head is None:
            self._forget(resource_class)
        elif wait_list is not None and (first := self._first_of(wait_list)) is not None:
            entry = resource_class.priority, head.task_id, resource_class.ticket, resource_class
            if entry < first:
                return
            resource_class.ticket, self.parked[resource_class] = 0, resource_class.ticket
            heapreplace(wait_list.heap, entry)
            self.offer(first[3])

    # --- parked classes ----------------------------------------------------------------------------------------------

    def park(
        self, resource_class: ResourceClass, lists: dict[K, WaitList], key: K, workers: dict[Worker, None],
        shape: Shape | None = None,
    ) -> None:  # fmt: skip
        """Sets aside the class that came first, in one of the wait lists."""
        wait_list = lists.get(key)
        if wait_list is None:
            wait_list = lists[key] = WaitList(lists, key, workers, shape)
        entry = self._set_aside(resource_class, wait_list)
        heappush(wait_list.heap, entry)
        if len(wait_list.heap) > 2 * len(self.parked) + STALE_MIN:
            wait_list.heap = [e for e in wait_list.heap if self.parked.get(e[3]) == e[2]]
            heapify(wait_list.heap)

    def pause(self, resource_class: ResourceClass) -> None:
        """Sets aside the class that came first until all are offered."""
        self._set_aside(resource_class, None)

    def _set_aside(self, resource_class: ResourceClass, wait_list: WaitList | None) -> Entry:
        entry = heappop(self._heap)
        resource_class.ticket = 0
        self.parked[resource_class] = entry[2]
        before, resource_class.wait_list = resource_class.wait_list, wait_list
        if before is not None and before is not wait_list:
            self.offer_first(before)  # what it waits for now is not what they wait for
        return entry

    def _first_of(self, wait_list: WaitList) -> Entry | None:
        """The entry of a wait list's first class, which is at the top of its heap then."""
        heap = wait_list.heap
        while heap:
            priority, task_id, ticket, resource_class = heap[0]
            if self.parked.get(resource_class) != ticket:
                heappop(heap)
                continue
            head = resource_class.head()
            assert head is not None, "an empty class is not parked"
            if head.task_id == task_id:
                return heap[0]
            heapreplace(heap, (priority, head.task_id, ticket, resource_class))
        return None

    def waiting_first(self) -> Iterator[ResourceClass]:
        """Of each wait list the first class, and some of those after it: they may be of other shapes."""
        for wait_list in (*self.windows.values(), *self.others.values()):
            if self._first_of(wait_list) is not None:
                top = sorted(wait_list.heap[:TOP])
                yield from [found for _, _, ticket, found in top if self.parked.get(found) == ticket]
