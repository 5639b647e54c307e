"""Converts the session's Protobuf messages to and from the worker's values."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu._ranks import RANK, RUN_ID, STORE, WORLD_SIZE
from multigpu._transport.payloads import Elsewhere, Reference
from multigpu._transport.protobuf import add_bytes, field
from multigpu.v1 import device_pb2, model_pb2, task_pb2
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.device.energy import Energy
from multigpu_worker.device.health import Health
from multigpu_worker.device.interface import DeviceInfo, Telemetry
from multigpu_worker.mps.control import MpsStatus
from multigpu_worker.session.lease import Lease, Spec
from multigpu_worker.session.session import Frame, Held, Report, Reports, ReportState, TaskError
from multigpu_worker.session.store_address import StoreAddress

PROTOCOL_VERSION = 2
_REPORT_BATCHES = pb.SessionRequest.REPORT_BATCHES_FIELD_NUMBER
_RESULTS = pb.ReportBatch.RESULTS_FIELD_NUMBER


class BadFrameError(Exception):
    """A frame of the master makes no sense."""


_STATES = {
    ReportState.FAILED: pb.REPORT_STATE_FAILED,
    ReportState.RETURNED: pb.REPORT_STATE_RETURNED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The fields of a hello that never change while the worker runs."""

    worker_id: str
    host: str
    version: str
    pid: int
    process: str
    device: DeviceInfo
    labels: dict[str, str]
    slots: int
    window_tasks: int
    window_bytes: int
    # None: the worker takes no ranks of gangs.
    store: StoreAddress | None = None


def seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def spec_of(spec: task_pb2.TaskSpec) -> Spec:
    return Spec(
        kind=spec.kind,
        model=spec.model,
        parameters=tuple(sorted(spec.parameters.items())),
        content_type=spec.content_type,
        run_timeout_s=seconds_of(spec.run_timeout),
        durable=spec.durability != task_pb2.DURABILITY_EPHEMERAL,
        priority=spec.priority or 3,
    )


def leases_of(batch: pb.LeaseBatch, directory: str = "") -> tuple[Spec, list[Lease]]:
    """Returns the spec and the leases. `directory`: that of the master's shared payloads. Raises BadFrameError."""
    spec = spec_of(batch.spec)
    count = len(batch.lease_ids)
    if any(len(column) != count for column in (batch.task_ids, batch.attempts, batch.payloads, batch.units)):
        raise BadFrameError("the columns of a batch of leases are not of equal length")
    if len(set(batch.lease_ids)) < count:
        raise BadFrameError("it grants a lease twice")
    proofs = list(batch.proofs) or [0] * count
    if len(proofs) != count:
        raise BadFrameError("it has no proof for each of its leases")
    columns = zip(batch.lease_ids, batch.task_ids, batch.attempts, batch.payloads, batch.units, proofs, strict=True)
    leases = [
        Lease(lease_id, task_id, attempt, spec, payload, units, proof)
        for lease_id, task_id, attempt, payload, units, proof in columns
    ]
    for extra in batch.extras:
        if extra.index >= count:
            raise BadFrameError("it has details of a lease that it does not grant")
        lease = leases[extra.index]
        lease.checkpoint = extra.checkpoint
        lease.partials_received = extra.partials_received
        lease.partials_before = tuple(extra.partials)
        lease.traceparent = extra.traceparent
        if extra.HasField("gang"):
            place = {
                RANK: str(extra.gang.rank),
                WORLD_SIZE: str(extra.gang.world_size),
                STORE: extra.gang.store_address,
                RUN_ID: str(extra.gang.run_id),
            }
            lease.spec = dataclasses.replace(spec, parameters=(*spec.parameters, *place.items()))
            lease.exclusive = True
        if extra.HasField("payload_place"):
            at = extra.payload_place
            if not directory or "/" in str(at.segment):
                raise BadFrameError("it refers to a payload that we do not share")
            lease.payload = Reference(Elsewhere(f"{directory}/{at.segment}", at.segment), at.offset, at.size)
        # Only this master has the outputs of earlier attempts: another one can't adopt the lease.
        lease.resumable = not extra.partials_received
    return spec, leases


def hello(
    identity: Identity,
    offers: Iterable[tuple[str, Iterable[str]]],
    concurrency: Mapping[str, int],
    held: Iterable[Held],
    *,
    models: Iterable[model_pb2.Model] = (),
    model_memory_bytes: int = 0,
    incarnation: str = "",
) -> pb.SessionRequest:
    """`offers`: the kinds of tasks, each with the names of its models. `concurrency`: by kind, see pb.Capability."""
    return pb.SessionRequest(
        hello=pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=identity.worker_id,
            host=identity.host,
            version=identity.version,
            pid=identity.pid,
            process=identity.process,
            store_address="" if identity.store is None else identity.store.text,
            device=device_message(identity.device),
            capabilities=_capabilities(offers, concurrency),
            labels=identity.labels,
            slots=identity.slots,
            window_tasks=identity.window_tasks,
            window_bytes=identity.window_bytes,
            leases=[_held(entry, proof=entry.lease.proof) for entry in held],
            models=models,
            model_memory_bytes=model_memory_bytes,
            incarnation=incarnation,
        )
    )


def catalog_message(
    offers: Iterable[tuple[str, Iterable[str]]], concurrency: Mapping[str, int], models: Iterable[model_pb2.Model]
) -> pb.Catalog:
    return pb.Catalog(capabilities=_capabilities(offers, concurrency), models=models)


def _capabilities(
    offers: Iterable[tuple[str, Iterable[str]]], concurrency: Mapping[str, int]
) -> list[pb.Capability]:  # fmt: skip
    return [pb.Capability(kind=kind, models=names, concurrency=concurrency.get(kind, 0)) for kind, names in offers]


def device_message(info: DeviceInfo) -> device_pb2.Device:
    # DeviceInfo's fields have the message's names and units.
    return device_pb2.Device(**dataclasses.asdict(info))


def telemetry_message(telemetry: Telemetry, sample_ns: int) -> device_pb2.DeviceTelemetry:
    """`sample_ns`: in nanoseconds since 1970."""
    return device_pb2.DeviceTelemetry(sample_time=_timestamp(sample_ns), **dataclasses.asdict(telemetry))


def heartbeat(
    held: Iterable[Held],
    *,
    last_frame: int,
    telemetry: Telemetry | None,
    sample_ns: int,
    models: Iterable[model_pb2.ModelResidency] = (),
    catalog: pb.Catalog | None = None,
    draining: bool,
    mps: MpsStatus | None = None,
    health: device_pb2.DeviceHealth | None = None,
    embedding_cache: pb.EmbeddingCache | None = None,
    handlers: pb.Handlers | None = None,
    occupied_slots: int = 0,
) -> pb.SessionRequest:
    beat = pb.Heartbeat(
        leases=[_held(entry) for entry in held],
        last_frame=last_frame,
        models=models,
        catalog=catalog,
        draining=draining,
        health=health,
        embedding_cache=embedding_cache,
        handlers=handlers,
        occupied_slots=occupied_slots,
    )
    if telemetry is not None:
        beat.telemetry.CopyFrom(telemetry_message(telemetry, sample_ns))
    if mps is not None:
        beat.mps.state = mps.state.value  # type: ignore[assignment]  # enums are ints on the wire
        beat.mps.message, beat.mps.clients, beat.mps.clients_max = mps.message, mps.clients, mps.clients_max
    return pb.SessionRequest(heartbeat=beat)


def health_message(health: Health, checks_passed: int) -> device_pb2.DeviceHealth:
    message = device_pb2.DeviceHealth(
        state=health.state.value,  # type: ignore[arg-type]  # as above
        since_time=_timestamp(int(health.since_s * 1e9)),
        unusable=health.unusable,
        checks_passed=checks_passed,
    )
    for reason in health.reasons:
        since_time = _timestamp(int(reason.since_s * 1e9))
        message.reasons.add(code=reason.code, message=reason.message, since_time=since_time)
    if not health.fit:
        message.next_check_time.CopyFrom(_timestamp(int(health.next_check_s * 1e9)))
    return message


def _never(_reference: Reference) -> bool:
    return False


def request_of(frame: Frame, lend: Callable[[Reference], bool] = _never) -> bytes:
    """A serialized SessionRequest. `lend`: whether a result may be sent as a reference. If so, it keeps the result for
    the master.
    """
    request = pb.SessionRequest(
        partials=[
            pb.PartialOutput(
                lease_id=p.lease.lease_id,
                index=p.index,
                data=p.data,
                content_type=p.content_type,
                checkpoint=p.checkpoint,
            )
            for p in frame.partials
        ],
    )
    batches = [part for reports in frame.reports for part in _report_batches(reports, lend)]
    return b"".join((request.SerializeToString(), *batches))


def _report_batches(reports: Reports, lend: Callable[[Reference], bool]) -> list[bytes]:
    """A batch for each content type of results, and one for failed and returned leases, as parts of a frame."""
    contents = _read_files(reports.reports, lend)
    batches: list[bytes] = []
    for content_type in {report.content_type for report in reports.reports if report.error is None}:
        succeeded = [r for r in reports.reports if r.error is None and r.content_type == content_type]
        batch = _report_batch(reports, succeeded)
        batch.content_type = content_type
        batch.succeeded_lease_ids.extend([report.lease.lease_id for report in succeeded])
        results = [_result(batch, n, report, contents) for n, report in enumerate(succeeded)]
        if (energy := reports.usage.energy) is not None:
            _fill_energy(batch, succeeded, energy)
        large = add_bytes(batch.results, _RESULTS, results)
        batches += field(_REPORT_BATCHES, batch.SerializeToString(), *large)
    if failed := [report for report in reports.reports if report.error is not None]:
        batch = _report_batch(reports, failed)
        batch.reports.extend(map(_failure, failed))
        batches += field(_REPORT_BATCHES, batch.SerializeToString())
    return batches


def _report_batch(reports: Reports, some: list[Report]) -> pb.ReportBatch:
    """A batch for some of the reports, with the fields that successes and failures have in common."""
    batch = pb.ReportBatch(start_time=_timestamp(reports.start_ns), finish_time=_timestamp(reports.finish_ns))
    units = sum([report.lease.units for report in some])
    batch.device_duration.FromNanoseconds(int(reports.usage.device_s_per_unit * 1e9 * units))
    for report in some:
        if report.lease.log:
            batch.logs.add(lease_id=report.lease.lease_id, log=report.lease.log)
    return batch


def _fill_energy(batch: pb.ReportBatch, succeeded: list[Report], energy: Energy) -> None:
    batch.energy_joules.extend([report.lease.units * energy.joules_per_unit for report in succeeded])
    batch.energy_method = int(energy.method)  # type: ignore[assignment]  # enums are ints on the wire
    batch.energy_uncertainty = energy.uncertainty


def _read_files(reports: list[Report], lend: Callable[[Reference], bool]) -> dict[int, bytes]:
    """By lease_id: results in files that can't be sent as references. An attempt whose result can't be read fails."""
    contents: dict[int, bytes] = {}
    for report in reports:
        if isinstance(report.result, Reference) and not lend(report.result):
            try:
                contents[report.lease.lease_id] = report.result.read()
            except OSError as error:
                text = f"the file of the result can't be read: {error}"
                report.error = TaskError(type="ResultLost", message=text, retryable=True)
                report.state, report.result = ReportState.FAILED, b""
    return contents


def _result(batch: pb.ReportBatch, index: int, report: Report, contents: dict[int, bytes]) -> bytes:
    """The result's entry in the column `results`: its bytes; empty if it is sent as a reference."""
    result = report.result
    if isinstance(result, bytes):
        return result
    if report.lease.lease_id in contents:
        return contents[report.lease.lease_id]
    assert isinstance(result, Reference)
    at = batch.result_places.add(index=index).at
    at.segment, at.offset, at.size = result.pin.name, result.offset, result.size_bytes
    return b""


def _failure(report: Report) -> pb.Report:
    assert report.error is not None
    error = report.error
    return pb.Report(
        lease_id=report.lease.lease_id,
        state=_STATES[report.state],
        error=task_pb2.TaskError(
            type=error.type, message=error.message, retryable=error.retryable, traceback=error.traceback
        ),
        broke_engine=report.broke_engine,
    )


def _held(held: Held, proof: int = 0) -> pb.HeldLease:
    lease = held.lease
    message = pb.HeldLease(
        lease_id=lease.lease_id,
        task_id=lease.task_id,
        attempt=lease.attempt,
        running=lease.running,
        proof=proof,
        log=held.log,
    )
    if held.checkpoint is not None:
        message.checkpoint = held.checkpoint
    if lease.steps or lease.note or lease.fraction:
        message.progress.fraction = lease.fraction
        message.progress.steps = lease.steps
        message.progress.note = lease.note
    return message


def _timestamp(instant_ns: int) -> Timestamp:
    seconds, nanos = divmod(instant_ns, 1_000_000_000)
    return Timestamp(seconds=seconds, nanos=nanos)
