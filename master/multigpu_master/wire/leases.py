"""Converts leases that the master grants, leases that workers hold, and the reports of workers on leases."""

from collections.abc import Iterable, Sequence

from multigpu._transport.payloads import Reference
from multigpu._transport.protobuf import add_bytes, field
from multigpu.v1 import worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import LOG_CHARS_MAX, Energy, Extra, Lease, TaskError
from multigpu_master.ids import LeaseProofs
from multigpu_master.wire import payloads as payload_messages
from multigpu_master.wire.devices import energies
from multigpu_master.wire.outcomes import error_of
from multigpu_master.wire.payloads import Peer
from multigpu_master.wire.specs import SpecReader
from multigpu_master.wire.times import seconds_of
from multigpu_master.wire.validation import ATTEMPTS_MAX

NOTE_CHARS_MAX = 1 << 10
CHECKPOINT_BYTES_MAX = 1 << 20  # a larger checkpoint of a worker is ignored
# If a task's partial outputs and log (Extra.outputs_and_log_bytes) are larger, its leases do not carry the outputs.
RESENT_PARTIALS_BYTES_MAX = 1 << 20


_BATCHES = worker_service_pb2.SessionResponse.LEASE_BATCHES_FIELD_NUMBER
_PAYLOADS = worker_service_pb2.LeaseBatch.PAYLOADS_FIELD_NUMBER


def lease_batch(
    specs: SpecReader,
    proofs: LeaseProofs,
    leases: Sequence[Lease],
    payloads_by_lease_id: dict[int, bytes] | None = None,
) -> list[bytes]:
    """Returns a LeaseBatch with leases of one spec and worker, as parts of a frame. `payloads_by_lease_id`: the large
    payloads to send as bytes; the other large payloads are sent as references. None: no payload is large.
    """
    batch = worker_service_pb2.LeaseBatch()
    tasks = [lease.task for lease in leases]
    batch.spec.CopyFrom(specs.message(tasks[0].spec))
    batch.lease_ids.extend([lease.lease_id for lease in leases])
    batch.task_ids.extend([task.task_id for task in tasks])
    batch.attempts.extend([lease.attempt for lease in leases])
    batch.proofs.extend(proofs.of(leases[0].worker.worker_id, batch.lease_ids, batch.task_ids, batch.attempts))
    if payloads_by_lease_id is None:
        batch.payloads.extend([task.payload for task in tasks])
    batch.units.extend([task.units for task in tasks])
    for index, lease in enumerate(leases):
        extra, gang = lease.task.extra, lease.gang
        if extra is None and gang is None:
            continue
        message = batch.extras.add(index=index)
        if extra is not None:
            message.checkpoint, message.traceparent = extra.checkpoint, extra.traceparent
            message.partials_received = len(extra.partials)
            if _resends_partials(extra):
                message.partials.extend(extra.partials)
        if gang is not None:
            message.gang.rank, message.gang.world_size = lease.rank, len(gang.leases)
            message.gang.store_address = gang.leases[0].worker.info.store_address
            message.gang.run_id = gang.leases[0].lease_id
    large: list[bytes] = []
    if payloads_by_lease_id is not None:
        payloads = payload_messages.lease_payloads(batch, leases, payloads_by_lease_id)
        large = add_bytes(batch.payloads, _PAYLOADS, payloads)
    return field(_BATCHES, batch.SerializeToString(), *large)


def extra_bytes(extra: Extra) -> int:
    """Returns the approximate size of the part of an Extra that a lease carries."""
    return (
        len(extra.checkpoint)
        + len(extra.traceparent)
        + (extra.outputs_and_log_bytes if _resends_partials(extra) else 0)
    )


def _resends_partials(extra: Extra) -> bool:
    """Whether a lease carries the partial outputs of earlier attempts."""
    return extra.outputs_and_log_bytes <= RESENT_PARTIALS_BYTES_MAX


def held_leases(m: worker_service_pb2.Hello, proofs: LeaseProofs) -> list[ev.HeldLease]:
    """Returns the leases that a worker claims to hold from an earlier session. `granted_by_this_journal` is True for
    those with a valid proof.
    """
    columns = [x.lease_id for x in m.leases], [x.task_id for x in m.leases], [x.attempt for x in m.leases]
    return [
        held_lease(x, granted_by_this_journal=x.proof == p)
        for x, p in zip(m.leases, proofs.of(m.worker_id, *columns), strict=True)
    ]


def held_lease(m: worker_service_pb2.HeldLease, *, granted_by_this_journal: bool = False) -> ev.HeldLease:
    """Converts a lease that a worker holds. Limits or drops values that are out of range."""
    p = m.progress
    attempt = min(max(m.attempt, 1), ATTEMPTS_MAX)
    fraction = p.fraction if 0.0 <= p.fraction <= 1.0 else 0.0
    note = p.note[:NOTE_CHARS_MAX]
    log = m.log[-LOG_CHARS_MAX:]
    return ev.HeldLease(
        m.lease_id, m.task_id, attempt, m.running, fraction, p.steps, note, _checkpoint(m), log, granted_by_this_journal
    )


def partial_outputs(messages: Iterable[worker_service_pb2.PartialOutput]) -> list[ev.PartialOutput]:
    return [ev.PartialOutput(m.lease_id, m.index, m.data, m.content_type, _checkpoint(m)) for m in messages]


def _checkpoint(m: worker_service_pb2.HeldLease | worker_service_pb2.PartialOutput) -> bytes:
    return m.checkpoint if len(m.checkpoint) <= CHECKPOINT_BYTES_MAX else b""


def reports_of(
    batch: worker_service_pb2.ReportBatch, session: int, start_s: float, finish_s: float, peer: Peer
) -> ev.Reports:
    """Returns the event for a batch. A report with an unknown state becomes a failure, as does a success without a
    result or with an invalid reference to it.
    """
    count = min(len(batch.succeeded_lease_ids), len(batch.results))
    lease_ids = list(batch.succeeded_lease_ids[:count])
    results: list[bytes | Reference] = list(batch.results[:count])
    failures = [_failure(r) for r in batch.reports]
    no_result = TaskError("BadReport", "the worker reported a success without its result")
    failures += [ev.Failure(lease_id, no_result) for lease_id in batch.succeeded_lease_ids[count:]]
    energy: list[Energy] = []
    if len(batch.energy_joules) == len(lease_ids):
        energy = energies(list(batch.energy_joules), batch.energy_method, batch.energy_uncertainty)
    if batch.result_places:
        lost = payload_messages.resolve_results(batch, results, peer)
        failures += lost.values()
        lease_ids = [x for n, x in enumerate(lease_ids) if n not in lost]
        results = [x for n, x in enumerate(results) if n not in lost]
        energy = [x for n, x in enumerate(energy) if n not in lost]
    logs = {each.lease_id: each.log[-LOG_CHARS_MAX:] for each in batch.logs}
    device_s = max(0.0, seconds_of(batch.device_duration))
    return ev.Reports(
        session, lease_ids, results, batch.content_type, failures, start_s, finish_s, energy, device_s, logs
    )


def _failure(r: worker_service_pb2.Report) -> ev.Failure:
    state = r.state
    if state == worker_service_pb2.REPORT_STATE_FAILED:
        return ev.Failure(r.lease_id, error_of(r.error), broke_engine=r.broke_engine)
    if state == worker_service_pb2.REPORT_STATE_RETURNED:
        return ev.Failure(r.lease_id, error_of(r.error), returned=True)
    message = f"the worker reported the unknown state {state}; upgrade the master"
    return ev.Failure(r.lease_id, TaskError("BadReport", message))
