"""Between the contract's messages and our own values. The only module of the worker that builds or reads messages."""

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import device_pb2, task_pb2
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.device import DeviceInfo, Telemetry
from multigpu_worker.engines.registry import KindInfo
from multigpu_worker.session import Frame, Held, Lease, Report, Reports, ReportState, Spec

PROTOCOL_VERSION = 1

_STATES = {
    ReportState.SUCCEEDED: pb.REPORT_STATE_SUCCEEDED,
    ReportState.FAILED: pb.REPORT_STATE_FAILED,
    ReportState.RETURNED: pb.REPORT_STATE_RETURNED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a hello says of the worker, and what doesn't change while it lives."""

    worker_id: str
    host: str
    version: str
    pid: int
    device: DeviceInfo
    labels: dict[str, str]
    slots: int
    window_tasks: int
    window_bytes: int


def seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def spec_of(spec: task_pb2.TaskSpec) -> Spec:
    return Spec(
        kind=spec.kind,
        model=spec.model,
        parameters=tuple(sorted(spec.parameters.items())),
        content_type=spec.content_type,
        run_timeout_s=seconds_of(spec.run_timeout),
    )


def leases_of(batch: pb.LeaseBatch) -> tuple[Spec, list[Lease]]:
    spec = spec_of(batch.spec)
    leases = [
        Lease(
            lease.lease_id,
            lease.task_id,
            lease.attempt,
            spec,
            lease.payload,
            lease.units or 1,
            lease.checkpoint,
            lease.partials_received,
            lease.traceparent,
            # Its first outputs are with this master alone: another one can't take the lease over.
            resumable=not lease.partials_received,
        )
        for lease in batch.leases
    ]
    return spec, leases


def hello(identity: Identity, kinds: Iterable[KindInfo], held: Iterable[Held]) -> pb.SessionRequest:
    device = identity.device
    return pb.SessionRequest(
        hello=pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=identity.worker_id,
            host=identity.host,
            version=identity.version,
            pid=identity.pid,
            device=device_pb2.Device(
                device_id=device.device_id,
                name=device.name,
                product=device.product,
                memory_total_bytes=device.memory_total_bytes,
            ),
            capabilities=[pb.Capability(kind=info.kind, models=info.models) for info in kinds],
            labels=identity.labels,
            slots=identity.slots,
            window_tasks=identity.window_tasks,
            window_bytes=identity.window_bytes,
            leases=[_held(entry) for entry in held],
        )
    )


def heartbeat(
    held: Iterable[Held],
    *,
    last_frame: int,
    telemetry: Telemetry | None,
    sample_ns: int,
    resident_models: Iterable[str],
    draining: bool,
) -> pb.SessionRequest:
    beat = pb.Heartbeat(
        leases=[_held(entry) for entry in held],
        last_frame=last_frame,
        resident_models=resident_models,
        draining=draining,
    )
    if telemetry is not None:
        beat.telemetry.CopyFrom(
            device_pb2.DeviceTelemetry(
                sample_time=_timestamp(sample_ns),
                memory_total_bytes=telemetry.memory_total_bytes,
                memory_used_bytes=telemetry.memory_used_bytes,
                utilization=telemetry.utilization,
                temperature_celsius=telemetry.temperature_celsius,
                power_watts=telemetry.power_watts,
            )
        )
    return pb.SessionRequest(heartbeat=beat)


def request_of(frame: Frame) -> pb.SessionRequest:
    return pb.SessionRequest(
        report_batches=[_report_batch(reports) for reports in frame.reports],
        partials=[
            pb.PartialOutput(lease_id=partial.lease.lease_id, index=partial.index, data=partial.data)
            for partial in frame.partials
        ],
    )


def _report_batch(reports: Reports) -> pb.ReportBatch:
    return pb.ReportBatch(
        start_time=_timestamp(reports.start_ns),
        finish_time=_timestamp(reports.finish_ns),
        reports=[
            pb.Report(
                lease_id=report.lease.lease_id,
                state=pb.REPORT_STATE_SUCCEEDED,
                result=report.result,
                content_type=report.content_type,
            )
            if report.error is None
            else _failure(report)
            for report in reports.reports
        ],
    )


def _failure(report: Report) -> pb.Report:
    assert report.error is not None
    error = report.error
    return pb.Report(
        lease_id=report.lease.lease_id,
        state=_STATES[report.state],
        error=task_pb2.TaskError(
            type=error.type, message=error.message, retryable=error.retryable, traceback=error.traceback
        ),
    )


def _held(held: Held) -> pb.HeldLease:
    lease = held.lease
    message = pb.HeldLease(lease_id=lease.lease_id, task_id=lease.task_id, attempt=lease.attempt, running=lease.running)
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
