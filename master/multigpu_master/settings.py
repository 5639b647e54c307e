"""Settings in the journal, which survive a restart: the strategy, queue rules, workers with their cordons, the circuit
breaker.

The value of "strategy" is a name; the values of "queue/<name>", "worker/<id>" and "breaker" are JSON. A worker's JSON
has the worker's hello without models and leases: workers report these again when they reconnect.
"""

import json
from collections.abc import Callable, Container
from typing import Any, TypeVar

import structlog
from google.protobuf import json_format
from multigpu.v1 import worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import Cordon, Queue, Worker
from multigpu_master.errors import PARSE_ERRORS, InvalidMessageError, JournalError, damaged_setting_error
from multigpu_master.security.tokens import Tokens
from multigpu_master.wire.times import SECONDS_MAX, SECONDS_MIN
from multigpu_master.wire.workers import hello_message, worker_info

log = structlog.get_logger()

STRATEGY, QUEUE_PREFIX, WORKER_PREFIX, BREAKER = "strategy", "queue/", "worker/", "breaker"
UINT64_END = 1 << 64
T = TypeVar("T")
Handle = Callable[[ev.Event], object]


def queue_setting(queue: Queue) -> dict[str, bytes | None]:
    """The setting of a queue. If the queue has no rules, the value is None, which deletes the setting."""
    rules = {
        "paused": queue.paused,
        "strategy": queue.strategy,
        "tasks_max": queue.tasks_max,
        "bytes_max": queue.bytes_max,
    }
    return {QUEUE_PREFIX + queue.name: json.dumps(rules).encode() if any(rules.values()) else None}


def worker_setting(worker: Worker) -> dict[str, bytes | None]:
    """The setting of a worker."""
    fields = {
        "hello": json_format.MessageToDict(hello_message(worker.info), preserving_proto_field_name=True),
        "cordoned": worker.cordon is not None,
        "cordon_reason": worker.cordon.reason if worker.cordon is not None else "",
        "draining": worker.draining,
        "drain_deadline_s": min(worker.drain_deadline_s, SECONDS_MAX) if worker.drain_deadline_s is not None else None,
        "connected": bool(worker.session),
        "quarantined": worker.quarantined,
        "requested_check": worker.requested_check,
        "check_at_once": worker.check_at_once,
        "pinned_models": list(worker.residency.operator_pins),
    }
    return {WORKER_PREFIX + worker.worker_id: json.dumps(fields).encode()}


def breaker_setting(tripped_s: float) -> dict[str, bytes | None]:
    """The setting of the circuit breaker. If it has not tripped, the value is None, which deletes the setting."""
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
            elif key == STRATEGY:
                log.warning(
                    "the saved strategy is not installed, the configured strategy is used", strategy=value.decode()
                )
            elif key.startswith(QUEUE_PREFIX):
                _restore_queue(handle, strategies, key.removeprefix(QUEUE_PREFIX), json.loads(value))
            elif key.startswith(WORKER_PREFIX):
                registration = _registration(json.loads(value))
                if registration.info.worker_id != key.removeprefix(WORKER_PREFIX):
                    raise ValueError(f"it describes the worker {registration.info.worker_id!r}")
                handle(registration)
                expected += registration.expected
            elif key == BREAKER:
                handle(ev.RestoreBreaker(_check_seconds(json.loads(value)["tripped_s"])))
        except (*PARSE_ERRORS, json_format.ParseError, InvalidMessageError) as error:
            raise damaged_setting_error(key, error) from error
    return expected


class _AllNames:
    def __contains__(self, _name: object) -> bool:
        return True


def damage_of(key: str, value: bytes) -> str:
    """Returns why a master cannot start with this setting, or "" if it can."""
    try:
        restore(lambda _event: None, _AllNames(), {key: value})
        Tokens({key: value}, lambda: 0.0)
    except JournalError as error:
        return repr(error.__cause__)
    return ""


def _restore_queue(handle: Handle, strategies: Container[str], name: str, rules: dict[str, Any]) -> None:
    if not name:
        raise ValueError("the queue has no name")
    tasks_max, bytes_max = _check_count(rules["tasks_max"]), _check_count(rules["bytes_max"])
    handle(ev.ConfigureQueue(name, _check_type(rules["paused"], bool), tasks_max, bytes_max))
    if _check_text(rules["strategy"]) in strategies:
        handle(ev.SetStrategy(rules["strategy"], name))
    elif rules["strategy"]:
        log.warning(
            "the saved strategy of a queue is not installed, the fleet's strategy is used", queue=name,
            strategy=rules["strategy"],
        )  # fmt: skip


def _registration(fields: dict[str, Any]) -> ev.RegisterWorker:
    return ev.RegisterWorker(
        worker_info(json_format.ParseDict(fields["hello"], worker_service_pb2.Hello(), ignore_unknown_fields=True)),
        _cordon(fields),
        _check_type(fields["connected"], bool),
        _check_type(fields["quarantined"], bool),
        _check_count(fields["requested_check"]),
        tuple(_check_text(model) for model in _check_type(fields["pinned_models"], list)),
        _check_type(fields["check_at_once"], bool),
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


def _check_type(value: Any, expected_type: type[T]) -> T:
    if type(value) is not expected_type:
        raise TypeError(f"{value!r} is not a {expected_type.__name__}")
    return value


def _check_text(value: Any) -> str:
    """Raises UnicodeEncodeError, a ValueError, for surrogates: JSON can have them, but protobuf messages cannot."""
    _check_type(value, str).encode()
    return str(value)


def _check_count(value: Any) -> int:
    if not 0 <= _check_type(value, int) < UINT64_END:
        raise ValueError(f"{value!r} is out of range")
    return int(value)


def _check_seconds(value: Any) -> float:
    if isinstance(value, bool) or not SECONDS_MIN <= value <= SECONDS_MAX:
        raise ValueError(f"{value!r} is not a time in seconds")
    return float(value)
