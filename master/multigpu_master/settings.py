"""What survives a restart besides tasks: the strategy, the queues' rules, and the workers with their cordons.

Each is a setting in the journal: "strategy" holds a name; "queue/<name>" and "worker/<id>" hold JSON.
"""

import dataclasses
import json
from typing import Any

from multigpu.v1 import admin_service_pb2 as pb

from multigpu_master import wire
from multigpu_master.core import events as ev
from multigpu_master.core.model import Capability, Queue, Worker, WorkerInfo
from multigpu_master.core.scheduler import Core

STRATEGY, QUEUE, WORKER = "strategy", "queue/", "worker/"


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
    known = {
        "info": dataclasses.asdict(worker.info),
        "cordoned": worker.cordoned,
        "cordon_reason": worker.cordon_reason,
        "connected": bool(worker.session),
    }
    return {WORKER + worker.worker_id: json.dumps(known).encode()}


def restore(core: Core, settings: dict[str, bytes], now: float) -> int:
    """Tells a new core what was remembered. Returns how many workers were connected when the last master ended."""
    expected = 0
    for key, value in settings.items():
        if key == STRATEGY and value.decode() in core.strategies:
            core.handle(ev.SetStrategy(value.decode()), now)
        elif key.startswith(QUEUE):
            rules = json.loads(value)
            name = key.removeprefix(QUEUE)
            core.handle(ev.ConfigureQueue(name, rules["paused"], rules["tasks_max"], rules["bytes_max"]), now)
            if rules["strategy"] in core.strategies:
                core.handle(ev.SetStrategy(rules["strategy"], name), now)
        elif key.startswith(WORKER):
            known = json.loads(value)
            expected += known["connected"]
            core.handle(
                ev.RegisterWorker(_info(known["info"]), known["cordoned"], known["cordon_reason"], known["connected"]),
                now,
            )
    return expected


def _info(known: dict[str, Any]) -> WorkerInfo:
    fields = {f.name for f in dataclasses.fields(WorkerInfo)}
    kept = {k: v for k, v in known.items() if k in fields}
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
        cordoned=worker.cordoned,
        labels=dict(info.labels),
        resident_models=worker.resident_models,
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
    device = message.device
    device.device_id, device.name, device.product = info.device_id, info.device_name, info.device_product
    device.memory_total_bytes = info.memory_total_bytes
    for field, value in dataclasses.asdict(worker.telemetry).items():
        if field == "sample_s":
            if value:
                wire.set_time(message.telemetry.sample_time, value)
        elif value is not None:
            setattr(message.telemetry, field, value)
    for c in info.capabilities:
        message.capabilities.add(kind=c.kind, models=c.models)
    if worker.connect_s:
        wire.set_time(message.connect_time, worker.connect_s)
    if worker.heard_s:
        wire.set_time(message.last_heartbeat_time, worker.heard_s)
    return message
