"""Backpressure as an object: how much may be unsettled at a time, by count and by bytes.

A caller asks to be admitted, and waits in line while the window is full; the line is served in order. A waiter that
wakes has its share already. Belongs to one event loop.
"""

import asyncio
from collections import deque


class Window:
    def __init__(self, tasks_max: int, bytes_max: int) -> None:
        assert tasks_max > 0
        assert bytes_max > 0
        self.tasks_max = tasks_max
        self.bytes_max = bytes_max
        self.tasks = 0
        self.bytes = 0
        self._waiters: deque[tuple[asyncio.Future[None], int, int]] = deque()

    def try_admit(self, tasks: int, nbytes: int) -> bool:
        """Admits at once or not at all."""
        if self._waiters or not self._fits(tasks, nbytes):
            return False
        self.tasks += tasks
        self.bytes += nbytes
        return True

    async def admit(self, tasks: int, nbytes: int) -> None:
        """Waits until it is admitted. More than the whole window is admitted alone."""
        if self.try_admit(tasks, nbytes):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (future, tasks, nbytes)
        self._waiters.append(waiter)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._admit_waiters()  # the next in line may be smaller, and fit
            else:
                self.free(tasks, nbytes)
            raise

    def free(self, tasks: int, nbytes: int) -> None:
        """Gives back what was admitted."""
        self.tasks -= tasks
        self.bytes -= nbytes
        assert self.tasks >= 0, "freed more tasks than were admitted"
        assert self.bytes >= 0, "freed more bytes than were admitted"
        if self._waiters:
            self._admit_waiters()

    def _fits(self, tasks: int, nbytes: int) -> bool:
        if self.tasks == 0:
            return True
        return self.tasks + tasks <= self.tasks_max and self.bytes + nbytes <= self.bytes_max

    def _admit_waiters(self) -> None:
        while self._waiters:
            future, tasks, nbytes = self._waiters[0]
            if future.cancelled():  # gave up while it waited
                self._waiters.popleft()
                continue
            if not self._fits(tasks, nbytes):
                return
            self._waiters.popleft()
            self.tasks += tasks
            self.bytes += nbytes
            future.set_result(None)
