import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from multigpu.v1 import device_pb2 as _device_pb2
from multigpu.v1 import model_pb2 as _model_pb2
from multigpu.v1 import task_pb2 as _task_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReportState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPORT_STATE_UNSPECIFIED: _ClassVar[ReportState]
    REPORT_STATE_FAILED: _ClassVar[ReportState]
    REPORT_STATE_RETURNED: _ClassVar[ReportState]

class WorkerMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_MODE_UNSPECIFIED: _ClassVar[WorkerMode]
    WORKER_MODE_ACTIVE: _ClassVar[WorkerMode]
    WORKER_MODE_DRAINING: _ClassVar[WorkerMode]
REPORT_STATE_UNSPECIFIED: ReportState
REPORT_STATE_FAILED: ReportState
REPORT_STATE_RETURNED: ReportState
WORKER_MODE_UNSPECIFIED: WorkerMode
WORKER_MODE_ACTIVE: WorkerMode
WORKER_MODE_DRAINING: WorkerMode

class SessionRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "report_batches", "partials", "payload_key")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REPORT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_KEY_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    report_batches: _containers.RepeatedCompositeFieldContainer[ReportBatch]
    partials: _containers.RepeatedCompositeFieldContainer[PartialOutput]
    payload_key: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., report_batches: _Optional[_Iterable[_Union[ReportBatch, _Mapping]]] = ..., partials: _Optional[_Iterable[_Union[PartialOutput, _Mapping]]] = ..., payload_key: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "host", "version", "pid", "device", "capabilities", "labels", "slots", "window_tasks", "window_bytes", "leases", "models", "model_memory_bytes", "incarnation", "process", "store_address")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TASKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MODEL_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    host: str
    version: str
    pid: int
    device: _device_pb2.Device
    capabilities: _containers.RepeatedCompositeFieldContainer[Capability]
    labels: _containers.ScalarMap[str, str]
    slots: int
    window_tasks: int
    window_bytes: int
    leases: _containers.RepeatedCompositeFieldContainer[HeldLease]
    models: _containers.RepeatedCompositeFieldContainer[_model_pb2.Model]
    model_memory_bytes: int
    incarnation: str
    process: str
    store_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., device: _Optional[_Union[_device_pb2.Device, _Mapping]] = ..., capabilities: _Optional[_Iterable[_Union[Capability, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., slots: _Optional[int] = ..., window_tasks: _Optional[int] = ..., window_bytes: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[_model_pb2.Model, _Mapping]]] = ..., model_memory_bytes: _Optional[int] = ..., incarnation: _Optional[str] = ..., process: _Optional[str] = ..., store_address: _Optional[str] = ...) -> None: ...

class Capability(_message.Message):
    __slots__ = ("kind", "models", "concurrency")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    models: _containers.RepeatedScalarFieldContainer[str]
    concurrency: int
    def __init__(self, kind: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., concurrency: _Optional[int] = ...) -> None: ...

class HeldLease(_message.Message):
    __slots__ = ("lease_id", "task_id", "attempt", "running", "progress", "checkpoint", "proof", "log")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    task_id: int
    attempt: int
    running: bool
    progress: _task_pb2.Progress
    checkpoint: bytes
    proof: int
    log: str
    def __init__(self, lease_id: _Optional[int] = ..., task_id: _Optional[int] = ..., attempt: _Optional[int] = ..., running: bool = ..., progress: _Optional[_Union[_task_pb2.Progress, _Mapping]] = ..., checkpoint: _Optional[bytes] = ..., proof: _Optional[int] = ..., log: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("leases", "last_frame", "telemetry", "draining", "health", "mps", "embedding_cache", "models", "catalog", "handlers", "occupied_slots")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LAST_FRAME_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    MPS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_CACHE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CATALOG_FIELD_NUMBER: _ClassVar[int]
    HANDLERS_FIELD_NUMBER: _ClassVar[int]
    OCCUPIED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[HeldLease]
    last_frame: int
    telemetry: _device_pb2.DeviceTelemetry
    draining: bool
    health: _device_pb2.DeviceHealth
    mps: _device_pb2.MpsStatus
    embedding_cache: EmbeddingCache
    models: _containers.RepeatedCompositeFieldContainer[_model_pb2.ModelResidency]
    catalog: Catalog
    handlers: Handlers
    occupied_slots: int
    def __init__(self, leases: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ..., last_frame: _Optional[int] = ..., telemetry: _Optional[_Union[_device_pb2.DeviceTelemetry, _Mapping]] = ..., draining: bool = ..., health: _Optional[_Union[_device_pb2.DeviceHealth, _Mapping]] = ..., mps: _Optional[_Union[_device_pb2.MpsStatus, _Mapping]] = ..., embedding_cache: _Optional[_Union[EmbeddingCache, _Mapping]] = ..., models: _Optional[_Iterable[_Union[_model_pb2.ModelResidency, _Mapping]]] = ..., catalog: _Optional[_Union[Catalog, _Mapping]] = ..., handlers: _Optional[_Union[Handlers, _Mapping]] = ..., occupied_slots: _Optional[int] = ...) -> None: ...

class Handlers(_message.Message):
    __slots__ = ("version", "reloads", "error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RELOADS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    version: str
    reloads: int
    error: str
    def __init__(self, version: _Optional[str] = ..., reloads: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Catalog(_message.Message):
    __slots__ = ("capabilities", "models")
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    capabilities: _containers.RepeatedCompositeFieldContainer[Capability]
    models: _containers.RepeatedCompositeFieldContainer[_model_pb2.Model]
    def __init__(self, capabilities: _Optional[_Iterable[_Union[Capability, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[_model_pb2.Model, _Mapping]]] = ...) -> None: ...

class EmbeddingCache(_message.Message):
    __slots__ = ("hits", "joined", "misses", "entries", "size_bytes")
    HITS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    hits: int
    joined: int
    misses: int
    entries: int
    size_bytes: int
    def __init__(self, hits: _Optional[int] = ..., joined: _Optional[int] = ..., misses: _Optional[int] = ..., entries: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ReportBatch(_message.Message):
    __slots__ = ("start_time", "finish_time", "succeeded_lease_ids", "results", "content_type", "reports", "result_places", "energy_joules", "energy_method", "energy_uncertainty", "device_duration", "logs")
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    FINISH_TIME_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    RESULT_PLACES_FIELD_NUMBER: _ClassVar[int]
    ENERGY_JOULES_FIELD_NUMBER: _ClassVar[int]
    ENERGY_METHOD_FIELD_NUMBER: _ClassVar[int]
    ENERGY_UNCERTAINTY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_DURATION_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    start_time: _timestamp_pb2.Timestamp
    finish_time: _timestamp_pb2.Timestamp
    succeeded_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    results: _containers.RepeatedScalarFieldContainer[bytes]
    content_type: str
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    result_places: _containers.RepeatedCompositeFieldContainer[ResultReference]
    energy_joules: _containers.RepeatedScalarFieldContainer[float]
    energy_method: _task_pb2.EnergyMethod
    energy_uncertainty: float
    device_duration: _duration_pb2.Duration
    logs: _containers.RepeatedCompositeFieldContainer[AttemptLog]
    def __init__(self, start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., succeeded_lease_ids: _Optional[_Iterable[int]] = ..., results: _Optional[_Iterable[bytes]] = ..., content_type: _Optional[str] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ..., result_places: _Optional[_Iterable[_Union[ResultReference, _Mapping]]] = ..., energy_joules: _Optional[_Iterable[float]] = ..., energy_method: _Optional[_Union[_task_pb2.EnergyMethod, str]] = ..., energy_uncertainty: _Optional[float] = ..., device_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., logs: _Optional[_Iterable[_Union[AttemptLog, _Mapping]]] = ...) -> None: ...

class AttemptLog(_message.Message):
    __slots__ = ("lease_id", "log")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    log: str
    def __init__(self, lease_id: _Optional[int] = ..., log: _Optional[str] = ...) -> None: ...

class ResultReference(_message.Message):
    __slots__ = ("index", "at")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    index: int
    at: _task_pb2.PayloadReference
    def __init__(self, index: _Optional[int] = ..., at: _Optional[_Union[_task_pb2.PayloadReference, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("lease_id", "state", "error", "broke_engine")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BROKE_ENGINE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    state: ReportState
    error: _task_pb2.TaskError
    broke_engine: bool
    def __init__(self, lease_id: _Optional[int] = ..., state: _Optional[_Union[ReportState, str]] = ..., error: _Optional[_Union[_task_pb2.TaskError, _Mapping]] = ..., broke_engine: bool = ...) -> None: ...

class PartialOutput(_message.Message):
    __slots__ = ("lease_id", "index", "data", "content_type", "checkpoint")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    index: int
    data: bytes
    content_type: str
    checkpoint: bytes
    def __init__(self, lease_id: _Optional[int] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ..., content_type: _Optional[str] = ..., checkpoint: _Optional[bytes] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "frame", "lease_batches", "revocations", "desired", "results_taken", "recalled_lease_ids", "reload_handlers")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_BATCHES_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    RECALLED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    RELOAD_HANDLERS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    frame: int
    lease_batches: _containers.RepeatedCompositeFieldContainer[LeaseBatch]
    revocations: _containers.RepeatedCompositeFieldContainer[Revocation]
    desired: DesiredState
    results_taken: int
    recalled_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    reload_handlers: bool
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., frame: _Optional[int] = ..., lease_batches: _Optional[_Iterable[_Union[LeaseBatch, _Mapping]]] = ..., revocations: _Optional[_Iterable[_Union[Revocation, _Mapping]]] = ..., desired: _Optional[_Union[DesiredState, _Mapping]] = ..., results_taken: _Optional[int] = ..., recalled_lease_ids: _Optional[_Iterable[int]] = ..., reload_handlers: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_id", "version", "heartbeat_interval", "session_timeout", "adopted_lease_ids", "incarnation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    version: str
    heartbeat_interval: _duration_pb2.Duration
    session_timeout: _duration_pb2.Duration
    adopted_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    incarnation: str
    def __init__(self, session_id: _Optional[str] = ..., version: _Optional[str] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., session_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., adopted_lease_ids: _Optional[_Iterable[int]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LeaseBatch(_message.Message):
    __slots__ = ("spec", "lease_ids", "task_ids", "attempts", "payloads", "units", "extras", "proofs")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    spec: _task_pb2.TaskSpec
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    units: _containers.RepeatedScalarFieldContainer[int]
    extras: _containers.RepeatedCompositeFieldContainer[LeaseExtra]
    proofs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[_Union[_task_pb2.TaskSpec, _Mapping]] = ..., lease_ids: _Optional[_Iterable[int]] = ..., task_ids: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., payloads: _Optional[_Iterable[bytes]] = ..., units: _Optional[_Iterable[int]] = ..., extras: _Optional[_Iterable[_Union[LeaseExtra, _Mapping]]] = ..., proofs: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseExtra(_message.Message):
    __slots__ = ("index", "checkpoint", "partials_received", "traceparent", "payload_place", "partials", "gang")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_PLACE_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    GANG_FIELD_NUMBER: _ClassVar[int]
    index: int
    checkpoint: bytes
    partials_received: int
    traceparent: str
    payload_place: _task_pb2.PayloadReference
    partials: _containers.RepeatedScalarFieldContainer[bytes]
    gang: Gang
    def __init__(self, index: _Optional[int] = ..., checkpoint: _Optional[bytes] = ..., partials_received: _Optional[int] = ..., traceparent: _Optional[str] = ..., payload_place: _Optional[_Union[_task_pb2.PayloadReference, _Mapping]] = ..., partials: _Optional[_Iterable[bytes]] = ..., gang: _Optional[_Union[Gang, _Mapping]] = ...) -> None: ...

class Gang(_message.Message):
    __slots__ = ("rank", "world_size", "store_address", "run_id")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    store_address: str
    run_id: int
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., store_address: _Optional[str] = ..., run_id: _Optional[int] = ...) -> None: ...

class Revocation(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: str
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DesiredState(_message.Message):
    __slots__ = ("mode", "drain_deadline", "check", "check_at_once", "pinned_models", "unwanted_models")
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    CHECK_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    PINNED_MODELS_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_MODELS_FIELD_NUMBER: _ClassVar[int]
    mode: WorkerMode
    drain_deadline: _timestamp_pb2.Timestamp
    check: int
    check_at_once: bool
    pinned_models: _containers.RepeatedScalarFieldContainer[str]
    unwanted_models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, mode: _Optional[_Union[WorkerMode, str]] = ..., drain_deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., check: _Optional[int] = ..., check_at_once: bool = ..., pinned_models: _Optional[_Iterable[str]] = ..., unwanted_models: _Optional[_Iterable[str]] = ...) -> None: ...
