import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from multigpu.v1 import device_pb2 as _device_pb2
from multigpu.v1 import model_pb2 as _model_pb2
from multigpu.v1 import task_pb2 as _task_pb2
from multigpu.v1 import worker_service_pb2 as _worker_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_ACTIVE: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SUBMIT: _ClassVar[Role]
    ROLE_READ: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_ADMIN: _ClassVar[Role]

class UsageKey(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    USAGE_KEY_UNSPECIFIED: _ClassVar[UsageKey]
    USAGE_KEY_QUEUE: _ClassVar[UsageKey]
    USAGE_KEY_SUBMITTER: _ClassVar[UsageKey]
    USAGE_KEY_KIND: _ClassVar[UsageKey]
    USAGE_KEY_MODEL: _ClassVar[UsageKey]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_ACTIVE: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_LOST: WorkerState
ROLE_UNSPECIFIED: Role
ROLE_SUBMIT: Role
ROLE_READ: Role
ROLE_WORKER: Role
ROLE_ADMIN: Role
USAGE_KEY_UNSPECIFIED: UsageKey
USAGE_KEY_QUEUE: UsageKey
USAGE_KEY_SUBMITTER: UsageKey
USAGE_KEY_KIND: UsageKey
USAGE_KEY_MODEL: UsageKey

class Worker(_message.Message):
    __slots__ = ("worker_id", "host", "version", "pid", "state", "cordoned", "drain_deadline", "device", "telemetry", "labels", "capabilities", "resident_models", "slots", "window_tasks", "window_bytes", "leases", "leased_bytes", "succeeded", "failed", "connect_time", "last_heartbeat_time", "session_id", "health", "cordon_reason", "mps", "quarantined", "models", "model_memory_bytes", "handlers")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_MODELS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TASKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CONNECT_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_TIME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    CORDON_REASON_FIELD_NUMBER: _ClassVar[int]
    MPS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MODEL_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDLERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    host: str
    version: str
    pid: int
    state: WorkerState
    cordoned: bool
    drain_deadline: _timestamp_pb2.Timestamp
    device: _device_pb2.Device
    telemetry: _device_pb2.DeviceTelemetry
    labels: _containers.ScalarMap[str, str]
    capabilities: _containers.RepeatedCompositeFieldContainer[_worker_service_pb2.Capability]
    resident_models: _containers.RepeatedScalarFieldContainer[str]
    slots: int
    window_tasks: int
    window_bytes: int
    leases: int
    leased_bytes: int
    succeeded: int
    failed: int
    connect_time: _timestamp_pb2.Timestamp
    last_heartbeat_time: _timestamp_pb2.Timestamp
    session_id: str
    health: _device_pb2.DeviceHealth
    cordon_reason: str
    mps: _device_pb2.MpsStatus
    quarantined: bool
    models: _containers.RepeatedCompositeFieldContainer[_model_pb2.ModelResidency]
    model_memory_bytes: int
    handlers: _worker_service_pb2.Handlers
    def __init__(self, worker_id: _Optional[str] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., cordoned: bool = ..., drain_deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., device: _Optional[_Union[_device_pb2.Device, _Mapping]] = ..., telemetry: _Optional[_Union[_device_pb2.DeviceTelemetry, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., capabilities: _Optional[_Iterable[_Union[_worker_service_pb2.Capability, _Mapping]]] = ..., resident_models: _Optional[_Iterable[str]] = ..., slots: _Optional[int] = ..., window_tasks: _Optional[int] = ..., window_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., succeeded: _Optional[int] = ..., failed: _Optional[int] = ..., connect_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_heartbeat_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., session_id: _Optional[str] = ..., health: _Optional[_Union[_device_pb2.DeviceHealth, _Mapping]] = ..., cordon_reason: _Optional[str] = ..., mps: _Optional[_Union[_device_pb2.MpsStatus, _Mapping]] = ..., quarantined: bool = ..., models: _Optional[_Iterable[_Union[_model_pb2.ModelResidency, _Mapping]]] = ..., model_memory_bytes: _Optional[int] = ..., handlers: _Optional[_Union[_worker_service_pb2.Handlers, _Mapping]] = ...) -> None: ...

class WorkerRejection(_message.Message):
    __slots__ = ("worker_id", "peer", "reason", "reject_time")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REJECT_TIME_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    peer: str
    reason: str
    reject_time: _timestamp_pb2.Timestamp
    def __init__(self, worker_id: _Optional[str] = ..., peer: _Optional[str] = ..., reason: _Optional[str] = ..., reject_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "next_page_token")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    next_page_token: str
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchWorkersResponse(_message.Message):
    __slots__ = ("workers", "removed_worker_ids")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    removed_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., removed_worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CordonWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CordonWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class UncordonWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UncordonWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "timeout")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class ForgetWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ForgetWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class CheckWorkerResponse(_message.Message):
    __slots__ = ("worker", "check")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    check: int
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class ReloadHandlersRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ReloadHandlersResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class GetStrategyRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class GetStrategyResponse(_message.Message):
    __slots__ = ("strategy", "inherited", "available")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    INHERITED_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    inherited: bool
    available: _containers.RepeatedCompositeFieldContainer[StrategyInfo]
    def __init__(self, strategy: _Optional[str] = ..., inherited: bool = ..., available: _Optional[_Iterable[_Union[StrategyInfo, _Mapping]]] = ...) -> None: ...

class StrategyInfo(_message.Message):
    __slots__ = ("name", "summary", "aliases")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class SetStrategyRequest(_message.Message):
    __slots__ = ("queue", "strategy")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    queue: str
    strategy: str
    def __init__(self, queue: _Optional[str] = ..., strategy: _Optional[str] = ...) -> None: ...

class SetStrategyResponse(_message.Message):
    __slots__ = ("strategy",)
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    def __init__(self, strategy: _Optional[str] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("queue", "paused", "strategy", "queued", "queued_bytes", "leased", "oldest_age", "limits", "end_rate", "submit_rate")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AGE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    END_RATE_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_RATE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    paused: bool
    strategy: str
    queued: int
    queued_bytes: int
    leased: int
    oldest_age: _duration_pb2.Duration
    limits: QueueLimits
    end_rate: float
    submit_rate: float
    def __init__(self, queue: _Optional[str] = ..., paused: bool = ..., strategy: _Optional[str] = ..., queued: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., leased: _Optional[int] = ..., oldest_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., limits: _Optional[_Union[QueueLimits, _Mapping]] = ..., end_rate: _Optional[float] = ..., submit_rate: _Optional[float] = ...) -> None: ...

class QueueLimits(_message.Message):
    __slots__ = ("tasks_max", "bytes_max")
    TASKS_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    tasks_max: int
    bytes_max: int
    def __init__(self, tasks_max: _Optional[int] = ..., bytes_max: _Optional[int] = ...) -> None: ...

class ListQueuesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListQueuesResponse(_message.Message):
    __slots__ = ("queues", "next_page_token")
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[Queue]
    next_page_token: str
    def __init__(self, queues: _Optional[_Iterable[_Union[Queue, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class PauseQueueRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class PauseQueueResponse(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: Queue
    def __init__(self, queue: _Optional[_Union[Queue, _Mapping]] = ...) -> None: ...

class ResumeQueueRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class ResumeQueueResponse(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: Queue
    def __init__(self, queue: _Optional[_Union[Queue, _Mapping]] = ...) -> None: ...

class SetQueueLimitsRequest(_message.Message):
    __slots__ = ("queue", "limits")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    limits: QueueLimits
    def __init__(self, queue: _Optional[str] = ..., limits: _Optional[_Union[QueueLimits, _Mapping]] = ...) -> None: ...

class SetQueueLimitsResponse(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: Queue
    def __init__(self, queue: _Optional[_Union[Queue, _Mapping]] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "page_size", "page_token")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    queue: str
    page_size: int
    page_token: str
    def __init__(self, queue: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("tasks", "next_page_token")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[_task_pb2.Task]
    next_page_token: str
    def __init__(self, tasks: _Optional[_Iterable[_Union[_task_pb2.Task, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequeueDeadLettersRequest(_message.Message):
    __slots__ = ("task_ids", "queue", "page_token")
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    queue: str
    page_token: str
    def __init__(self, task_ids: _Optional[_Iterable[int]] = ..., queue: _Optional[str] = ..., page_token: _Optional[str] = ...) -> None: ...

class RequeueDeadLettersResponse(_message.Message):
    __slots__ = ("task_ids", "unknown_task_ids", "next_page_token")
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    unknown_task_ids: _containers.RepeatedScalarFieldContainer[int]
    next_page_token: str
    def __init__(self, task_ids: _Optional[_Iterable[int]] = ..., unknown_task_ids: _Optional[_Iterable[int]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteDeadLettersRequest(_message.Message):
    __slots__ = ("task_ids", "queue", "page_token")
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    queue: str
    page_token: str
    def __init__(self, task_ids: _Optional[_Iterable[int]] = ..., queue: _Optional[str] = ..., page_token: _Optional[str] = ...) -> None: ...

class DeleteDeadLettersResponse(_message.Message):
    __slots__ = ("deleted", "unknown_task_ids", "next_page_token")
    DELETED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    unknown_task_ids: _containers.RepeatedScalarFieldContainer[int]
    next_page_token: str
    def __init__(self, deleted: _Optional[int] = ..., unknown_task_ids: _Optional[_Iterable[int]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Breaker(_message.Message):
    __slots__ = ("tripped", "trip_time", "quarantines", "quarantines_max")
    TRIPPED_FIELD_NUMBER: _ClassVar[int]
    TRIP_TIME_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_MAX_FIELD_NUMBER: _ClassVar[int]
    tripped: bool
    trip_time: _timestamp_pb2.Timestamp
    quarantines: int
    quarantines_max: int
    def __init__(self, tripped: bool = ..., trip_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., quarantines: _Optional[int] = ..., quarantines_max: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "name", "roles", "queues", "worker_ids", "create_time", "expire_time", "task_rate", "calls_max", "calls")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    TASK_RATE_FIELD_NUMBER: _ClassVar[int]
    CALLS_MAX_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    name: str
    roles: _containers.RepeatedScalarFieldContainer[Role]
    queues: _containers.RepeatedScalarFieldContainer[str]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    task_rate: float
    calls_max: int
    calls: int
    def __init__(self, token_id: _Optional[str] = ..., name: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., queues: _Optional[_Iterable[str]] = ..., worker_ids: _Optional[_Iterable[str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., task_rate: _Optional[float] = ..., calls_max: _Optional[int] = ..., calls: _Optional[int] = ...) -> None: ...

class CreateTokenRequest(_message.Message):
    __slots__ = ("name", "roles", "queues", "worker_ids", "ttl", "task_rate", "calls_max")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    TASK_RATE_FIELD_NUMBER: _ClassVar[int]
    CALLS_MAX_FIELD_NUMBER: _ClassVar[int]
    name: str
    roles: _containers.RepeatedScalarFieldContainer[Role]
    queues: _containers.RepeatedScalarFieldContainer[str]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    ttl: _duration_pb2.Duration
    task_rate: float
    calls_max: int
    def __init__(self, name: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., queues: _Optional[_Iterable[str]] = ..., worker_ids: _Optional[_Iterable[str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., task_rate: _Optional[float] = ..., calls_max: _Optional[int] = ...) -> None: ...

class CreateTokenResponse(_message.Message):
    __slots__ = ("token", "secret")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    token: Token
    secret: str
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTokensResponse(_message.Message):
    __slots__ = ("tokens", "next_page_token")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    next_page_token: str
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("token_id",)
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    def __init__(self, token_id: _Optional[str] = ...) -> None: ...

class RevokeTokenResponse(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: Token
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ...) -> None: ...

class ResetBreakerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetBreakerResponse(_message.Message):
    __slots__ = ("breaker",)
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    breaker: Breaker
    def __init__(self, breaker: _Optional[_Union[Breaker, _Mapping]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("version", "start_time", "queued", "leased", "submitted", "succeeded", "failed", "cancelled", "expired", "dead_lettered", "requeued", "stale_reports", "workers_active", "workers_lost", "journal_bytes", "journal_writable", "memory_bytes", "strategy", "outcomes_retained", "breaker", "server_time", "worker_rejections")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERED_FIELD_NUMBER: _ClassVar[int]
    REQUEUED_FIELD_NUMBER: _ClassVar[int]
    STALE_REPORTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_LOST_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_WRITABLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_RETAINED_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_FIELD_NUMBER: _ClassVar[int]
    WORKER_REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    start_time: _timestamp_pb2.Timestamp
    queued: int
    leased: int
    submitted: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    dead_lettered: int
    requeued: int
    stale_reports: int
    workers_active: int
    workers_lost: int
    journal_bytes: int
    journal_writable: bool
    memory_bytes: int
    strategy: str
    outcomes_retained: int
    breaker: Breaker
    server_time: _timestamp_pb2.Timestamp
    worker_rejections: _containers.RepeatedCompositeFieldContainer[WorkerRejection]
    def __init__(self, version: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., queued: _Optional[int] = ..., leased: _Optional[int] = ..., submitted: _Optional[int] = ..., succeeded: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., expired: _Optional[int] = ..., dead_lettered: _Optional[int] = ..., requeued: _Optional[int] = ..., stale_reports: _Optional[int] = ..., workers_active: _Optional[int] = ..., workers_lost: _Optional[int] = ..., journal_bytes: _Optional[int] = ..., journal_writable: bool = ..., memory_bytes: _Optional[int] = ..., strategy: _Optional[str] = ..., outcomes_retained: _Optional[int] = ..., breaker: _Optional[_Union[Breaker, _Mapping]] = ..., server_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., worker_rejections: _Optional[_Iterable[_Union[WorkerRejection, _Mapping]]] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHistoryResponse(_message.Message):
    __slots__ = ("points",)
    POINTS_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[HistoryPoint]
    def __init__(self, points: _Optional[_Iterable[_Union[HistoryPoint, _Mapping]]] = ...) -> None: ...

class HistoryPoint(_message.Message):
    __slots__ = ("end_time", "submitted", "succeeded", "unsuccessful", "queued", "leased", "workers_active", "queue_duration", "run_duration", "power_watts", "utilization")
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    UNSUCCESSFUL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DURATION_FIELD_NUMBER: _ClassVar[int]
    RUN_DURATION_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    end_time: _timestamp_pb2.Timestamp
    submitted: int
    succeeded: int
    unsuccessful: int
    queued: int
    leased: int
    workers_active: int
    queue_duration: _duration_pb2.Duration
    run_duration: _duration_pb2.Duration
    power_watts: float
    utilization: float
    def __init__(self, end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., submitted: _Optional[int] = ..., succeeded: _Optional[int] = ..., unsuccessful: _Optional[int] = ..., queued: _Optional[int] = ..., leased: _Optional[int] = ..., workers_active: _Optional[int] = ..., queue_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., run_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., power_watts: _Optional[float] = ..., utilization: _Optional[float] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("begin_time", "end_time", "group_by")
    BEGIN_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    begin_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    group_by: _containers.RepeatedScalarFieldContainer[UsageKey]
    def __init__(self, begin_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., group_by: _Optional[_Iterable[_Union[UsageKey, str]]] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("begin_time", "end_time", "usage")
    BEGIN_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    begin_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    usage: _containers.RepeatedCompositeFieldContainer[Usage]
    def __init__(self, begin_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., usage: _Optional[_Iterable[_Union[Usage, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("queue", "submitter", "kind", "model", "tasks_succeeded", "attempts_failed", "device_duration", "measured_duration", "energy_joules", "energy_uncertainty_joules")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SUBMITTER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TASKS_SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_DURATION_FIELD_NUMBER: _ClassVar[int]
    MEASURED_DURATION_FIELD_NUMBER: _ClassVar[int]
    ENERGY_JOULES_FIELD_NUMBER: _ClassVar[int]
    ENERGY_UNCERTAINTY_JOULES_FIELD_NUMBER: _ClassVar[int]
    queue: str
    submitter: str
    kind: str
    model: str
    tasks_succeeded: int
    attempts_failed: int
    device_duration: _duration_pb2.Duration
    measured_duration: _duration_pb2.Duration
    energy_joules: float
    energy_uncertainty_joules: float
    def __init__(self, queue: _Optional[str] = ..., submitter: _Optional[str] = ..., kind: _Optional[str] = ..., model: _Optional[str] = ..., tasks_succeeded: _Optional[int] = ..., attempts_failed: _Optional[int] = ..., device_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., measured_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., energy_joules: _Optional[float] = ..., energy_uncertainty_joules: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("task_id",)
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    def __init__(self, task_id: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("summary", "task", "strategy", "ahead", "candidates")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    summary: str
    task: _task_pb2.Task
    strategy: str
    ahead: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, summary: _Optional[str] = ..., task: _Optional[_Union[_task_pb2.Task, _Mapping]] = ..., strategy: _Optional[str] = ..., ahead: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker_id", "excluded_by", "rank", "score", "score_meaning")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_BY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SCORE_MEANING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    excluded_by: _containers.RepeatedScalarFieldContainer[str]
    rank: int
    score: float
    score_meaning: str
    def __init__(self, worker_id: _Optional[str] = ..., excluded_by: _Optional[_Iterable[str]] = ..., rank: _Optional[int] = ..., score: _Optional[float] = ..., score_meaning: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("name", "page_size", "page_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_size: int
    page_token: str
    def __init__(self, name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelEntry]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[ModelEntry, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ModelEntry(_message.Message):
    __slots__ = ("model", "worker_ids", "places")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    model: _model_pb2.Model
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    places: _containers.RepeatedCompositeFieldContainer[ModelPlace]
    def __init__(self, model: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., worker_ids: _Optional[_Iterable[str]] = ..., places: _Optional[_Iterable[_Union[ModelPlace, _Mapping]]] = ...) -> None: ...

class ModelPlace(_message.Message):
    __slots__ = ("worker_id", "residency")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    residency: _model_pb2.ModelResidency
    def __init__(self, worker_id: _Optional[str] = ..., residency: _Optional[_Union[_model_pb2.ModelResidency, _Mapping]] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "worker_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model", "worker_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...
