"""The options of a task, beside its kind and payload, and the TaskSpec that is built from them.

Tasks with the same options share one TaskSpec object; consecutive tasks of a frame share one copy.
"""

import dataclasses
import difflib
import threading
import uuid
from collections.abc import AsyncIterable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypedDict, TypeVar, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from multigpu.errors import INVALID_ARGUMENT, InvalidTaskError
from multigpu.outcome import OutcomeState
from multigpu.task import TaskState
from multigpu.v1 import generate_pb2, task_pb2, task_service_pb2

T = TypeVar("T")
# What an asynchronous client takes many inputs from.
AnyIterable = Iterable[T] | AsyncIterable[T]
# Limit of specs in the cache; beyond it the oldest is removed.
_SPECS_MAX = 256
# What AdminClient.usage sums by.
USAGE_KEYS = ("queue", "submitter", "kind", "model")


class EmbedOptions(TypedDict, total=False):
    """Options of calls with a parameter `model`. Every one is optional; task.proto has the limits.

    Attributes:
        queue: the queue; default "default".
        priority: 1 (served first) to 5; default 3.
        parameters: passed to the handler, or to an engine of your own, unchanged; multigpu's engines take none.
        labels: only workers with all of these labels may take the task.
        device_memory_bytes: only workers whose device has this much free memory may take the task.
        deadline: with a time zone. A task that has not ended by then ends EXPIRED.
        queue_timeout_s: limit of the wait for the first attempt, in seconds.
        run_timeout_s: limit of each attempt, in seconds.
        attempts_max: limit of the number of attempts; default 3.
        backoff_initial_s: the wait before the second attempt, at most; each later wait is twice as long. Default 0.1.
        backoff_max_s: limit of the wait before an attempt; default 30.
        ephemeral: the task is not written to the master's disk, and is lost when the master ends.
        result_ttl_s: how long the outcome can be fetched after the task has ended, in seconds.
        wait_for_worker: queue the task even if no known worker could ever take it.
        retry_failed: run the request_id again if its task ended without success; the payload may differ. Default:
            return its error.
        timeout: the most seconds that the call may block; in a map or a stream, the wait for each result. After it the
            call raises CallTimeoutError, and cancels the tasks that it has started; a submit cancels nothing, as the
            master may have accepted its tasks. Default: the client's, which is no limit unless it was set. math.inf:
            no limit.
    """

    queue: str
    priority: int
    parameters: Mapping[str, str]
    labels: Mapping[str, str]
    device_memory_bytes: int
    deadline: datetime
    queue_timeout_s: float
    run_timeout_s: float
    attempts_max: int
    backoff_initial_s: float
    backoff_max_s: float
    ephemeral: bool
    result_ttl_s: float
    wait_for_worker: bool
    retry_failed: bool
    timeout: float | None


class SpecOptions(EmbedOptions, total=False):
    """Options that all tasks of a call share: those of EmbedOptions, and four more.

    Attributes:
        model: the model, for kinds that have models; default: the worker's own.
        world_size: so many workers run the task at the same time, each as one rank; default 1.
        world_size_min: so many are enough: it begins with those that are idle, at most world_size, and begins again
            with more when it has saved a checkpoint; default: world_size.
        spread_ranks: put the ranks on as many hosts as possible; default: on as few.
    """

    model: str
    world_size: int
    world_size_min: int
    spread_ranks: bool


class CallOptions(EmbedOptions, total=False):
    """Options of a single task in calls with a parameter `model`: those of EmbedOptions, and two more.

    Attributes:
        request_id: the idempotency key: for at least 24 h, the same request_id returns the same task. Default: a new
            one.
        partition_key: under the strategy static_partition, tasks with the same key go to the same worker while it
            lives.
    """

    request_id: str | uuid.UUID
    partition_key: str


class TaskOptions(SpecOptions, total=False):
    """Options of a single task: those of SpecOptions and CallOptions, and one more.

    Attributes:
        units: the amount of work, in the unit of the task's kind; default 1.
    """

    request_id: str | uuid.UUID
    partition_key: str
    units: int


class MapOptions(EmbedOptions, total=False):
    """Options of maps whose method has a parameter `model`: those of EmbedOptions, and four more.

    Attributes:
        ordered: results in the order of the payloads (the default), or as tasks end.
        max_in_flight: at most this many payloads are submitted ahead of the results taken. Default: the client's.
        return_exceptions: return the errors of tasks in place of their results. Default: an error ends the map and
            cancels its other tasks.
        progress: show a progress bar. It needs the package tqdm.
    """

    ordered: bool
    max_in_flight: int | None
    return_exceptions: bool
    progress: bool


class SpecMapOptions(MapOptions, total=False):
    """Options of maps of any kind: those of MapOptions and SpecOptions."""

    model: str
    world_size: int
    world_size_min: int
    spread_ranks: bool


class TaskFilter(TypedDict, total=False):
    """Which tasks: those that match all of these."""

    # In any of these states.
    states: Iterable[TaskState]
    # Ended in any of these ways.
    outcomes: Iterable[OutcomeState]
    queue: str
    kind: str
    model: str
    # Leased to this worker or ended by it.
    worker_id: str
    # With a time zone.
    submitted_after: datetime
    submitted_before: datetime
    # True: only tasks whose last attempt failed or was lost, and that wait to run again.
    retrying: bool


def filter_of(filters: TaskFilter) -> task_service_pb2.TaskFilter:
    """TypeError or ValueError: an unknown filter, or a value that it can't be."""
    wanted: dict[str, Any] = dict(filters)
    for name in ("submitted_after", "submitted_before"):
        if (instant := wanted.pop(name, None)) is not None:
            wanted[name] = timestamp_of(instant)
    for name, cls in (("states", TaskState), ("outcomes", OutcomeState)):
        if name in wanted:
            wanted[name] = tuple(wanted[name])
            if wrong := [each for each in wanted[name] if not isinstance(each, cls)]:
                raise TypeError(f"{name} takes members of multigpu.{cls.__name__}, not {wrong[0]!r}")
    if unknown := wanted.keys() - TaskFilter.__annotations__.keys():
        raise TypeError(f"there is no filter {unknown.pop()!r}; there are {', '.join(TaskFilter.__annotations__)}")
    return task_service_pb2.TaskFilter(**wanted)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A payload with its own options, for calls that take many payloads (map, submit_many)."""

    payload: Any
    request_id: str | uuid.UUID | None = None
    partition_key: str = ""
    units: int = 0


# Option -> field of TaskSpec: values that are set unchanged, then maps, then durations.
_PLAIN = {
    "model": "model",
    "queue": "queue",
    "priority": "priority",
    "attempts_max": "attempts_max",
    "device_memory_bytes": "required_device_memory_bytes",
    "wait_for_worker": "wait_for_worker",
    "retry_failed": "retry_failed",
    "world_size": "world_size",
    "world_size_min": "world_size_min",
    "spread_ranks": "spread_ranks",
}
_MAPS = {"parameters": "parameters", "labels": "required_labels"}
_DURATIONS = {
    "queue_timeout_s": "queue_timeout",
    "run_timeout_s": "run_timeout",
    "backoff_initial_s": "backoff_initial",
    "backoff_max_s": "backoff_max",
    "result_ttl_s": "result_ttl",
}
# What people call a task's attempts elsewhere.
_RETRIES = ("retries", "max_retries")
# Options that are no task's, but of a kind's own method.
_GENERATE = generate_pb2.GeneratePayload.DESCRIPTOR.fields_by_name
_OF_METHODS = {"classify": ("top_k",), "embed": ("batch_size",), "generate": tuple(_GENERATE)}
_PER_TASK = ("request_id", "partition_key", "units")
_UNITS_MAX = (1 << 32) - 1


class SpecCache:
    """Builds specs, and returns the same object for the same options."""

    def __init__(self, defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults`: options that are used where they are not given."""
        self._defaults = defaults or {}
        self._specs: dict[Any, task_pb2.TaskSpec] = {}
        # Held to write: threads may share a client.
        self._building = threading.Lock()

    def get(self, kind: str, content_type: str, options: Mapping[str, Any]) -> task_pb2.TaskSpec:
        """The spec for SpecOptions. TypeError: there is no such option; InvalidTaskError: a value is wrong."""
        fold = getattr(options.get("deadline"), "fold", 0)  # the two times of an hour that comes twice are equal
        key: Any = (kind, content_type, fold, *options.items()) if options else (kind, content_type)
        try:
            spec = self._specs.get(key)
        except TypeError:  # not hashable: parameters and labels are dicts
            pairs = ((n, tuple(v.items()) if isinstance(v, Mapping) else v) for n, v in options.items())
            key = (kind, content_type, fold, *pairs)
            try:
                spec = self._specs.get(key)
            except TypeError:
                return _build(kind, content_type, {**self._defaults, **options})  # raises, and names the wrong option
        if spec is None:
            spec = _build(kind, content_type, {**self._defaults, **options})
            with self._building:
                if len(self._specs) >= _SPECS_MAX:
                    del self._specs[next(iter(self._specs))]
                self._specs[key] = spec
        return spec


def per_task_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the options of TaskInput from `options` and returns them. Raises InvalidTaskError for a value that the
    field can't hold; later it would break the stream that many calls share.
    """
    return {
        name: value for name in _PER_TASK if name in options and (value := _per_task_value(name, options.pop(name)))
    }


def _per_task_value(name: str, value: Any) -> str | int:
    """An option of TaskInput, converted for its field; "" or 0: the default."""
    value = str(value) if isinstance(value, uuid.UUID) else value
    if value == "" and name == "request_id":
        raise InvalidTaskError(INVALID_ARGUMENT, "the request_id is empty: give one, or leave it out")
    try:
        if isinstance(value, bytes):
            raise TypeError  # noqa: TRY301  protobuf takes bytes as text
        field: str | int = getattr(task_pb2.TaskInput(**{name: value}), name) if value else ""
    except (TypeError, ValueError):
        wanted = f"a whole number up to {_UNITS_MAX:,}" if name == "units" else "a str of valid Unicode, or a uuid.UUID"
        raise InvalidTaskError(INVALID_ARGUMENT, f"task option {name}={value!r}: give {wanted}") from None
    return field


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], SpecOptions]:
    """The options of a single task, and those that tasks share."""
    shared = dict(options)
    return per_task_fields(shared), cast("SpecOptions", shared)


def _build(kind: str, content_type: str, options: Mapping[str, Any]) -> task_pb2.TaskSpec:
    if not isinstance(kind, str):
        name = getattr(kind, "kind", None)  # of a handler
        hint = f": write {kind.__name__}.run(client, …), or the kind {name!r}" if isinstance(name, str) else ""
        raise TypeError(f"a task's kind is a str, not {type(kind).__name__}{hint}")
    known = TaskOptions.__annotations__
    spec = task_pb2.TaskSpec(content_type=content_type)
    try:
        spec.kind = kind
    except ValueError as error:
        raise InvalidTaskError(INVALID_ARGUMENT, f"the kind is not text: {error}") from error
    for name, value in options.items():
        _check_name(name, kind)
        try:
            _set(spec, name, value)
        except TypeError as error:  # protobuf's message doesn't name the expected type
            wanted = str(known[name]).removeprefix("<class '").removeprefix("collections.abc.").removesuffix("'>")
            raise InvalidTaskError(INVALID_ARGUMENT, f"task option {name}={value!r}: give {wanted}") from error
        except ValueError as error:
            raise InvalidTaskError(INVALID_ARGUMENT, f"task option {name}={value!r}: {error}") from error
    return spec


def _set(spec: task_pb2.TaskSpec, name: str, value: Any) -> None:
    if name in ("priority", "attempts_max") and value == 0:
        raise ValueError("it begins at 1; leave it out for the default")
    if name in _PLAIN:
        setattr(spec, _PLAIN[name], value)
    elif name in _MAPS:
        if not isinstance(value, Mapping):
            raise TypeError
        getattr(spec, _MAPS[name]).update(value)
    elif name in _DURATIONS:
        getattr(spec, _DURATIONS[name]).CopyFrom(to_proto_duration(value))
    elif name == "deadline":
        spec.deadline.CopyFrom(timestamp_of(value))
    else:
        assert name == "ephemeral", name
        spec.durability = task_pb2.DURABILITY_EPHEMERAL if value else task_pb2.DURABILITY_DURABLE


def timestamp_of(value: Any) -> Timestamp:
    """ValueError: it is no datetime, has no time zone, or lies outside the years 1 to 9999 in UTC."""
    if not isinstance(value, datetime):
        wrong = "it is no datetime; use datetime.now(UTC) + timedelta(…), or for seconds run_timeout_s"
        raise ValueError(wrong)  # noqa: TRY004  as for any other value
    if value.tzinfo is None:
        raise ValueError("it has no time zone; use datetime.now(UTC) + timedelta(…)")
    found = Timestamp()
    try:
        found.FromDatetime(value)
    except OverflowError:
        raise ValueError("it is outside the years 1 to 9999 in UTC") from None
    return found


def _check_name(name: str, kind: str) -> None:
    known = TaskOptions.__annotations__
    if name in _PER_TASK:
        raise TypeError(
            f"{name} belongs to one task: give it with each payload, as multigpu.Input(payload=…, {name}=…)"
        )
    if name not in known:
        methods = dict.fromkeys(MapOptions.__annotations__, " of a map") | dict.fromkeys(known, "")
        methods |= dict.fromkeys(_OF_METHODS.get(kind, ()), f" of the client's method {kind}")
        if name in methods:
            raise TypeError(f"{name} is an option{methods[name]}: give it there")
        raise unknown_option(name, methods)


def unknown_option(name: str, methods: Mapping[str, str]) -> TypeError:
    """`methods`: of each option, the text that says where it is given."""
    if name in _RETRIES:
        hint = "retries is an option of the handler: `@multigpu.handler(retries=…)`; attempts_max is that of a task"
    elif near := difflib.get_close_matches(name, methods, n=1):
        hint = f"did you mean {near[0]!r}{methods[near[0]]}?"
    else:
        there = f"there are {', '.join(methods)}"
        hint = f"{there}. Arguments of a handler go into handler.run(client, …), or multigpu.Arguments(…)"
    return TypeError(f"there is no task option {name!r}; {hint}")


def to_proto_duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration. ValueError: negative or not a number."""
    if not 0 <= seconds < 1e10:  # false for NaN too
        raise ValueError("a duration is a number of seconds, 0 or more")
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
