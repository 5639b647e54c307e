"""How many fields a serialized message has, counted before it is parsed: a field of two bytes takes a hundred once it
is an object, and a message may have 64 MiB.
"""

from functools import cache
from typing import Any

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)


@cache
def _messages(descriptor: Any) -> dict[int, Any]:
    """The descriptors of the fields that are messages themselves, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def more_fields_than(count_max: int, descriptor: Any, data: bytes) -> bool:
    """Whether the serialized message has more fields than this, with those of the messages in it. False for bytes that
    are no message, too: parsing them says what is wrong.
    """
    todo = [(0, len(data), descriptor)]
    try:
        while todo:
            at, end, descriptor = todo.pop()
            messages = _messages(descriptor)
            while at < end:
                count_max -= 1
                if count_max < 0:
                    return True
                tag, at = _varint(data, at)
                kind = tag & 7
                if kind == VARINT:
                    _, at = _varint(data, at)
                elif kind == BYTES:
                    size, at = _varint(data, at)
                    if (message := messages.get(tag >> 3)) is not None:
                        todo.append((at, at + size, message))
                    at += size
                elif kind in (FIXED64, FIXED32):
                    at += 8 if kind == FIXED64 else 4
                elif kind not in (GROUP, GROUP_END):
                    return False
    except IndexError:
        pass
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where what follows it begins. IndexError: the bytes end before it does, or it has more than ten."""
    value = 0
    for n in range(10):
        byte = data[at + n]
        value |= (byte & 127) << 7 * n
        if byte < 128:
            return value, at + n + 1
    raise IndexError
