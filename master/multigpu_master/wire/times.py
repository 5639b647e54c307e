"""Timestamps and durations: seconds as floats inside the master, protobuf messages on the wire."""

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

# Times are limited to this range, in which each can be converted back to a Timestamp and printed as a date.
SECONDS_MIN, SECONDS_MAX = -62e9, 100e9


def seconds_of(message: Timestamp | Duration) -> float:
    """Seconds, since the epoch for a Timestamp; between SECONDS_MIN and SECONDS_MAX."""
    return min(max(message.seconds + message.nanos / 1e9, SECONDS_MIN), SECONDS_MAX)


def set_time(message: Timestamp, seconds: float) -> None:
    """Fills a Timestamp from seconds since the epoch."""
    whole = math.floor(seconds)
    message.seconds = whole
    message.nanos = int((seconds - whole) * 1e9)


def timestamp(seconds: float) -> Timestamp:
    """A Timestamp from seconds since the epoch."""
    message = Timestamp()
    set_time(message, seconds)
    return message


def duration(seconds: float) -> Duration:
    """A Duration from seconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
