"""Task specs: validated and interned, so that equal specs share one object."""

import math
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError
from multigpu._transport.names import MODEL_BYTES_MAX
from multigpu.v1 import task_pb2

from multigpu_master.core.spec import Spec
from multigpu_master.errors import InvalidMessageError, JournalDamagedError
from multigpu_master.wire.times import seconds_of
from multigpu_master.wire.validation import ATTEMPTS_MAX, NAME_BYTES_MAX, check_printable, check_size

PRIORITY_DEFAULT, ATTEMPTS_DEFAULT = 3, 3
BACKOFF_INITIAL_DEFAULT_S, BACKOFF_MAX_DEFAULT_S = 0.1, 30.0
DURABLE_TTL_DEFAULT_S, EPHEMERAL_TTL_DEFAULT_S = 86_400.0, 300.0
MAPPING_ENTRIES_MAX, MAPPING_BYTES_MAX = 64, 64 << 10  # of parameters and of required_labels
WORLD_SIZE_MAX = 1024
# A shorter timeout could end a task in the event that submits it, before the task is written to the journal.
TIMEOUT_MIN_S = 0.001
# The limit of queued tasks bounds specs up to SMALL_BYTES; LARGE_BYTES_MAX limits a queue's larger specs in total.
SMALL_BYTES = 1 << 10
LARGE_BYTES_MAX = 64 << 20


class SpecsFullError(Exception):
    """There are too many different large specs; the text says what to do."""


class SpecReader:
    """Validates and interns TaskSpec messages.

    `skew`: returns the seconds to add to a client's deadline to convert it to the master's clock. The first read of a
    spec adds them; later reads of an equal spec return the same Spec.
    """

    def __init__(self, result_ttl_max_s: float = math.inf, skew: Callable[[], float] = lambda: 0.0) -> None:
        self._specs: weakref.WeakValueDictionary[bytes, Spec] = weakref.WeakValueDictionary()
        self._messages: weakref.WeakKeyDictionary[Spec, task_pb2.TaskSpec] = weakref.WeakKeyDictionary()
        self._result_ttl_max_s = result_ttl_max_s
        self._large_bytes: Counter[str] = Counter()  # total size of the large specs, by queue
        self._skew = skew

    def read(self, message: task_pb2.TaskSpec, submitter: str = "") -> Spec:
        """Sets the message's submitter, and returns its Spec. Raises InvalidMessageError if the message is invalid, and
        SpecsFullError if the queue has too many large specs.
        """
        message.submitter = submitter
        wire = message.SerializeToString(deterministic=True)
        spec = self._specs.get(wire)
        if spec is None:
            # `restore` does not repeat these checks: an earlier master accepted the specs of the journal.
            check_size("content_type", message.content_type, NAME_BYTES_MAX)
            for field in ("content_type", "kind", "model", "queue"):
                check_printable(field, getattr(message, field))
            spec = _spec(message, wire, self._skew())
            both = message.HasField("backoff_initial") and message.HasField("backoff_max")
            if both and seconds_of(message.backoff_max) < spec.backoff_initial_s:
                raise InvalidMessageError(
                    f"backoff_max is {seconds_of(message.backoff_max):g} s; it must be at least backoff_initial, "
                    f"which is {spec.backoff_initial_s:g} s"
                )
            if spec.result_ttl_s > self._result_ttl_max_s:
                raise InvalidMessageError(
                    f"result_ttl is {spec.result_ttl_s:g} s; at most {self._result_ttl_max_s:g} s are allowed "
                    "(the master's result_ttl_max_s)"
                )
            if len(wire) > SMALL_BYTES and self._large_bytes[spec.queue] + len(wire) > LARGE_BYTES_MAX:
                raise SpecsFullError(
                    f"the different parameters and labels of tasks in queue {spec.queue!r} would take more than "
                    f"{LARGE_BYTES_MAX} bytes: share parameters among tasks, put data in payloads, or try again later"
                )
            self._intern(spec)
        return spec

    def _intern(self, spec: Spec) -> None:
        self._specs[spec.wire] = spec
        size = len(spec.wire)
        if size > SMALL_BYTES:
            self._large_bytes[spec.queue] += size
            weakref.finalize(spec, self._forget_size, spec.queue, size).atexit = False

    def _forget_size(self, queue: str, size: int) -> None:
        self._large_bytes[queue] -= size
        if not self._large_bytes[queue]:
            del self._large_bytes[queue]

    def restore(self, wire: bytes) -> Spec:
        """Returns the Spec of a serialized TaskSpec from the journal. Raises JournalDamagedError if it is damaged."""
        spec = self._specs.get(wire)
        if spec is not None:
            return spec
        try:
            spec = _spec(task_pb2.TaskSpec.FromString(wire), wire, self._skew())
        except (DecodeError, InvalidMessageError) as error:
            raise JournalDamagedError(
                f"The journal holds a task whose spec is damaged ({error}). Restore the data directory from a backup, "
                "or run `mgpu-master --data-dir DIR salvage`, which removes such tasks and says which."
            ) from error
        self._intern(spec)
        return spec

    def message(self, spec: Spec) -> task_pb2.TaskSpec:
        """The message of a Spec. Callers must not change it."""
        message = self._messages.get(spec)
        if message is None:
            message = self._messages[spec] = task_pb2.TaskSpec.FromString(spec.wire)
        return message


def _spec(m: task_pb2.TaskSpec, wire: bytes, skew_s: float) -> Spec:
    check_size("kind", m.kind, NAME_BYTES_MAX)
    if not m.kind:
        raise InvalidMessageError('kind is missing; name the kind of the task, for example "embed"')
    check_size("model", m.model, MODEL_BYTES_MAX)
    check_size("queue", m.queue, NAME_BYTES_MAX)
    if not 0 <= m.priority <= 5:
        raise InvalidMessageError(
            f"priority {m.priority} is out of range; use 1 (served first) to 5, or 0 for {PRIORITY_DEFAULT}"
        )
    if not 0 <= m.attempts_max <= ATTEMPTS_MAX:
        raise InvalidMessageError(f"attempts_max {m.attempts_max} is out of range; use 1 to {ATTEMPTS_MAX}")
    _check_mapping("parameters", m.parameters)
    if reserved := next((name for name in m.parameters if name.startswith("multigpu.")), None):
        raise InvalidMessageError(f"parameter {reserved!r} is reserved: use a name that does not begin with multigpu.")
    _check_mapping("required_labels", m.required_labels)
    if m.durability not in task_pb2.Durability.values():
        raise InvalidMessageError(f"durability {m.durability} is unknown; use DURABLE or EPHEMERAL")
    if not 0 <= m.world_size <= WORLD_SIZE_MAX:
        raise InvalidMessageError(f"world_size {m.world_size} is out of range; use 1 to {WORLD_SIZE_MAX}")
    if not 0 <= m.world_size_min <= (m.world_size or 1):
        raise InvalidMessageError(f"world_size_min {m.world_size_min} is out of range; use 1 to world_size")
    durable = m.durability != task_pb2.DURABILITY_EPHEMERAL
    initial_s = _duration(m, "backoff_initial") or BACKOFF_INITIAL_DEFAULT_S
    identifying = task_pb2.TaskSpec(kind=m.kind, model=m.model, content_type=m.content_type, parameters=m.parameters)
    return Spec(
        kind=m.kind,
        model=m.model,
        queue=m.queue or "default",
        priority=m.priority or PRIORITY_DEFAULT,
        labels=tuple(sorted(m.required_labels.items())),
        memory_bytes=m.required_device_memory_bytes,
        deadline_s=seconds_of(m.deadline) + skew_s if m.HasField("deadline") else None,
        queue_timeout_s=_duration(m, "queue_timeout", TIMEOUT_MIN_S),
        run_timeout_s=_duration(m, "run_timeout", TIMEOUT_MIN_S),
        attempts_max=m.attempts_max or ATTEMPTS_DEFAULT,
        backoff_initial_s=initial_s,
        backoff_max_s=max(initial_s, _duration(m, "backoff_max") or BACKOFF_MAX_DEFAULT_S),
        durable=durable,
        result_ttl_s=_duration(m, "result_ttl") or (DURABLE_TTL_DEFAULT_S if durable else EPHEMERAL_TTL_DEFAULT_S),
        wait_for_worker=m.wait_for_worker,
        retry_failed=m.retry_failed,
        world_size=m.world_size or 1,
        world_size_min=m.world_size_min or m.world_size or 1,
        spread_ranks=m.spread_ranks and m.world_size > 1,
        submitter=m.submitter,
        identity=zlib.crc32(identifying.SerializeToString(deterministic=True)) >> 1,
        wire=wire,
    )


def _duration(m: task_pb2.TaskSpec, field: str, at_least_s: float = 0.0) -> float | None:
    if not m.HasField(field):
        return None
    value = seconds_of(getattr(m, field))
    if not value > 0 or not math.isfinite(value):
        raise InvalidMessageError(f"{field} is {value:g} s; it must be above zero, or absent")
    if value < at_least_s:
        raise InvalidMessageError(f"{field} is {value:g} s; it must be at least {at_least_s:g} s, or absent")
    return value


def _check_mapping(field: str, items: Mapping[str, str]) -> None:
    if len(items) > MAPPING_ENTRIES_MAX:
        raise InvalidMessageError(f"{field} has {len(items)} entries; at most {MAPPING_ENTRIES_MAX} are allowed")
    size = sum(len(k.encode()) + len(v.encode()) for k, v in items.items())
    if size > MAPPING_BYTES_MAX:
        raise InvalidMessageError(
            f"{field} has {size} bytes; at most {MAPPING_BYTES_MAX} are allowed: put data in the payload"
        )
