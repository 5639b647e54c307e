"""Settings in the journal, which survive a restart: the strategy, queue rules, workers with their cordons, the circuit
breaker.

Each is a setting in the journal: "strategy" holds a name; "queue/<name>", "worker/<id>" and "breaker" hold JSON.
"""

import base64
import dataclasses
import json
from collections.abc import Callable, Container
from typing import Any, TypeVar

from multigpu_master.core import events as ev
from multigpu_master.core.model import Cordon, Queue, Worker
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.errors import DAMAGE, damaged_setting_error
from multigpu_master.wire.devices import device_message
from multigpu_master.wire.times import SECONDS_MAX, SECONDS_MIN

STRATEGY, QUEUE, WORKER, BREAKER = "strategy", "queue/", "worker/", "breaker"
# The fields of WorkerInfo that are saved. Workers report the others again when they reconnect.
_SAVED_INFO_FIELDS = tuple(f.name for f in dataclasses.fields(WorkerInfo) if f.name not in ("models", "nvlink_peers"))
COUNT_END = 1 << 64
T = TypeVar("T")
Handle = Callable[[ev.Event], object]


def queue_setting(queue: Queue) -> dict[str, bytes | None]:
    """The setting of a queue; None removes it, if the queue has no rules."""
    rules = {
        "paused": queue.paused,
        "strategy": queue.strategy,
        "tasks_max": queue.tasks_max,
        "bytes_max": queue.bytes_max,
    }
    return {QUEUE + queue.name: json.dumps(rules).encode() if any(rules.values()) else None}


def worker_setting(worker: Worker) -> dict[str, bytes | None]:
    """The setting of a worker."""
    info = {name: getattr(worker.info, name) for name in _SAVED_INFO_FIELDS}
    info["device_wire"] = base64.b64encode(worker.info.device_wire).decode()
    info["capabilities"] = [dataclasses.asdict(capability) for capability in worker.info.capabilities]
    fields = {
        "info": info,
        "cordoned": worker.cordon is not None,
        "cordon_reason": worker.cordon.reason if worker.cordon is not None else "",
        "draining": worker.draining,
        "drain_deadline_s": min(worker.drain_deadline_s, SECONDS_MAX) if worker.drain_deadline_s is not None else None,
        "connected": bool(worker.session),
        "quarantined": worker.quarantined,
        "checks_asked": worker.checks_asked,
        "check_at_once": worker.check_at_once,
        "pinned_models": list(worker.residency.operator_pins),
    }
    return {WORKER + worker.worker_id: json.dumps(fields).encode()}


def breaker_setting(tripped_s: float) -> dict[str, bytes | None]:
    """The setting of the circuit breaker; None removes it, unless the breaker has tripped."""
    return {BREAKER: json.dumps({"tripped_s": tripped_s}).encode() if tripped_s else None}


def restore(handle: Handle, strategies: Container[str], settings: dict[str, bytes]) -> int:
    """Passes the settings to a new core as events. Returns how many workers were connected when the last master ended.
    Raises JournalError if a setting is damaged.
    """
    expected = 0
    for key, value in settings.items():
        try:
            if key == STRATEGY and value.decode() in strategies:
                handle(ev.SetStrategy(value.decode()))
            elif key.startswith(QUEUE):
                _restore_queue(handle, strategies, key.removeprefix(QUEUE), json.loads(value))
            elif key.startswith(WORKER):
                registration = _registration(json.loads(value))
                handle(registration)
                expected += registration.expected
            elif key == BREAKER:
                handle(ev.RestoreBreaker(_check_seconds(json.loads(value)["tripped_s"])))
        except DAMAGE as error:
            raise damaged_setting_error(key, error) from error
    return expected


def _restore_queue(handle: Handle, strategies: Container[str], name: str, rules: dict[str, Any]) -> None:
    tasks_max, bytes_max = _check_count(rules["tasks_max"]), _check_count(rules["bytes_max"])
    handle(ev.ConfigureQueue(name, _check_type(rules["paused"], bool), tasks_max, bytes_max))
    if _check_text(rules["strategy"]) in strategies:
        handle(ev.SetStrategy(rules["strategy"], name))


def _registration(fields: dict[str, Any]) -> ev.RegisterWorker:
    return ev.RegisterWorker(
        _info(fields["info"]),
        _cordon(fields),
        _check_type(fields["connected"], bool),
        _check_type(fields.get("quarantined", False), bool),
        _check_count(fields.get("checks_asked", 0)),
        tuple(_check_text(model) for model in fields.get("pinned_models", ())),
        _check_type(fields.get("check_at_once", False), bool),
    )


def _cordon(fields: dict[str, Any]) -> Cordon | None:
    if not _check_type(fields["cordoned"], bool):
        return None
    deadline_s = fields["drain_deadline_s"]
    return Cordon(
        _check_text(fields["cordon_reason"]),
        _check_type(fields["draining"], bool),
        _check_seconds(deadline_s) if deadline_s is not None else None,
    )


def _info(fields: dict[str, Any]) -> WorkerInfo:
    kept = {name: _check_field(name, value) for name, value in fields.items() if name in _SAVED_INFO_FIELDS}
    info = WorkerInfo(**kept)
    device_message(info)
    return info


def _capability(value: Any) -> Capability:
    models = tuple(map(_check_text, value["models"]))
    concurrency = _check_count(value.get("concurrency", 1))  # older journals lack it
    return Capability(kind=_check_text(value["kind"]), models=models, concurrency=concurrency)


def _check_field(name: str, value: Any) -> Any:
    match name:
        case "device_wire":
            return base64.b64decode(value, validate=True)
        case "capabilities":
            return tuple(_capability(each) for each in value)
        case "labels":
            return {_check_text(key): _check_text(label) for key, label in value.items()}
        case "worker_id" | "host" | "version" | "device_id" | "store_address":
            return _check_text(value)
    return _check_count(value, 1 << 32 if name in ("pid", "slots", "window_tasks") else COUNT_END)


def _check_type(value: Any, wanted: type[T]) -> T:
    if type(value) is not wanted:
        raise TypeError(f"{value!r} is not a {wanted.__name__}")
    return value


def _check_text(value: Any) -> str:
    """Raises UnicodeEncodeError, a ValueError, for surrogates: JSON can have them, but protobuf messages cannot."""
    _check_type(value, str).encode()
    return str(value)


def _check_count(value: Any, end: int = COUNT_END) -> int:
    if not 0 <= _check_type(value, int) < end:
        raise ValueError(f"{value!r} is out of range")
    return int(value)


def _check_seconds(value: Any) -> float:
    if isinstance(value, bool) or not SECONDS_MIN <= value <= SECONDS_MAX:
        raise ValueError(f"{value!r} is not a time in seconds")
    return float(value)
