"""Keeps settled ephemeral tasks for their result_ttl, within a limit of bytes."""

import math
from collections.abc import Callable
from heapq import heappop, heappush

from multigpu_master.core.identity import payload_crc
from multigpu_master.core.model import Task
from multigpu_master.core.timers import DUE_MAX, Timers

# Assumed size of the objects of a settled task, without the result, the payload and the partial outputs.
OBJECTS_BYTES = 512


def settled_bytes(task: Task) -> int:
    """The approximate memory of a settled task, in bytes."""
    assert task.outcome is not None, "settled_bytes needs a settled task"
    size = len(task.outcome.result) + len(task.payload) + OBJECTS_BYTES
    return size if task.extra is None else size + task.extra.kept_bytes


class EphemeralOutcomes:
    """See the module. Calls `forget` for each task that it no longer keeps."""

    def __init__(self, bytes_max: int, timers: Timers, forget: Callable[[Task], None]) -> None:
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._timers = timers
        self._forget = forget
        self._heap: list[tuple[float, int, Task]] = []  # (when the task expires, task_id, task)
        self._due_s = math.inf  # when the timer fires

    def keep(self, task: Task, now: float) -> None:
        """Keeps a task that has settled now. Beyond the limit of bytes, forgets the tasks that would expire first."""
        assert task.outcome is not None, "keep needs a settled task"
        if task.request_id:
            payload_crc(task)  # stores the CRC in the task: resubmits are compared with it once the payload is gone
        task.payload = b""
        # Not from finish_s: that is a time of the worker's clock, and the report may have come much later.
        expire_s = now + task.spec.result_ttl_s
        heappush(self._heap, (expire_s, task.task_id, task))
        self.size_bytes += settled_bytes(task)
        while self.size_bytes > self._bytes_max:
            self._forget_first()
        if expire_s < self._due_s:
            self._arm(expire_s)

    def _arm(self, due_s: float) -> None:
        self._due_s = due_s
        self._timers.at(due_s, self._expire)

    def _expire(self, now: float) -> None:
        if now < self._due_s:
            return  # another timer has done the work of this one; `_due_s` is when the next one fires
        for _ in range(DUE_MAX):
            if not self._heap or self._heap[0][0] > now:
                break
            self._forget_first()
        self._due_s = math.inf
        if self._heap:
            # After DUE_MAX tasks the next one may be due already, but a callback must set a timer for later than `now`.
            self._arm(max(self._heap[0][0], math.nextafter(now, math.inf)))

    def _forget_first(self) -> None:
        _, _, task = heappop(self._heap)
        self.size_bytes -= settled_bytes(task)
        self._forget(task)
