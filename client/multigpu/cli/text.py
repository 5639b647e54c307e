"""Text for people: ages, and text from tasks and workers with its control characters replaced."""

import time
from datetime import datetime
from typing import Any

from multigpu._units import format_duration


def clean(text: str) -> str:
    """Untrusted text on one line: line breaks and tabs become spaces, other unprintable characters U+FFFD."""
    return "".join(char if char.isprintable() else " " if char in "\n\t" else "\ufffd" for char in text)


def clean_lines(text: str) -> str:
    """Like `clean`, but keeps line breaks."""
    return "\n".join(clean(part) for part in text.split("\n"))


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def seconds_of(span: Any) -> float:
    """A Timestamp (since 1970) or Duration in seconds."""
    return float(span.seconds + span.nanos / 1e9)


def since(instant: datetime | None) -> str:
    """The time since an instant; empty if it is unknown."""
    return format_duration(time.time() - instant.timestamp()) if instant is not None else ""
