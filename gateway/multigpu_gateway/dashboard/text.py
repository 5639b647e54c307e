"""Formats values for people. An unknown value (None) becomes "-"."""

from datetime import UTC, datetime

from multigpu.task import Task, TaskState

UNKNOWN = "-"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """Formats as "1,234,567" or, for a fraction below 100, with three significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"


def counted(n: float, noun: str) -> str:
    """Formats as "1 task" or "1,200 tasks"."""
    return f"{number(n)} {noun}" + ("" if n == 1 else "s")


def rate(value: float | None) -> str:
    """Formats a number per second, as "1.5/s"."""
    return UNKNOWN if value is None else f"{number(round(value, 2))}/s"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f} W"


def energy(joules: float | None) -> str:
    """Formats as "3.4 J", "12 Wh" or "1.5 kWh"."""
    if joules is None:
        return UNKNOWN
    for limit, factor, unit in ((3599.5, 1.0, "J"), (3.5995e6, 1 / 3600, "Wh")):
        if joules < limit:
            return f"{number(joules * factor)} {unit}"
    return f"{number(joules / 3.6e6)} kWh"


def size(value: float | None) -> str:
    """Formats bytes as "512 B" or "1.5 MiB"."""
    if value is None:
        return UNKNOWN
    power = 0
    while value >= 1024 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.0f} {_UNITS[power]}" if not power or value >= 100 else f"{value:.1f} {_UNITS[power]}"


def duration(seconds: float | None) -> str:
    """Formats as "12 ms", "3.4 s", "5 min 10 s", "2 h 5 min" or "3 d 4 h"."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:  # as it is rounded, here and below
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 or seconds == 0 else "<1 ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {unit} {rest} {part}" if rest else f"{whole // large} {unit}"
    return f"{whole} s"


def time(instant: datetime | None) -> str:
    """Formats a time in UTC."""
    return UNKNOWN if instant is None else f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def age(instant: datetime | None) -> str:
    """Formats the time that has passed since `instant`."""
    return UNKNOWN if instant is None else duration(max(0.0, (datetime.now(UTC) - instant).total_seconds()))


def state(task: Task) -> str:
    """Returns the outcome's state of a task that has ended; else "running", "at a worker", "retrying" or "QUEUED"."""
    if task.outcome is not None:
        return task.outcome.state.name
    if task.state is TaskState.LEASED:
        return "running" if task.message.stages.HasField("start_time") else "at a worker"
    return "retrying" if task.attempts else task.state.name
