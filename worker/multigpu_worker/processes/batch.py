"""A batch in an engine process, and which of its leases run."""

from dataclasses import dataclass

from multigpu_worker.processes.ipc.slots import SlotState
from multigpu_worker.session.session import Lease, Spec


@dataclass(slots=True)
class EngineBatch:
    batch_id: int
    # Not settled yet.
    leases: dict[int, Lease]
    one_by_one: bool
    spec: Spec
    settled: int = 0
    # Since when it has run without settling anything, in nanoseconds since 1970; 0: it has just settled something.
    unsettled_ns: int = 0
    # The engine was asked to give back what it has not begun.
    asked_back: bool = False


def running_leases(state: SlotState, batch: EngineBatch | None) -> list[Lease]:
    """The unsettled leases that a slot is running now."""
    if batch is None:
        return []
    if not batch.one_by_one:
        return list(batch.leases.values())
    lease = batch.leases.get(state.lease_id)
    return [] if lease is None else [lease]
