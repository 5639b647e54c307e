"""What survives a restart besides tasks: the strategy, the queues' rules, the workers with their cordons, and by how
much the clock differs from the host's.

Each is a setting in the journal: "strategy" holds a name; "queue/<name>", "worker/<id>", "breaker" and "clock" hold
JSON.
"""

import base64
import dataclasses
import json
from typing import Any

from multigpu.v1 import admin_service_pb2 as pb
from multigpu.v1 import device_pb2

from multigpu_master.clock import SavedSkew
from multigpu_master.core import events as ev
from multigpu_master.core.model import Cordon, Queue, Worker
from multigpu_master.core.scheduler import Core
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.journal.protocol import JournalError
from multigpu_master.wire import devices as wire_devices
from multigpu_master.wire import messages as wire
from multigpu_master.wire import models as wire_models

STRATEGY, QUEUE, WORKER, BREAKER, CLOCK = "strategy", "queue/", "worker/", "breaker", "clock"
# What a worker offers, model by model, it says again when it comes back.
_INFO = tuple(f.name for f in dataclasses.fields(WorkerInfo) if f.name != "models")
# What a damaged setting makes its reader raise.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


def queue_setting(queue: Queue) -> dict[str, bytes | None]:
    """What to remember of a queue; nothing if it has no rules of its own."""
    rules = {
        "paused": queue.paused,
        "strategy": queue.strategy,
        "tasks_max": queue.tasks_max,
        "bytes_max": queue.bytes_max,
    }
    return {QUEUE + queue.name: json.dumps(rules).encode() if any(rules.values()) else None}


def worker_setting(worker: Worker) -> dict[str, bytes | None]:
    """What to remember of a worker."""
    info = {name: getattr(worker.info, name) for name in _INFO}
    info["device_wire"] = base64.b64encode(worker.info.device_wire).decode()
    info["capabilities"] = [{"kind": c.kind, "models": c.models} for c in worker.info.capabilities]
    known = {
        "info": info,
        "cordoned": worker.cordon is not None,
        "cordon_reason": worker.cordon.reason if worker.cordon is not None else "",
        "connected": bool(worker.session),
        "quarantined": worker.quarantined,
        "checks_asked": worker.checks_asked,
        "pinned_models": list(worker.residency.pins),
    }
    return {WORKER + worker.worker_id: json.dumps(known).encode()}


def breaker_setting(tripped_s: float) -> dict[str, bytes | None]:
    """What to remember of the circuit breaker; nothing unless it has tripped."""
    return {BREAKER: json.dumps({"tripped_s": tripped_s}).encode() if tripped_s else None}


def clock_setting(saved: SavedSkew) -> dict[str, bytes | None]:
    """What to remember of the clock; nothing while it goes with the host's."""
    return {CLOCK: json.dumps(dataclasses.asdict(saved)).encode() if saved.skew_s else None}


def saved_skew(settings: dict[str, bytes]) -> SavedSkew | None:
    """What was remembered of the clock. Needed before all else: nothing may expire by a clock without it."""
    if CLOCK not in settings:
        return None
    try:
        known = json.loads(settings[CLOCK])
        # A message knows the range.
        time_s = wire.seconds_of(wire.timestamp(known["time_s"]))
        wall_s = wire.seconds_of(wire.timestamp(known["time_s"] - known["skew_s"]))
        return SavedSkew(time_s - wall_s, time_s)
    except _DAMAGE as error:
        raise _damaged(CLOCK, error) from error


def restore(core: Core, settings: dict[str, bytes], now: float) -> int:
    """Tells a new core what was remembered. Returns how many workers were connected when the last master ended."""
    expected = 0
    for key, value in settings.items():
        try:
            expected += _restore_one(core, key, value, now)
        except _DAMAGE as error:
            raise _damaged(key, error) from error
    return expected


def _damaged(key: str, error: Exception) -> JournalError:
    return JournalError(
        f"The journal's setting {key!r} is damaged ({error!r}). Restore the data directory from a backup, or remove "
        "its row from the table `setting` of journal.sqlite3 (with sqlite3)."
    )


def _restore_one(core: Core, key: str, value: bytes, now: float) -> int:
    """1 if it is of a worker that was connected, else 0. Raises whatever a damaged setting makes it raise."""
    if key == STRATEGY and value.decode() in core.strategies:
        core.handle(ev.SetStrategy(value.decode()), now)
    elif key.startswith(QUEUE):
        rules = json.loads(value)
        # A message knows the types, and the ranges.
        limits = pb.QueueLimits(tasks_max=rules["tasks_max"], bytes_max=rules["bytes_max"])
        queue = pb.Queue(
            queue=key.removeprefix(QUEUE), paused=rules["paused"], strategy=rules["strategy"], limits=limits
        )
        core.handle(ev.ConfigureQueue(queue.queue, queue.paused, limits.tasks_max, limits.bytes_max), now)
        if queue.strategy in core.strategies:
            core.handle(ev.SetStrategy(queue.strategy, queue.queue), now)
    elif key.startswith(WORKER):
        known = json.loads(value)
        info = _info(known["info"])
        told = pb.Worker(cordoned=known["cordoned"], quarantined=known.get("quarantined", False))
        health = device_pb2.DeviceHealth(checks_passed=known.get("checks_asked", 0))
        worker_message(Worker(info, cordon=Cordon(known["cordon_reason"]))).SerializeToString()
        if not (isinstance(known["connected"], bool) and isinstance(known["cordon_reason"], str)):
            raise TypeError(f"connected is {known['connected']!r}, cordon_reason {known['cordon_reason']!r}")
        reason, connected, asked = known["cordon_reason"], known["connected"], health.checks_passed
        pins = tuple(pb.Worker(resident_models=known.get("pinned_models", ())).resident_models)
        core.handle(ev.RegisterWorker(info, told.cordoned, reason, connected, told.quarantined, asked, pins), now)
        return int(known["connected"])
    elif key == BREAKER:
        trip_time = wire.timestamp(json.loads(value)["tripped_s"])
        core.handle(ev.RestoreBreaker(wire.seconds_of(trip_time)), now)
    return 0


def _info(known: dict[str, Any]) -> WorkerInfo:
    kept = {k: v for k, v in known.items() if k in _INFO}
    kept["device_wire"] = base64.b64decode(kept.get("device_wire", ""), validate=True)
    kept["capabilities"] = tuple(
        Capability(kind=c["kind"], models=tuple(c["models"])) for c in kept.get("capabilities", ())
    )
    return WorkerInfo(**kept)


def worker_message(worker: Worker) -> pb.Worker:
    """A worker as operators see it."""
    info = worker.info
    message = pb.Worker(
        worker_id=info.worker_id,
        host=info.host,
        version=info.version,
        pid=info.pid,
        cordoned=worker.cordon is not None,
        cordon_reason=worker.cordon.reason if worker.cordon is not None else "",
        quarantined=worker.quarantined,
        labels=dict(info.labels),
        resident_models=worker.resident_models,
        models=[wire_models.resident_message(r) for r in worker.residency.reported.values()],
        model_memory_bytes=info.model_memory_bytes,
        slots=info.slots,
        window_tasks=info.window_tasks,
        window_bytes=info.window_bytes,
        leases=len(worker.leases),
        leased_bytes=worker.leased_bytes,
        succeeded=worker.succeeded,
        failed=worker.failed,
        session_id=str(worker.session) if worker.session else "",
    )
    if not worker.session:
        message.state = pb.WORKER_STATE_LOST
    elif worker.draining or worker.stopping:
        message.state = pb.WORKER_STATE_DRAINING
    else:
        message.state = pb.WORKER_STATE_ACTIVE
    if worker.drain_deadline_s is not None:
        wire.set_time(message.drain_deadline, worker.drain_deadline_s)
    message.device.CopyFrom(wire_devices.device_message(info))
    if worker.session:  # what a lost worker said last is not the state of its device now
        message.telemetry.CopyFrom(wire_devices.telemetry_message(worker.telemetry))
        if worker.telemetry.sample_s:
            wire.set_time(message.telemetry.sample_time, worker.telemetry.sample_s)
        wire.fill_health(message.health, worker.health)
    if worker.engine.mps:
        message.mps.ParseFromString(worker.engine.mps)
    if worker.engine.handlers:
        message.handlers.ParseFromString(worker.engine.handlers)
    for c in info.capabilities:
        message.capabilities.add(kind=c.kind, models=c.models)
    if worker.connect_s:
        wire.set_time(message.connect_time, worker.connect_s)
    if worker.heard_s:
        wire.set_time(message.last_heartbeat_time, worker.heard_s)
    return message
