from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class RerankPayload(_message.Message):
    __slots__ = ("query", "documents", "raw_scores", "count_tokens")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    RAW_SCORES_FIELD_NUMBER: _ClassVar[int]
    COUNT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    query: str
    documents: _containers.RepeatedScalarFieldContainer[str]
    raw_scores: bool
    count_tokens: bool
    def __init__(self, query: _Optional[str] = ..., documents: _Optional[_Iterable[str]] = ..., raw_scores: bool = ..., count_tokens: bool = ...) -> None: ...

class RerankResult(_message.Message):
    __slots__ = ("scores", "tokens")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    tokens: int
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., tokens: _Optional[int] = ...) -> None: ...
