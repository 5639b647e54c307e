"""A page of memory that agent and engine share: what each slot of the engine runs at this instant.

The engine writes it with three stores and no system call, so the page is right even if the engine hangs or has just
died. The agent reads it to enforce timeouts, and to charge a death to the right lease.
"""

import mmap
import os
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    # 0: idle.
    batch_id: int
    # The item that runs. 0: between two items, or the batch runs together.
    lease_id: int
    # When the item or, if the batch runs together, the batch began, in nanoseconds of CLOCK_MONOTONIC, which both
    # processes share.
    started_ns: int
    # Grows whenever the engine reports progress.
    beats: int

    def ran_ns(self) -> int:
        """How long ago the item or batch began; 0: the slot is idle."""
        return time.monotonic_ns() - self.started_ns if self.batch_id else 0


class SlotPage:
    """The engine writes `view[slot * FIELDS + field]`, the agent samples."""

    BATCH, LEASE, STARTED, BEATS, PREPARED = range(5)
    FIELDS = 8  # one cache line a slot, so that slots don't slow one another

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
        self.slots = slots  # how many are in use
        self._map = mmap.mmap(fd, slots * self.FIELDS * 8)
        self.view = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, slots: int) -> "SlotPage":
        fd = os.memfd_create("multigpu-slots", os.MFD_CLOEXEC)
        os.ftruncate(fd, slots * cls.FIELDS * 8)
        return cls(fd, slots)

    def sample(self) -> list[SlotState]:
        return [self._sample_slot(slot * self.FIELDS) for slot in range(self.slots)]

    def _sample_slot(self, at: int) -> SlotState:
        # The engine sets LEASE to 0 before it writes STARTED. So if the agent reads the same LEASE before and after
        # STARTED, the two belong together.
        while True:
            lease_id = self.view[at + self.LEASE]
            batch_id = self.view[at + self.BATCH]
            started_ns = self.view[at + self.STARTED]
            beats = self.view[at + self.BEATS]
            if self.view[at + self.LEASE] == lease_id and self.view[at + self.BATCH] == batch_id:
                return SlotState(batch_id=batch_id, lease_id=lease_id, started_ns=started_ns, beats=beats)

    def prepared(self) -> int:
        """The id of the batch that is being prepared now; 0: none. Stored with the first slot's fields."""
        return int(self.view[self.PREPARED])

    def close(self) -> None:
        self.view.release()
        self._map.close()
        os.close(self.fd)
