"""Settled ephemeral tasks: kept for their result_ttl, within a limit of bytes."""

import math
from collections.abc import Callable
from heapq import heappop, heappush

from multigpu_master.core.identity import payload_crc
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.timers import DUE_MAX, Timers


def outcome_bytes(task: Task) -> int:
    """The approximate memory of a settled task."""
    assert task.outcome is not None, "it is settled"
    size = len(task.outcome.result) + len(task.payload) + 512
    return size if task.extra is None else size + task.extra.partials_bytes


class EphemeralOutcomes:
    """See the module. `forget` is called for each task that is dropped."""

    def __init__(self, bytes_max: int, timers: Timers, forget: Callable[[Task], None]) -> None:
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._timers = timers
        self._forget = forget
        self._heap: list[tuple[float, int, Task]] = []  # (when it expires, task_id, task)
        self._due_s = math.inf  # when the timer fires

    def keep(self, task: Task) -> None:
        assert task.outcome is not None, "it is settled"
        if task.outcome.state is not OutcomeState.DEAD_LETTERED:
            if task.request_id:
                payload_crc(task)
            task.payload = b""
        expire_s = task.outcome.finish_s + task.spec.result_ttl_s
        heappush(self._heap, (expire_s, task.task_id, task))
        self.size_bytes += outcome_bytes(task)
        while self.size_bytes > self._bytes_max:
            self._drop()
        if expire_s < self._due_s:
            self._arm(expire_s)

    def _arm(self, due_s: float) -> None:
        self._due_s = due_s
        self._timers.at(due_s, self._expire)

    def _expire(self, now: float) -> None:
        if now < self._due_s:
            return  # an earlier timer was set since, and has fired
        for _ in range(DUE_MAX):
            if not self._heap or self._heap[0][0] > now:
                break
            self._drop()
        self._due_s = math.inf
        if self._heap:
            self._arm(max(self._heap[0][0], math.nextafter(now, math.inf)))

    def _drop(self) -> None:
        _, _, task = heappop(self._heap)
        self.size_bytes -= outcome_bytes(task)
        self._forget(task)
