"""Formats values for people. An unknown value (None) becomes "-"."""

from datetime import UTC, datetime

from multigpu._units import format_duration, format_energy, format_size
from multigpu.task import Task, TaskState

UNKNOWN = "-"


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
    return UNKNOWN if joules is None else format_energy(joules)


def size(count: float | None) -> str:
    return UNKNOWN if count is None else format_size(count)


def duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_duration(seconds)


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
