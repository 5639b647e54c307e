"""Parses requests, within limits so that no request blocks the event loop for long.

Parsing many small fields blocks the event loop, for about 60 ms per MiB, and a field of two bytes becomes an object of
a hundred. So a request's size is checked first, and the fields of a large request are counted.
"""

from functools import cache
from typing import Any

from google.protobuf.message import DecodeError

from multigpu_master.errors import InvalidArgumentError

# Limit of requests without payloads. Those with payloads have the limit of every message: MESSAGE_BYTES_MAX of
# multigpu.daemon.grpc_server.
REQUEST_BYTES_MAX = 2 << 20
WITH_PAYLOADS = {"SubmitRequest", "RunRequest", "SessionRequest"}
# Limit of fields in a request that is larger than REQUEST_BYTES_MAX. A Submit of ten thousand tasks has fewer.
FIELDS_MAX = 500_000

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)


def parse(message_type: Any, data: bytes) -> Any:
    """Parses a message. Raises InvalidArgumentError if the bytes are no such message, or pass a limit."""
    if len(data) > REQUEST_BYTES_MAX:
        if message_type.DESCRIPTOR.name not in WITH_PAYLOADS:
            text = f"the request has {len(data)} bytes, and at most {REQUEST_BYTES_MAX} are allowed: send less at once"
            raise InvalidArgumentError(text)
        if more_fields_than(FIELDS_MAX, message_type.DESCRIPTOR, data):
            text = f"the message has more than {FIELDS_MAX} fields: send fewer tasks at once"
            raise InvalidArgumentError(text)
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        name = message_type.DESCRIPTOR.full_name
        text = f"not a {name}: {error}; check that both sides use the same .proto files and that strings are UTF-8"
        raise InvalidArgumentError(text) from None


def more_fields_than(count_max: int, descriptor: Any, data: bytes) -> bool:
    """Whether the serialized message and the messages in it have more than `count_max` fields. Of an invalid message,
    the fields up to the error count, because a parser reads them, too.
    """
    fields_left = count_max
    todo = [(0, len(data), descriptor)]
    while todo and fields_left >= 0:
        at, end, descriptor = todo.pop()
        messages = _messages(descriptor)
        try:
            while at < end and fields_left >= 0:
                fields_left -= 1
                tag = data[at]
                if tag < 128:  # without a call: most varints have one byte
                    at += 1
                else:
                    tag, at = _varint(data, at)
                kind = tag & 7
                if kind == VARINT:
                    _, at = _varint(data, at)
                elif kind == BYTES:
                    size = data[at]
                    if size < 128:
                        at += 1
                    else:
                        size, at = _varint(data, at)
                    if (message := messages.get(tag >> 3)) is not None:
                        todo.append((at, at + size, message))
                    at += size
                elif kind in (FIXED64, FIXED32):
                    at += 8 if kind == FIXED64 else 4
                elif kind not in (GROUP, GROUP_END):
                    break
        except IndexError:
            pass
    return fields_left < 0


@cache
def _messages(descriptor: Any) -> dict[int, Any]:
    """The descriptors of the fields that are messages, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a varint and the position after it. Raises IndexError if it has more than ten bytes or is cut off."""
    value = 0
    for n in range(10):
        byte = data[at + n]
        value |= (byte & 127) << 7 * n
        if byte < 128:
            return value, at + n + 1
    raise IndexError
