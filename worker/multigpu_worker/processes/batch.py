"""A batch in an engine process: its rows in the frame, and which of its leases run."""

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

from multigpu._transport.payloads import Elsewhere, Reference

from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.slots import SlotState
from multigpu_worker.session.lease import Lease, Spec

# Earlier outputs of a task that an engine gets.
PARTIALS_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class EngineBatch:
    batch_id: int
    # The leases that are not settled yet, by lease_id.
    leases: dict[int, Lease]
    one_by_one: bool
    spec: Spec
    settled: int = 0
    # When the first frame since the last report begins, in nanoseconds since 1970; 0: there is no such frame.
    first_unsettled_frame_ns: int = 0
    # The engine was asked to give back what it has not begun.
    give_back_requested: bool = False


def running_leases(state: SlotState, batch: EngineBatch | None) -> list[Lease]:
    """The unsettled leases that a slot is running now."""
    if batch is None:
        return []
    if not batch.one_by_one:
        return list(batch.leases.values())
    lease = batch.leases.get(state.lease_id)
    return [] if lease is None else [lease]


def rows_of(leases: Iterable[Lease], blobs: list[bytes]) -> list[tuple[Any, ...]]:
    """The leases as the batch's frame holds them. Large payloads are appended to `blobs`."""
    return [
        (
            lease.lease_id,
            lease.task_id,
            lease.attempt,
            _payload_of(lease.payload, blobs),
            lease.units,
            lease.checkpoint if lease.checkpoint_saved is None else lease.checkpoint_saved,
            lease.partials_received + lease.partials_made,
            _partials_of(lease),
        )
        for lease in leases
    ]


def _payload_of(payload: bytes | Sized, blobs: list[bytes]) -> bytes | int | tuple[str, int, int]:
    """A payload as the frame holds it: itself, its number among the blobs, or its place in a file."""
    if isinstance(payload, bytes):
        return frames.put(payload, blobs)
    assert isinstance(payload, Reference)
    assert isinstance(payload.pin, Elsewhere)
    return payload.pin.path, payload.offset, payload.size_bytes


def _partials_of(lease: Lease) -> tuple[bytes, ...]:
    """All partial outputs of the task so far; empty if the worker doesn't have all of them, or they are too large."""
    if not (lease.partials_received or lease.partials_made):
        return ()
    known = (*lease.partials_before, *(data for data, _ in lease.partials or ()))
    if len(known) < lease.partials_received + lease.partials_made or sum(map(len, known)) > PARTIALS_BYTES_MAX:
        return ()
    return known
