"""Reads and parses requests within limits, so that no request blocks the event loop for long; makes and parses page
tokens and cursors.

Parsing many small fields blocks the event loop for about 60 ms per MiB, and turns a field of 2 bytes into an object of
about 100 bytes. So `parse` first checks a request's size, and counts the fields of a large request.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from multigpu_master.errors import ExhaustedError, InvalidArgumentError

# Size limit of requests without payloads. Requests with payloads have only the limit of all messages:
# MESSAGE_BYTES_MAX of multigpu.daemon.grpc_server.
REQUEST_BYTES_MAX = 2 << 20
WITH_PAYLOADS = {"SubmitRequest", "RunRequest", "SessionRequest"}
# Limit of fields in a request that is larger than REQUEST_BYTES_MAX. A Submit of ten thousand tasks has fewer.
FIELDS_MAX = 500_000

# A page token is p.NUMBER; or, in lists sorted by name, after.NAME with the last name on the page.
PAGE_PREFIX, NAME_PREFIX = "p.", "after."
CURSOR_PREFIX = "w."  # a Watch cursor is w.INCARNATION.NUMBER
PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX = 100, 1000
# Limits of requests that need no token. gRPC itself accepts 64 MiB, and needs about 1 ms of CPU to receive 1 MiB.
SMALL_BYTES_MAX = 4096
SMALL_CPU_S, SMALL_TIMEOUT_S, SMALL_POLL_S = 0.02, 1.0, 0.002

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)  # protobuf's wire types
T = TypeVar("T")


def parse(message_type: Any, data: bytes) -> Any:
    """Parses a message. Raises InvalidArgumentError if the bytes are no such message, or exceed a limit."""
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
    """Whether the serialized message and the messages in it have more than `count_max` fields. In an invalid message,
    counts only the fields before the error: a parser reads no others.
    """
    fields_left = count_max
    todo = [(0, len(data), descriptor)]
    while todo and fields_left >= 0:
        at, end, descriptor = todo.pop()
        messages = _message_fields(descriptor)
        try:
            while at < end and fields_left >= 0:
                fields_left -= 1
                tag = data[at]
                if tag < 128:  # most varints have one byte: save the call
                    at += 1
                else:
                    tag, at = _varint(data, at)
                wire_type = tag & 7
                if wire_type == VARINT:
                    _, at = _varint(data, at)
                elif wire_type == BYTES:
                    size = data[at]
                    if size < 128:
                        at += 1
                    else:
                        size, at = _varint(data, at)
                    if (message := messages.get(tag >> 3)) is not None:
                        todo.append((at, at + size, message))
                    at += size
                elif wire_type in (FIXED64, FIXED32):
                    at += 8 if wire_type == FIXED64 else 4
                elif wire_type not in (GROUP, GROUP_END):
                    break
        except IndexError:
            pass
    return fields_left < 0


@cache
def _message_fields(descriptor: Any) -> dict[int, Any]:
    """Returns the descriptors of the fields that are messages, by field number."""
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


# --- pages and counts ------------------------------------------------------------------------------------------------


def parse_page_token(token: str, name: str, prefix: str = PAGE_PREFIX) -> int:
    """Returns the number in a page token, or 0 if it is empty. Raises InvalidArgumentError if it is not valid."""
    number = token.removeprefix(prefix)
    if token and (number == token or not number.isascii() or not number.isdigit() or len(number) > 18):
        raise InvalidArgumentError(f"this service did not issue the {name}")
    return int(number or 0)


def parse_name_token(token: str) -> str:
    """Returns the last name of the previous page, or "" if the token is empty. Raises InvalidArgumentError if the token
    is not valid.
    """
    name = token.removeprefix(NAME_PREFIX)
    if token and name == token:
        raise InvalidArgumentError("this service did not issue the page_token")
    return name


def make_page_token(number: int) -> str:
    """Returns an opaque page token."""
    return f"{PAGE_PREFIX}{number}"


def make_cursor(incarnation: str, number: int) -> str:
    """Returns an opaque Watch cursor."""
    return f"{CURSOR_PREFIX}{incarnation}.{number}"


def parse_cursor(cursor: str) -> tuple[str, int]:
    """Returns the incarnation that issued a Watch cursor, and the cursor's number; ("", 0) if the cursor is empty.
    Raises InvalidArgumentError if it is not valid.
    """
    incarnation, _, _ = cursor.removeprefix(CURSOR_PREFIX).partition(".")
    return incarnation, parse_page_token(cursor, "cursor", f"{CURSOR_PREFIX}{incarnation}.")


def check_count(count: int, limit: int, items: str, advice: str = "") -> None:
    """Raises InvalidArgumentError if there are too many items: serving them in one call would delay other calls."""
    if count > limit:
        raise InvalidArgumentError(f"{count} {items}; at most {limit} are allowed" + (f": {advice}" if advice else ""))


def read_page_size(size: int) -> int:
    """Returns the number of items on a page. Raises InvalidArgumentError if `size` is out of range."""
    if not 0 <= size <= PAGE_SIZE_MAX:
        raise InvalidArgumentError(f"page_size is {size}; use 1 to {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE_DEFAULT}")
    return size or PAGE_SIZE_DEFAULT


def page_of(items: Sequence[T], request: Any) -> tuple[Sequence[T], str]:
    """Returns the page that a List request asks for, and the token of the next page, or ""."""
    size, start = read_page_size(request.page_size), parse_page_token(request.page_token, "page_token")
    end = start + size
    return items[start:end], make_page_token(end) if end < len(items) else ""


# --- requests that need no token -------------------------------------------------------------------------------------


async def read_small(context: Any) -> Any:
    """Reads a request that needs no token, or EOF. Rejects a request that is large or does not arrive with its call.

    So gRPC buffers at most what it can receive of a request in SMALL_CPU_S of the process's CPU time.
    """
    reading = asyncio.ensure_future(context.read())
    cpu_end_s, end_s = time.process_time() + SMALL_CPU_S, time.monotonic() + SMALL_TIMEOUT_S
    try:
        await asyncio.wait([reading], timeout=SMALL_POLL_S)
        while not reading.done():
            if time.process_time() > cpu_end_s or time.monotonic() > end_s:
                text = "the request is large, or did not come with the call: send a small one at once, or try again"
                raise ExhaustedError(text)
            await asyncio.wait([reading], timeout=SMALL_POLL_S)
    finally:
        reading.cancel()
    data = reading.result()
    if data is not grpc.aio.EOF and len(data) > SMALL_BYTES_MAX:
        text = (
            f"the request has {len(data)} bytes; at most {SMALL_BYTES_MAX} are allowed: send only the name of a service"
        )
        raise InvalidArgumentError(text)
    return data
