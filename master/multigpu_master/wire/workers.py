"""Converts messages about workers: hellos and heartbeats for the core, and descriptions for operators."""

from multigpu._transport.names import HELLO_BYTES_MAX
from multigpu.v1 import admin_service_pb2, worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import Worker
from multigpu_master.core.workers.info import HEALTHY, EngineReport, WorkerInfo
from multigpu_master.errors import InvalidMessageError
from multigpu_master.wire import devices, models
from multigpu_master.wire.leases import held_lease
from multigpu_master.wire.times import set_time
from multigpu_master.wire.validation import NAME_BYTES_MAX, check_printable

# Fields with the same name in a hello, in WorkerInfo and in what operators see.
_SAME_FIELDS = ("worker_id", "host", "version", "pid", "model_memory_bytes", "slots")


def check_hello_size(m: worker_service_pb2.Hello) -> None:
    """Raises InvalidMessageError if a worker's hello is too large. Not for the hello that the journal
    keeps of a worker, which may be larger: it also has default values, and the newest catalog.
    """
    size = m.ByteSize() - sum(lease.ByteSize() for lease in m.leases)
    if size > HELLO_BYTES_MAX:
        raise InvalidMessageError(
            f"the worker's description has {size} bytes; at most {HELLO_BYTES_MAX} are allowed: "
            "serve fewer kinds and models, or give the worker fewer labels"
        )


def worker_info(m: worker_service_pb2.Hello) -> WorkerInfo:
    """Returns the description in a hello, of any size. Raises InvalidMessageError if it is invalid."""
    if not m.worker_id or len(m.worker_id.encode()) > NAME_BYTES_MAX:
        raise InvalidMessageError(f"worker_id must have 1 to {NAME_BYTES_MAX} bytes, not {len(m.worker_id.encode())}")
    _check_names(m)
    capabilities = models.capabilities_of(m.capabilities)
    if not m.slots:
        raise InvalidMessageError("slots is 0; a worker runs at least 1 task at a time")
    return WorkerInfo(
        **{name: getattr(m, name) for name in _SAME_FIELDS},
        store_address=m.store_address,
        device_id=m.device.device_id or "cpu",
        nvlink_peers=tuple(peer.device_id for peer in m.device.peers if peer.nvlinks),
        device_wire=devices.device_wire(m.device),
        memory_total_bytes=min(
            (each.memory_total_bytes for each in m.device.members), default=m.device.memory_total_bytes
        ),
        capabilities=capabilities,
        models=models.models_of(m.models),
        labels=dict(m.labels),
        window_tasks=max(1, m.window_tasks),
        window_bytes=max(1, m.window_bytes),
    )


def hello_message(info: WorkerInfo) -> worker_service_pb2.Hello:
    """The hello from which worker_info() makes this description, without models and leases."""
    message = worker_service_pb2.Hello(store_address=info.store_address)
    _fill(message, info)
    return message


def _fill(message: worker_service_pb2.Hello | admin_service_pb2.Worker, info: WorkerInfo) -> None:
    """Fills the fields that Hello and admin_service's Worker have in common."""
    for name in _SAME_FIELDS:
        setattr(message, name, getattr(info, name))
    message.labels.update(info.labels)
    message.window_tasks, message.window_bytes = info.window_tasks, info.window_bytes
    message.device.CopyFrom(devices.device_message(info))
    for c in info.capabilities:
        message.capabilities.add(kind=c.kind, models=c.models, concurrency=c.concurrency)


def _check_names(m: worker_service_pb2.Hello) -> None:
    for field in ("worker_id", "host", "version", "store_address"):
        check_printable(field, getattr(m, field))
    check_printable("device_id", m.device.device_id)
    ids = [member.device_id for member in m.device.members]
    for device_id in ids:
        check_printable("device_id", device_id)
    if len(set(ids)) < len(ids):
        raise InvalidMessageError("device.members has a device_id twice")
    for key, value in m.labels.items():
        check_printable("label", f"{key}={value}")


def heartbeat(m: worker_service_pb2.Heartbeat, session: int) -> ev.Heartbeat:
    """Returns the event for a heartbeat. Raises InvalidMessageError if its catalog is invalid."""
    return ev.Heartbeat(
        session,
        [held_lease(x) for x in m.leases],
        m.last_frame,
        devices.telemetry_of(m.telemetry),
        models.residents(m),
        m.draining,
        devices.health_of(m.health) if m.HasField("health") else HEALTHY,
        EngineReport(
            embedding_cache=m.embedding_cache.SerializeToString() if m.HasField("embedding_cache") else None,
            mps=devices.serialize_cut(m.mps, "message") if m.HasField("mps") else b"",
            handlers=devices.serialize_cut(m.handlers, "version", "error") if m.HasField("handlers") else None,
        ),
        models.catalog(m.catalog) if m.HasField("catalog") else None,
        m.occupied_slots,
    )


def worker_message(worker: Worker) -> admin_service_pb2.Worker:
    """A worker as operators see it."""
    info = worker.info
    message = admin_service_pb2.Worker(
        state=_state(worker),
        cordoned=worker.cordon is not None,
        cordon_reason=worker.cordon.reason if worker.cordon is not None else "",
        quarantined=worker.quarantined,
        resident_models=worker.resident_models,
        models=[models.resident_message(r) for r in worker.residency.reported.values()],
        leases=len(worker.leases),
        leased_bytes=worker.leased_bytes,
        succeeded=worker.succeeded,
        failed=worker.failed,
        session_id=str(worker.session) if worker.session else "",
    )
    _fill(message, info)
    if worker.drain_deadline_s is not None:
        set_time(message.drain_deadline, worker.drain_deadline_s)
    if worker.session:  # a lost worker's last sample does not show its device's state now
        message.telemetry.CopyFrom(devices.telemetry_message(worker.telemetry))
        if worker.telemetry.sample_s:
            set_time(message.telemetry.sample_time, worker.telemetry.sample_s)
        devices.fill_health(message.health, worker.health)
    if worker.engine.mps:
        message.mps.ParseFromString(worker.engine.mps)
    if worker.engine.handlers is not None:
        message.handlers.SetInParent()  # present even if empty, for example while the engine starts
        message.handlers.ParseFromString(worker.engine.handlers)
    if worker.connect_s:
        set_time(message.connect_time, worker.connect_s)
    if worker.heard_s:
        set_time(message.last_heartbeat_time, worker.heard_s)
    return message


def _state(worker: Worker) -> admin_service_pb2.WorkerState:
    if not worker.session:
        return admin_service_pb2.WORKER_STATE_LOST
    if worker.draining or worker.stopping:
        return admin_service_pb2.WORKER_STATE_DRAINING
    return admin_service_pb2.WORKER_STATE_ACTIVE
