import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from multigpu.v1 import task_pb2 as _task_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitRequest(_message.Message):
    __slots__ = ("batches",)
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[_task_pb2.TaskBatch]
    def __init__(self, batches: _Optional[_Iterable[_Union[_task_pb2.TaskBatch, _Mapping]]] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SubmitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SubmitResult, _Mapping]]] = ...) -> None: ...

class SubmitResult(_message.Message):
    __slots__ = ("task_id", "rejection")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    rejection: Rejection
    def __init__(self, task_id: _Optional[int] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("request_id", "code", "message", "retry_delay")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: int
    message: str
    retry_delay: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., retry_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("batches", "cancel_request_ids", "payload_key", "results_taken", "outcomes_only", "client_id", "follow_request_ids")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_KEY_FIELD_NUMBER: _ClassVar[int]
    RESULTS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_ONLY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[_task_pb2.TaskBatch]
    cancel_request_ids: _containers.RepeatedScalarFieldContainer[str]
    payload_key: bytes
    results_taken: int
    outcomes_only: bool
    client_id: str
    follow_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, batches: _Optional[_Iterable[_Union[_task_pb2.TaskBatch, _Mapping]]] = ..., cancel_request_ids: _Optional[_Iterable[str]] = ..., payload_key: _Optional[bytes] = ..., results_taken: _Optional[int] = ..., outcomes_only: bool = ..., client_id: _Optional[str] = ..., follow_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("accepted", "rejected", "partials", "outcomes")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    accepted: _containers.RepeatedCompositeFieldContainer[Accepted]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejection]
    partials: _containers.RepeatedCompositeFieldContainer[Partial]
    outcomes: _containers.RepeatedCompositeFieldContainer[_task_pb2.Outcome]
    def __init__(self, accepted: _Optional[_Iterable[_Union[Accepted, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ..., partials: _Optional[_Iterable[_Union[Partial, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[_task_pb2.Outcome, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "task_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    task_id: int
    def __init__(self, request_id: _Optional[str] = ..., task_id: _Optional[int] = ...) -> None: ...

class Partial(_message.Message):
    __slots__ = ("request_id", "task_id", "index", "data", "content_type")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    task_id: int
    index: int
    data: bytes
    content_type: str
    def __init__(self, request_id: _Optional[str] = ..., task_id: _Optional[int] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ..., content_type: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("cursor", "from_now", "queue", "kind")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FROM_NOW_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    from_now: bool
    queue: str
    kind: str
    def __init__(self, cursor: _Optional[str] = ..., from_now: bool = ..., queue: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("outcomes", "cursor")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[_task_pb2.Outcome]
    cursor: str
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_task_pb2.Outcome, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("task_id", "request_id", "wait", "rank")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    request_id: str
    wait: _duration_pb2.Duration
    rank: int
    def __init__(self, task_id: _Optional[int] = ..., request_id: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rank: _Optional[int] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: _task_pb2.Task
    def __init__(self, task: _Optional[_Union[_task_pb2.Task, _Mapping]] = ...) -> None: ...

class TaskFilter(_message.Message):
    __slots__ = ("states", "outcomes", "queue", "kind", "model", "worker_id", "submitted_after", "submitted_before", "retrying")
    STATES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AFTER_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    RETRYING_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[_task_pb2.TaskState]
    outcomes: _containers.RepeatedScalarFieldContainer[_task_pb2.OutcomeState]
    queue: str
    kind: str
    model: str
    worker_id: str
    submitted_after: _timestamp_pb2.Timestamp
    submitted_before: _timestamp_pb2.Timestamp
    retrying: bool
    def __init__(self, states: _Optional[_Iterable[_Union[_task_pb2.TaskState, str]]] = ..., outcomes: _Optional[_Iterable[_Union[_task_pb2.OutcomeState, str]]] = ..., queue: _Optional[str] = ..., kind: _Optional[str] = ..., model: _Optional[str] = ..., worker_id: _Optional[str] = ..., submitted_after: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., submitted_before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., retrying: bool = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("filter", "page_size", "page_token", "oldest_first")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    filter: TaskFilter
    page_size: int
    page_token: str
    oldest_first: bool
    def __init__(self, filter: _Optional[_Union[TaskFilter, _Mapping]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., oldest_first: bool = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("tasks", "next_page_token")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[_task_pb2.Task]
    next_page_token: str
    def __init__(self, tasks: _Optional[_Iterable[_Union[_task_pb2.Task, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("task_ids", "request_ids", "reason", "withdraw")
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    withdraw: bool
    def __init__(self, task_ids: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., withdraw: bool = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("cancelled_task_ids", "settled_task_ids", "unknown")
    CANCELLED_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    cancelled_task_ids: _containers.RepeatedScalarFieldContainer[int]
    settled_task_ids: _containers.RepeatedScalarFieldContainer[int]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cancelled_task_ids: _Optional[_Iterable[int]] = ..., settled_task_ids: _Optional[_Iterable[int]] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class CountRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: TaskFilter
    def __init__(self, filter: _Optional[_Union[TaskFilter, _Mapping]] = ...) -> None: ...

class CountResponse(_message.Message):
    __slots__ = ("queued", "leased", "succeeded", "failed", "cancelled", "expired", "dead_lettered")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERED_FIELD_NUMBER: _ClassVar[int]
    queued: int
    leased: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    dead_lettered: int
    def __init__(self, queued: _Optional[int] = ..., leased: _Optional[int] = ..., succeeded: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., expired: _Optional[int] = ..., dead_lettered: _Optional[int] = ...) -> None: ...
