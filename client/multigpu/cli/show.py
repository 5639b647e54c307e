"""How answers are printed: facts for people, JSON for programs, one way for all commands. Tables are in tables.py.

What tasks and workers say about themselves is foreign text: control characters never reach the terminal.
"""

import base64
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from multigpu.cli.failures import BROKEN_PIPE

KIB = 1024
# Why a journal can't be written.
NO_ROOM = "the disk is full, or journal_bytes_max is reached: the master's log says which"


def line(text: str = "") -> None:
    """A line to stdout. If the reader has gone, ends the program quietly, as other tools do."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly()


def raw(data: bytes) -> None:
    """Bytes to stdout, as they are."""
    left = memoryview(data)
    try:
        sys.stdout.flush()
        while left:  # without a buffer (python -u) a write may take only a part, and says how much
            left = left[sys.stdout.buffer.write(left) :]
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _leave_quietly()


def result(data: bytes) -> None:
    """What a task returned: as it is, with a line end on a terminal that would miss it."""
    raw(data + b"\n" if sys.stdout.isatty() and not data.endswith(b"\n") else data)


def _leave_quietly() -> None:
    give_up_stdout()
    raise SystemExit(BROKEN_PIPE)


def give_up_stdout() -> None:
    """The interpreter flushes stdout once more at exit: let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """A remark to stderr, beside the answer."""
    sys.stderr.write(clean_lines(text) + "\n")
    sys.stderr.flush()


def note_of_limit(*, more: bool, limit: int) -> None:
    """Says that a list ends at its --limit, where there is more."""
    if more:
        note(f"only the newest {limit:,}; --limit shows more")


def value(data: Any) -> None:
    """One JSON value: indented on a terminal, one line in a pipe."""
    line(as_json(data, indent=2 if sys.stdout.isatty() else None))


def as_json(data: Any, indent: int | None = None) -> str:
    """JSON for stdout. A terminal gets ASCII: foreign text may hold characters that it obeys. A lone surrogate, which
    JSON may name and UTF-8 can't hold, stays an escape.
    """
    text = json.dumps(data, ensure_ascii=sys.stdout.isatty(), indent=indent)
    return text.encode("utf-8", "backslashreplace").decode()


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair a line; pairs without a value are left out."""
    shown = [(clean(name), text) for name, text in pairs if text]
    width = max((len(name) for name, _ in shown), default=0)
    for name, text in shown:
        first, *more = clean_lines(text).splitlines() or [""]
        line(f"{name:<{width}}  {first}")
        for continued in more:
            line(f"{'':<{width}}  {continued}")


def clean(text: str) -> str:
    """Foreign text in one line: line breaks and tabs are spaces, all else that is not printable is replaced."""
    return "".join(char if char.isprintable() else " " if char in "\n\t" else "\ufffd" for char in text)


def clean_lines(text: str) -> str:
    """The same, with its line breaks: for text that has a place of its own."""
    return "\n".join(clean(part) for part in text.split("\n"))


def size(count: int) -> str:
    """Bytes for people: "512 B", "1.5 MiB"."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < KIB:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= KIB
    return f"{amount:.1f} TiB"


def duration(seconds: float) -> str:
    """A time span for people: "62 µs", "3.5 ms", "2.5 s", "42 s", "3 min 5 s", "2 h 10 min", "4 d 3 h"."""
    if seconds <= 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (9.95, 1.0, "s")):
        if seconds < limit:
            return f"{seconds * factor:.2g} {unit}" if seconds * factor < 99.5 else f"{seconds * factor:.0f} {unit}"
    whole = round(seconds)
    for limit, large, large_unit, small, small_unit in (
        (60, 1, "s", 0, ""),
        (3600, 60, "min", 1, "s"),
        (86400, 3600, "h", 60, "min"),
    ):
        if whole < limit:
            first = f"{whole // large} {large_unit}"
            return f"{first} {whole % large // small} {small_unit}" if small else first
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def age(message: Any, field: str) -> str:
    """How long ago a Timestamp field was; empty if it is absent."""
    return duration(time.time() - seconds_of(getattr(message, field))) if message.HasField(field) else ""


def seconds_of(span: Any) -> float:
    """A Timestamp (since 1970) or Duration in seconds."""
    return float(span.seconds + span.nanos / 1e9)


def enum_name(message: Any, field: str) -> str:
    """An enum field's value without the prefix that all its values share: TASK_STATE_QUEUED is "QUEUED"."""
    kind = message.DESCRIPTOR.fields_by_name[field].enum_type
    number = getattr(message, field)
    known = kind.values_by_number.get(number)
    if known is None:
        return str(number)
    zero: str = kind.values_by_number[0].name
    return str(known.name).removeprefix(zero.removesuffix("UNSPECIFIED"))


def as_dict(message: Any) -> dict[str, Any]:
    """A protobuf message for json.dumps, in a shape that scripts can rely on.

    Fields keep their names. Numbers stay numbers (ids are below 2^53), times are RFC 3339 strings, durations seconds,
    enum values short names. A field that can be absent is left out when it is; every other one is always there. Bytes
    are text where they are UTF-8; else the field is called NAME_base64. A result whose content_type says JSON is the
    value itself.
    """
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        content = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            out[field.name] = dict(content)
            continue
        repeated = field.is_repeated
        values = [_plain(field, message, each) for each in (content if repeated else [content])]
        name = field.name
        if any(isinstance(each, bytes) for each in values):
            name += "_base64"
            values = [base64.b64encode(each).decode() for each in (content if repeated else [content])]
        out[name] = values if repeated else values[0]
    return out


def _plain(field: Any, message: Any, content: Any) -> Any:
    """One value of a field; bytes only where they are no text."""
    if field.enum_type is not None:
        if not field.is_repeated:
            return enum_name(message, field.name)
        return field.enum_type.values_by_number[content].name
    if field.message_type is not None:
        if field.message_type.full_name == "google.protobuf.Timestamp":
            return content.ToJsonString()
        if field.message_type.full_name == "google.protobuf.Duration":
            return seconds_of(content)
        return as_dict(content)
    if isinstance(content, bytes):
        return decoded(content, getattr(message, "content_type", ""))
    return content


def decoded(data: bytes, content_type: str) -> Any:
    """A result or payload as its content type reads: a JSON value, text, or the bytes if they are neither."""
    try:
        text = data.decode()
        return json.loads(text) if content_type == "application/json" and text else text
    except (ValueError, RecursionError):
        return data
