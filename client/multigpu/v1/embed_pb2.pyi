from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EmbedOutput(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBED_OUTPUT_UNSPECIFIED: _ClassVar[EmbedOutput]
    EMBED_OUTPUT_TOKEN_VECTORS: _ClassVar[EmbedOutput]
    EMBED_OUTPUT_TOKENS: _ClassVar[EmbedOutput]
    EMBED_OUTPUT_TEXTS: _ClassVar[EmbedOutput]
EMBED_OUTPUT_UNSPECIFIED: EmbedOutput
EMBED_OUTPUT_TOKEN_VECTORS: EmbedOutput
EMBED_OUTPUT_TOKENS: EmbedOutput
EMBED_OUTPUT_TEXTS: EmbedOutput

class EmbedPayload(_message.Message):
    __slots__ = ("texts", "tokens", "count_tokens", "output", "special_tokens")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenIds]
    count_tokens: bool
    output: EmbedOutput
    special_tokens: bool
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., count_tokens: bool = ..., output: _Optional[_Union[EmbedOutput, str]] = ..., special_tokens: bool = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EmbedResult(_message.Message):
    __slots__ = ("dimension", "values", "tokens", "lengths", "tokenised", "texts")
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKENISED_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    dimension: int
    values: bytes
    tokens: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    tokenised: _containers.RepeatedCompositeFieldContainer[TokenisedText]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dimension: _Optional[int] = ..., values: _Optional[bytes] = ..., tokens: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ..., tokenised: _Optional[_Iterable[_Union[TokenisedText, _Mapping]]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenisedText(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TextToken]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TextToken, _Mapping]]] = ...) -> None: ...

class TextToken(_message.Message):
    __slots__ = ("id", "text", "special", "start", "stop")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    special: bool
    start: int
    stop: int
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., special: bool = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...
