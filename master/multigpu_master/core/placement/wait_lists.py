"""Which task is next.

Resource classes that may have a task to dispatch are *offered*: they are in a heap, ordered by priority and then by the
age of their first task. A class for whose tasks no worker has room is *parked* in a wait list, with classes blocked by
the same condition; when the condition may have cleared, only the first class of the list is offered. Most classes wait
for room in a window. So the cost of a dispatch depends neither on the number of tasks nor on the number of classes.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeVar

from multigpu_master.core.model import Queue, Shape, Spec, Task, Worker, shape_of
from multigpu_master.core.placement.resource_classes import Backlog, Entry, ResourceClass, WaitList

K = TypeVar("K")

# Entries at the top of a wait list's heap that are searched for urgent tasks.
TOP = 7
# A wait list with at most this many stale entries is not rebuilt.
STALE_MIN = 64


class ResourceClasses:
    """All resource classes: the offered ones and the parked ones. See the module."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, int, Shape], ResourceClass] = {}
        self.parked: dict[ResourceClass, int] = {}  # the ticket of its entry in a wait list
        # Wait lists for room in the window of any of some workers (by id() of their dict), for room in the window of
        # the worker to which the tasks are pinned, and for other conditions (by what the classes have in common).
        self.windows: dict[int, WaitList] = {}
        self.pinned_windows: dict[Worker, WaitList] = {}
        self.conditions: dict[Backlog | tuple[str, Shape, Worker | None], WaitList] = {}
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
        """Whether a task of this spec would add a shape to a queue that has at least `limit` shapes."""
        full = self._backlogs_of.get(spec.queue, 0) >= limit
        return full and (spec.queue, shape_of(spec)) not in self._backlogs

    def add(self, resource_class: ResourceClass, task: Task) -> None:
        resource_class.append(task)
        self._grow(resource_class)
        if resource_class.size == 1:
            self.offer(resource_class)

    def put_back(self, resource_class: ResourceClass, task: Task) -> None:
        """Reinserts a task in the order of task_ids."""
        self._grow(resource_class)
        resource_class.put_back(task)
        self.offer(resource_class)

    def take(self, resource_class: ResourceClass) -> None:
        """Pops the head of the class that `first` returned."""
        resource_class.stretches[0].tasks.popleft().stretch = None
        resource_class.size -= 1
        resource_class.backlog.size -= 1

    def leave(self, resource_class: ResourceClass, task: Task) -> None:
        """Removes a waiting task from its class (it was cancelled, has expired or was adopted)."""
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
        """Counts another waiting task of the class."""
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
            if (wait_list := self.conditions.get(backlog)) is not None:
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
            self.offer_first(wait_list)  # the forgotten class represented its wait list

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
        """Requeues a class with waiting tasks for dispatch, ordered by its current head."""
        self.parked.pop(resource_class, None)
        heappush(self._heap, self._ticketed(resource_class))

    def _ticketed(self, resource_class: ResourceClass) -> Entry:
        """A new entry for the heap of offered classes."""
        head = resource_class.head()
        assert head is not None, "an offered class has waiting tasks"
        self._tickets += 1
        resource_class.ticket = self._tickets
        return resource_class.priority, head.task_id, self._tickets, resource_class

    def offer_anew(self, resource_class: ResourceClass) -> None:
        """Requeues a class whose blocking condition may have changed (another strategy, a resumed queue)."""
        offered = resource_class.ticket
        wait_list, resource_class.wait_list = resource_class.wait_list, None
        if not offered:
            self.offer(resource_class)
        elif wait_list is not None:
            self.offer_first(wait_list)  # this class represented the wait list, and leaves it

    def offer_all(self) -> None:
        """Requeues every parked class."""
        for resource_class in self.parked:
            resource_class.wait_list = None
            self._heap.append(self._ticketed(resource_class))
        heapify(self._heap)
        for parked in (self.parked, self.windows, self.pinned_windows, self.conditions):
            parked.clear()

    def offer_freed(self, freed: dict[Worker, None], open_: dict[Worker, None], *, averages_moved: bool) -> None:
        """Offers the parked classes that a change of the `freed` workers may unblock. Workers in `open_` have room."""
        roomy = [worker for worker in freed if worker in open_]
        for worker in roomy:
            if (wait_list := self.pinned_windows.get(worker)) is not None:
                self.offer_first(wait_list)
        for wait_list in list(self.windows.values()):
            if not wait_list.workers.keys().isdisjoint(roomy):
                self.offer_first(wait_list)
        for wait_list in list(self.conditions.values()):
            # Whether a backlog suffices may depend on the averages.
            if averages_moved or not freed.keys().isdisjoint(wait_list.workers.keys()):
                self.offer_first(wait_list)

    def offer_first(self, wait_list: WaitList) -> None:
        """Requeues the first class of a wait list. If dispatching it fails, the other classes would fail too, and stay
        parked; if it succeeds, `granted` offers the next class.
        """
        first = self._first_of(wait_list)
        if first is not None:
            heappop(wait_list.heap)
            self.offer(first[3])
        if not wait_list.heap and wait_list.home.get(wait_list.key) is wait_list:
            del wait_list.home[wait_list.key]

    def granted(self, resource_class: ResourceClass) -> None:
        """Called after a grant to the class that `first` returned: offers the first class of its wait list in its
        place, if that is ahead now. So dispatch tries one class of a wait list at a time.
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
        """Parks the class that `first` returned, in the wait list `lists[key]`."""
        wait_list = lists.get(key)
        if wait_list is None:
            wait_list = lists[key] = WaitList(lists, key, workers, shape)
        entry = self._park_first(resource_class, wait_list)
        heappush(wait_list.heap, entry)
        if len(wait_list.heap) > 2 * len(self.parked) + STALE_MIN:
            wait_list.heap = [e for e in wait_list.heap if self.parked.get(e[3]) == e[2]]
            heapify(wait_list.heap)

    def pause(self, resource_class: ResourceClass) -> None:
        """Parks the class that `first` returned outside any wait list, until `offer_anew` or `offer_all`."""
        self._park_first(resource_class, None)

    def _park_first(self, resource_class: ResourceClass, wait_list: WaitList | None) -> Entry:
        entry = heappop(self._heap)
        resource_class.ticket = 0
        self.parked[resource_class] = entry[2]
        before, resource_class.wait_list = resource_class.wait_list, wait_list
        if before is not None and before is not wait_list:
            self.offer_first(before)  # its old wait list needs another representative
        return entry

    def _first_of(self, wait_list: WaitList) -> Entry | None:
        """Drops stale entries of a wait list and returns the first one, or None."""
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
        """The first classes of each wait list, up to TOP: they may have different shapes."""
        for wait_list in (*self.windows.values(), *self.conditions.values()):
            if self._first_of(wait_list) is not None:
                top = sorted(wait_list.heap[:TOP])
                yield from [found for _, _, ticket, found in top if self.parked.get(found) == ticket]
