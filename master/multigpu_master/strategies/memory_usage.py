"""memory_usage: the device with the most free memory; above the threshold a device gets nothing new.

The reported free memory is as old as the last heartbeat, so the score subtracts the memory that the tasks of all
leases require. Memory that these tasks already use therefore counts twice.
"""

from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView, Strategy


class MemoryUsage(Strategy):
    name: ClassVar[str] = "memory_usage"
    aliases: ClassVar[tuple[str, ...]] = ("memory",)
    summary: ClassVar[str] = "The device with the most free memory; above memory_threshold_percent it gets nothing new."
    score_meaning: ClassVar[str] = "minus the free device memory in bytes, plus what the tasks of its leases require"

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        fraction = worker.memory_fraction()
        if fraction is not None and fraction > fleet.memory_threshold:
            return f"device memory {fraction:.0%} in use, above the threshold of {fleet.memory_threshold:.0%}"
        return None

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        free = worker.memory_free_bytes()
        if free is None:
            free = worker.info.memory_total_bytes
        return -float(free - worker.leased_memory_bytes)
