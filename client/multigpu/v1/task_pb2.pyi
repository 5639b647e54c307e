import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_DURABLE: _ClassVar[Durability]
    DURABILITY_EPHEMERAL: _ClassVar[Durability]

class TaskState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_STATE_UNSPECIFIED: _ClassVar[TaskState]
    TASK_STATE_QUEUED: _ClassVar[TaskState]
    TASK_STATE_LEASED: _ClassVar[TaskState]
    TASK_STATE_SETTLED: _ClassVar[TaskState]

class OutcomeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_STATE_UNSPECIFIED: _ClassVar[OutcomeState]
    OUTCOME_STATE_SUCCEEDED: _ClassVar[OutcomeState]
    OUTCOME_STATE_FAILED: _ClassVar[OutcomeState]
    OUTCOME_STATE_CANCELLED: _ClassVar[OutcomeState]
    OUTCOME_STATE_EXPIRED: _ClassVar[OutcomeState]
    OUTCOME_STATE_DEAD_LETTERED: _ClassVar[OutcomeState]
    OUTCOME_STATE_RESULT_MISSING: _ClassVar[OutcomeState]

class EnergyMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENERGY_METHOD_UNSPECIFIED: _ClassVar[EnergyMethod]
    ENERGY_METHOD_COUNTER: _ClassVar[EnergyMethod]
    ENERGY_METHOD_SAMPLED_POWER: _ClassVar[EnergyMethod]
DURABILITY_UNSPECIFIED: Durability
DURABILITY_DURABLE: Durability
DURABILITY_EPHEMERAL: Durability
TASK_STATE_UNSPECIFIED: TaskState
TASK_STATE_QUEUED: TaskState
TASK_STATE_LEASED: TaskState
TASK_STATE_SETTLED: TaskState
OUTCOME_STATE_UNSPECIFIED: OutcomeState
OUTCOME_STATE_SUCCEEDED: OutcomeState
OUTCOME_STATE_FAILED: OutcomeState
OUTCOME_STATE_CANCELLED: OutcomeState
OUTCOME_STATE_EXPIRED: OutcomeState
OUTCOME_STATE_DEAD_LETTERED: OutcomeState
OUTCOME_STATE_RESULT_MISSING: OutcomeState
ENERGY_METHOD_UNSPECIFIED: EnergyMethod
ENERGY_METHOD_COUNTER: EnergyMethod
ENERGY_METHOD_SAMPLED_POWER: EnergyMethod

class TaskSpec(_message.Message):
    __slots__ = ("kind", "model", "parameters", "content_type", "queue", "priority", "required_labels", "required_device_memory_bytes", "deadline", "queue_timeout", "run_timeout", "attempts_max", "backoff_initial", "backoff_max", "durability", "result_ttl", "wait_for_worker", "retry_failed", "submitter", "world_size", "world_size_min", "spread_ranks")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class RequiredLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_LABELS_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    RUN_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_MAX_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_INITIAL_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MAX_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    RESULT_TTL_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_WORKER_FIELD_NUMBER: _ClassVar[int]
    RETRY_FAILED_FIELD_NUMBER: _ClassVar[int]
    SUBMITTER_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_MIN_FIELD_NUMBER: _ClassVar[int]
    SPREAD_RANKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    model: str
    parameters: _containers.ScalarMap[str, str]
    content_type: str
    queue: str
    priority: int
    required_labels: _containers.ScalarMap[str, str]
    required_device_memory_bytes: int
    deadline: _timestamp_pb2.Timestamp
    queue_timeout: _duration_pb2.Duration
    run_timeout: _duration_pb2.Duration
    attempts_max: int
    backoff_initial: _duration_pb2.Duration
    backoff_max: _duration_pb2.Duration
    durability: Durability
    result_ttl: _duration_pb2.Duration
    wait_for_worker: bool
    retry_failed: bool
    submitter: str
    world_size: int
    world_size_min: int
    spread_ranks: bool
    def __init__(self, kind: _Optional[str] = ..., model: _Optional[str] = ..., parameters: _Optional[_Mapping[str, str]] = ..., content_type: _Optional[str] = ..., queue: _Optional[str] = ..., priority: _Optional[int] = ..., required_labels: _Optional[_Mapping[str, str]] = ..., required_device_memory_bytes: _Optional[int] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., queue_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., run_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., attempts_max: _Optional[int] = ..., backoff_initial: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., backoff_max: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., durability: _Optional[_Union[Durability, str]] = ..., result_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait_for_worker: bool = ..., retry_failed: bool = ..., submitter: _Optional[str] = ..., world_size: _Optional[int] = ..., world_size_min: _Optional[int] = ..., spread_ranks: bool = ...) -> None: ...

class TaskInput(_message.Message):
    __slots__ = ("payload", "request_id", "partition_key", "units", "traceparent", "partials_received", "payload_place", "payload_crc32")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_KEY_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_PLACE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CRC32_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    request_id: str
    partition_key: str
    units: int
    traceparent: str
    partials_received: int
    payload_place: PayloadReference
    payload_crc32: int
    def __init__(self, payload: _Optional[bytes] = ..., request_id: _Optional[str] = ..., partition_key: _Optional[str] = ..., units: _Optional[int] = ..., traceparent: _Optional[str] = ..., partials_received: _Optional[int] = ..., payload_place: _Optional[_Union[PayloadReference, _Mapping]] = ..., payload_crc32: _Optional[int] = ...) -> None: ...

class PayloadReference(_message.Message):
    __slots__ = ("segment", "offset", "size")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    segment: str
    offset: int
    size: int
    def __init__(self, segment: _Optional[str] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class TaskBatch(_message.Message):
    __slots__ = ("spec", "inputs", "request_ids", "payloads")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    spec: TaskSpec
    inputs: _containers.RepeatedCompositeFieldContainer[TaskInput]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, spec: _Optional[_Union[TaskSpec, _Mapping]] = ..., inputs: _Optional[_Iterable[_Union[TaskInput, _Mapping]]] = ..., request_ids: _Optional[_Iterable[str]] = ..., payloads: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TaskError(_message.Message):
    __slots__ = ("type", "message", "retryable", "traceback")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    retryable: bool
    traceback: str
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ..., traceback: _Optional[str] = ...) -> None: ...

class Stages(_message.Message):
    __slots__ = ("submit_time", "dispatch_time", "start_time", "finish_time")
    SUBMIT_TIME_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    FINISH_TIME_FIELD_NUMBER: _ClassVar[int]
    submit_time: _timestamp_pb2.Timestamp
    dispatch_time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    finish_time: _timestamp_pb2.Timestamp
    def __init__(self, submit_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., dispatch_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("task_id", "request_id", "state", "result", "content_type", "error", "stages", "attempts", "worker_id", "device_id", "partials", "partial_content_types", "result_place", "energy", "earlier_attempts", "log")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_CONTENT_TYPES_FIELD_NUMBER: _ClassVar[int]
    RESULT_PLACE_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    EARLIER_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    request_id: str
    state: OutcomeState
    result: bytes
    content_type: str
    error: TaskError
    stages: Stages
    attempts: int
    worker_id: str
    device_id: str
    partials: _containers.RepeatedScalarFieldContainer[bytes]
    partial_content_types: _containers.RepeatedScalarFieldContainer[str]
    result_place: PayloadReference
    energy: Energy
    earlier_attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    log: str
    def __init__(self, task_id: _Optional[int] = ..., request_id: _Optional[str] = ..., state: _Optional[_Union[OutcomeState, str]] = ..., result: _Optional[bytes] = ..., content_type: _Optional[str] = ..., error: _Optional[_Union[TaskError, _Mapping]] = ..., stages: _Optional[_Union[Stages, _Mapping]] = ..., attempts: _Optional[int] = ..., worker_id: _Optional[str] = ..., device_id: _Optional[str] = ..., partials: _Optional[_Iterable[bytes]] = ..., partial_content_types: _Optional[_Iterable[str]] = ..., result_place: _Optional[_Union[PayloadReference, _Mapping]] = ..., energy: _Optional[_Union[Energy, _Mapping]] = ..., earlier_attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., log: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("worker_id", "dispatch_time", "start_time", "end_time", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dispatch_time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., dispatch_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Energy(_message.Message):
    __slots__ = ("joules", "method", "uncertainty")
    JOULES_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_FIELD_NUMBER: _ClassVar[int]
    joules: float
    method: EnergyMethod
    uncertainty: float
    def __init__(self, joules: _Optional[float] = ..., method: _Optional[_Union[EnergyMethod, str]] = ..., uncertainty: _Optional[float] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("task_id", "request_id", "spec", "partition_key", "payload_bytes", "state", "submit_time", "attempts", "worker_id", "lease_id", "progress", "not_before", "last_error", "outcome", "stages", "earlier_attempts", "log", "dead_letter")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    EARLIER_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    request_id: str
    spec: TaskSpec
    partition_key: str
    payload_bytes: int
    state: TaskState
    submit_time: _timestamp_pb2.Timestamp
    attempts: int
    worker_id: str
    lease_id: int
    progress: Progress
    not_before: _timestamp_pb2.Timestamp
    last_error: TaskError
    outcome: Outcome
    stages: Stages
    earlier_attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    log: str
    dead_letter: bool
    def __init__(self, task_id: _Optional[int] = ..., request_id: _Optional[str] = ..., spec: _Optional[_Union[TaskSpec, _Mapping]] = ..., partition_key: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., state: _Optional[_Union[TaskState, str]] = ..., submit_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempts: _Optional[int] = ..., worker_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., not_before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_error: _Optional[_Union[TaskError, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., stages: _Optional[_Union[Stages, _Mapping]] = ..., earlier_attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., log: _Optional[str] = ..., dead_letter: bool = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("fraction", "steps", "note")
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    fraction: float
    steps: int
    note: str
    def __init__(self, fraction: _Optional[float] = ..., steps: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...
