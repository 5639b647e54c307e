"""Timestamps and durations: seconds as floats inside the master, protobuf messages on the wire."""

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

# Received times are limited to this range: every time in it can be converted to a Timestamp and printed as a date.
SECONDS_MIN, SECONDS_MAX = -62e9, 100e9


def seconds_of(message: Timestamp | Duration) -> float:
    """Returns a Timestamp in seconds since 1970, or a Duration in seconds, limited to SECONDS_MIN..SECONDS_MAX."""
    return min(max(message.seconds + message.nanos / 1e9, SECONDS_MIN), SECONDS_MAX)


def set_time(message: Timestamp, seconds: float) -> None:
    """Fills a Timestamp from seconds since 1970."""
    whole = math.floor(seconds)
    message.seconds = whole
    message.nanos = int((seconds - whole) * 1e9)


def timestamp(seconds: float) -> Timestamp:
    """A Timestamp from seconds since 1970."""
    message = Timestamp()
    set_time(message, seconds)
    return message


def duration(seconds: float) -> Duration:
    """A Duration from seconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
