from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClassifyPayload(_message.Message):
    __slots__ = ("image", "text", "top_k")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    image: bytes
    text: str
    top_k: int
    def __init__(self, image: _Optional[bytes] = ..., text: _Optional[str] = ..., top_k: _Optional[int] = ...) -> None: ...

class ClassifyResult(_message.Message):
    __slots__ = ("classes",)
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedCompositeFieldContainer[ClassScore]
    def __init__(self, classes: _Optional[_Iterable[_Union[ClassScore, _Mapping]]] = ...) -> None: ...

class ClassScore(_message.Message):
    __slots__ = ("index", "label", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    label: str
    score: float
    def __init__(self, index: _Optional[int] = ..., label: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...
