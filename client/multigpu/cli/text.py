"""Text for people: units, and text from tasks and workers with its control characters replaced."""

import itertools
import time
from datetime import datetime
from typing import Any

KIB = 1024
UNITS_OF_TIME = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def clean(text: str) -> str:
    """Untrusted text on one line: line breaks and tabs become spaces, other unprintable characters U+FFFD."""
    return "".join(char if char.isprintable() else " " if char in "\n\t" else "\ufffd" for char in text)


def clean_lines(text: str) -> str:
    """Like `clean`, but keeps line breaks."""
    return "\n".join(clean(part) for part in text.split("\n"))


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_size(count: int) -> str:
    """Bytes: "512 B", "1.5 MiB"."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < KIB:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= KIB
    return f"{amount:.1f} TiB"


def format_energy(joules: float) -> str:
    """Energy: "80 µJ", "12 mJ", "3.4 J", "12 Wh", "1.5 kWh". Idle power that is taken off may make it negative."""
    if joules < 0:
        return f"-{format_energy(-joules)}"
    if joules == 0:
        return "0 J"
    for limit, factor, unit in ((1e-3, 1e6, "µJ"), (1.0, 1e3, "mJ"), (3600.0, 1.0, "J"), (3.6e6, 1 / 3600, "Wh")):
        if joules < limit:
            return f"{joules * factor:.3g} {unit}" if joules * factor < 999.5 else f"{joules * factor:,.0f} {unit}"
    return f"{joules / 3.6e6:,.3g} kWh" if joules < 3.6e9 else f"{joules / 3.6e6:,.0f} kWh"


def duration(seconds: float) -> str:
    """A duration: "62 µs", "3.5 ms", "2.5 s", "42 s", "3 min 5 s", "2 h 10 min", "4 d 3 h"."""
    if seconds <= 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (9.95, 1.0, "s")):
        if seconds < limit:
            return f"{seconds * factor:.2g} {unit}" if seconds * factor < 99.5 else f"{seconds * factor:.0f} {unit}"
    whole = round(seconds)
    for (large, name), (small, small_name) in itertools.pairwise(UNITS_OF_TIME):
        if whole >= large:
            return f"{whole // large} {name} {whole % large // small} {small_name}"
    return f"{whole} s"


def seconds_of(span: Any) -> float:
    """A Timestamp (since 1970) or Duration in seconds."""
    return float(span.seconds + span.nanos / 1e9)


def since(instant: datetime | None) -> str:
    """The time since an instant; empty if it is unknown."""
    return duration(time.time() - instant.timestamp()) if instant is not None else ""
