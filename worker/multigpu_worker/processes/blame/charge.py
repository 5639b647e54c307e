"""Which leases are charged an attempt for the end of their engine process, and which go on in the next one.

Pure. A lease is charged only if it ran alone, so that no lease is charged for another one's fault. Leases of a batch
that ran together go on in batches of half its size, until the lease that ends its engine is alone. Leases that ran one
by one, but in several slots at the same time, become suspects: from then on each of them runs alone.

The death of an engine that runs nothing is charged to a lease only after DEATHS_MAX deaths with that lease inside; or
at once, if the engine was not killed and contained no other lease.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from multigpu_worker.processes.batch import EngineBatch, running_leases
from multigpu_worker.processes.blame.limits import Violation, slot_key
from multigpu_worker.processes.ipc.slots import SlotState
from multigpu_worker.session.lease import Lease
from multigpu_worker.session.session import TaskError

# More deaths than it takes to halve the largest batch down to one lease.
DEATHS_MAX = 20

Batches = Mapping[int, EngineBatch]


@dataclass(slots=True)
class Suspects:
    """Leases of which one ended the engine process."""

    # Leases of batches that ran together.
    together: list[list[Lease]] = field(default_factory=list)
    # Leases that ran one by one.
    alone: list[Lease] = field(default_factory=list)

    def all(self) -> list[Lease]:
        return [*self.alone, *(lease for leases in self.together for lease in leases)]


@dataclass(frozen=True, slots=True)
class Charges:
    """Leases that fail with the engine process; and leases that go on: suspects first, otherwise in their order."""

    failed: list[tuple[Lease, TaskError]]
    again: list[Lease]


def suspects_of_slots(
    slots: Iterable[SlotState], batches: Batches, violation: Violation | None, prepared: int
) -> Suspects:
    """The leases that the slots ran: with a violation, only in slots that it names; else also the batch `prepared`."""
    suspects = Suspects()
    for state in slots:
        batch = batches.get(state.batch_id)
        if batch is None or (violation is not None and slot_key(state, batch) not in violation.slots):
            continue
        if batch.one_by_one:
            suspects.alone += running_leases(state, batch)
        else:
            suspects.together.append(running_leases(state, batch))
    if violation is None and prepared in batches:
        suspects.together.append(list(batches[prepared].leases.values()))
    return suspects


def suspects_of_lost_context(slots: Iterable[SlotState], batches: Batches, reporters: Collection[int]) -> Suspects:
    """For a lost CUDA context: the leases that reported the loss, and the leases that ran in `slots` at the same time.

    If a batch that runs together reported it, all such batches in the process are suspect: the device may have begun
    the next batch's work.
    """
    running = {state.batch_id: running_leases(state, batches.get(state.batch_id)) for state in slots}
    reported = {
        batch_id: [lease for lease in batch.leases.values() if lease.lease_id in reporters]
        for batch_id, batch in batches.items()
    }
    begun = any(reported[batch_id] and not batch.one_by_one for batch_id, batch in batches.items())
    suspects = Suspects()
    for batch_id, batch in batches.items():
        if batch.one_by_one:
            suspects.alone += reported[batch_id] or running.get(batch_id, [])
        elif begun:
            suspects.together.append(list(batch.leases.values()))
    return suspects


def charge(suspects: Suspects, error: TaskError, batches: Batches) -> Charges:
    """Charge the suspect if there is only one. Charge none of several, but let them run in smaller batches or alone."""
    everyone = suspects.all()
    if len(everyone) == 1:
        return _charges(batches, {everyone[0].lease_id: error})
    for leases in suspects.together:
        for lease in leases:
            lease.batch_size_max = max(1, len(leases) // 2)
    for lease in suspects.alone:
        lease.batch_size_max = 1
    return _charges(batches, {})


def requeue_all(batches: Batches, error: TaskError, deaths_max: int = DEATHS_MAX, *, halve: bool) -> Charges:
    """Nothing ran, or the cause is elsewhere: all leases go on, except those with `deaths_max` deaths, which fail.

    `halve`: they go on in smaller batches, as one of them may be the cause.
    """
    failed: dict[int, TaskError] = {}
    for batch in batches.values():
        batch_size_max = max(1, len(batch.leases) // 2)
        for lease in batch.leases.values():
            lease.deaths += 1
            if halve:
                lease.batch_size_max = batch_size_max
            if lease.deaths >= deaths_max:
                failed[lease.lease_id] = error
    return _charges(batches, failed)


def _charges(batches: Batches, failed: Mapping[int, TaskError]) -> Charges:
    leases = [lease for batch in batches.values() for lease in batch.leases.values()]
    again = [lease for lease in leases if lease.lease_id not in failed]
    return Charges(
        [(lease, failed[lease.lease_id]) for lease in leases if lease.lease_id in failed],
        sorted(again, key=lambda lease: not lease.suspect),
    )
