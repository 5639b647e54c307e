"""Tasks of kind "classify": payloads of pictures and texts, and the classes in their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from multigpu.errors import INVALID_ARGUMENT, InvalidTaskError, TransportError
from multigpu.outcome import Outcome
from multigpu.v1 import classify_pb2

if TYPE_CHECKING:
    from multigpu.options import AnyIterable

KIND = "classify"
TOP_K = 5
TOP_K_MAX = 10_000

# A picture (the bytes of its file, or its path) or a text.
Subject = bytes | os.PathLike[str] | str


@dataclass(frozen=True, slots=True)
class Label:
    """A class that a model considers likely."""

    # The number of the class in the model, from 0.
    index: int
    # Its name; empty if the model has none.
    label: str
    # Its probability, 0 to 1.
    score: float


def payload_of(subject: Subject, top_k: int) -> bytes:
    """The payload of a task. Raises OSError if the file of a picture can't be read."""
    if not 1 <= top_k <= TOP_K_MAX:
        raise ValueError(f"top_k is {top_k}; it must be 1 to {TOP_K_MAX:,}")
    if isinstance(subject, str):
        try:
            return classify_pb2.ClassifyPayload(text=subject, top_k=top_k).SerializeToString()
        except ValueError as error:
            raise InvalidTaskError(INVALID_ARGUMENT, f"classify takes text of valid Unicode: {error}") from error
    if isinstance(subject, os.PathLike):
        subject = Path(subject).read_bytes()
    if not isinstance(subject, bytes | bytearray | memoryview):
        raise TypeError(f"classify takes bytes, a path or a str, not {type(subject).__name__}")
    if not subject:
        raise InvalidTaskError(INVALID_ARGUMENT, "a picture of no bytes can't be classified")
    return classify_pb2.ClassifyPayload(image=bytes(subject), top_k=top_k).SerializeToString()


def encoder(subjects: AnyIterable[Subject], top_k: int) -> Callable[[Subject], bytes]:
    """`payload_of` with `top_k` set, for classify_map. Raises TypeError if `subjects` is a single text or picture."""
    if isinstance(subjects, str | bytes):
        raise TypeError("classify_map takes an iterable of pictures or texts; for one pass [one]")
    return partial(payload_of, top_k=top_k)


def labels_of(result: bytes) -> list[Label]:
    """The classes in a task's result, the most likely first."""
    try:
        classes = classify_pb2.ClassifyResult.FromString(result).classes
    except (TypeError, DecodeError) as error:
        raise TransportError(
            f"a result of classify can't be read ({error}): its worker speaks another protocol"
        ) from error
    return [Label(found.index, found.label, found.score) for found in classes]


def read(outcome: Outcome) -> list[Label]:
    """The classes in an outcome, the most likely first. Raises the TaskError of a task that failed."""
    return labels_of(outcome.value())
