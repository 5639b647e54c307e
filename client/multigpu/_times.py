"""Timestamps and durations of protobuf as Python's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.timestamp_pb2 import Timestamp


def instant(timestamp: Timestamp) -> datetime | None:
    """A timestamp in UTC; None if it is not set."""
    if not (timestamp.seconds or timestamp.nanos):
        return None
    return timestamp.ToDatetime(tzinfo=UTC)


def seconds_of(span: Duration | Timestamp) -> float:
    """A duration, or a timestamp since 1970, in seconds."""
    return span.seconds + span.nanos / 1e9
