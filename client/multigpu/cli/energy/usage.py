"""`mgpuctl energy usage`: device time and energy of tasks in a period, summed by queue, token, kind or model."""

import re
from datetime import UTC, datetime, timedelta
from functools import partial

import click

from multigpu import AdminClient
from multigpu._units import format_duration, format_energy
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import connected
from multigpu.cli.commands import Command
from multigpu.cli.options import json_option
from multigpu.cli.tables import Column
from multigpu.fleet import Usage
from multigpu.options import USAGE_KEYS

SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
EMPTY = "no task has used a device in this period"


def parse_time(text: str) -> datetime:
    """A time: "300s", "90min", "24h" or "7d" ago, or a date and perhaps a time, local unless it names a zone."""
    try:
        if ago := re.fullmatch(r"(\d{1,6})(s|m|min|h|d)", text):
            return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * SECONDS[ago[2]])
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        hint = f"{text!r} is no time; write 90min, 24h, 7d, 2026-11-01 or 2026-11-01T08:00"
        raise click.BadParameter(hint) from None


def parse_keys(text: str) -> tuple[str, ...]:
    """Names of USAGE_KEYS with commas between them."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [name for name in names if name not in USAGE_KEYS]:
        raise click.BadParameter(
            f"usage can't be summed by {unknown[0]!r}; use some of {', '.join(USAGE_KEYS)} (submitter: the token)"
        )
    return names


def columns(by: tuple[str, ...]) -> list[Column]:
    return [
        *[Column(name.upper(), partial(_key, name)) for name in by],
        Column("TASKS", lambda row: f"{row.tasks_succeeded:,}", right=True),
        Column("FAILED", lambda row: f"{row.attempts_failed:,}", right=True, rank=3),
        Column("DEVICE TIME", lambda row: format_duration(row.device_duration_s or 0.0), right=True),
        Column("MEASURED", _measured, right=True, rank=2),
        Column("ENERGY", _energy, right=True),
        Column("A TASK", _each, right=True, rank=1),
    ]


@click.command(
    "usage",
    cls=Command,
    examples=(
        ("mgpuctl energy usage", "The last 24 hours, by queue."),
        ("mgpuctl energy usage --by submitter,model --since 30d", "Who used which model, in 30 days."),
        ("mgpuctl energy usage --since 2026-11-01 --until 2026-12-01 --json", "A month, for a script."),
    ),
)
@click.option(
    "--by",
    type=parse_keys,
    metavar="KEY,KEY",
    default="queue",
    show_default=True,
    help="Some of queue, submitter, kind, model.",
)
@click.option(
    "--since", type=parse_time, metavar="TIME", help="90min, 24h, 7d (ago), or a date and time.  [default: 24h]"
)
@click.option("--until", type=parse_time, metavar="TIME", help="The same.  [default: now]")
@connected
@json_option
def usage(
    by: tuple[str, ...], since: datetime | None, until: datetime | None, admin: AdminClient, as_json: bool
) -> None:
    """Device time and energy of tasks in a period, summed.

    The master keeps sums of 10 minutes for 400 days; the period is extended to whole ones. The submitter is the name of
    the token; tasks that named no model count under "-". FAILED counts attempts. MEASURED is the part of the device
    time for which energy was measured; ENERGY is that of this part alone, with its uncertainty, and includes the idle
    power of the device. A TASK has a value where all was measured.
    """
    report = admin.usage(by, begin=since, end=until)
    if as_json:
        show.value(messages.as_dict(report))
        return
    if report.usage and report.begin_time and report.end_time:
        begin, end = (f"{time.astimezone():%Y-%m-%d %H:%M}" for time in (report.begin_time, report.end_time))
        show.note(f"{begin} to {end}")
    tables.show_rows(report.usage, columns(by), empty=EMPTY)


def _key(name: str, row: Usage) -> str:
    return getattr(row, name) or "-"


def _measured(row: Usage) -> str:
    total_s = row.device_duration_s or 0.0
    return f"{(row.measured_duration_s or 0.0) / total_s:.0%}" if total_s else "-"


def _energy(row: Usage) -> str:
    if not row.measured_duration_s:
        return "-"
    uncertainty = row.energy_uncertainty_joules / row.energy_joules if row.energy_joules else 0.0
    return f"{format_energy(row.energy_joules)} ± {uncertainty:.0%}"


def _each(row: Usage) -> str:
    """Energy of a task, where all device time was measured."""
    whole = (row.measured_duration_s or 0.0) >= 0.999 * (row.device_duration_s or 0.0) > 0
    return format_energy(row.energy_joules / row.tasks_succeeded) if whole and row.tasks_succeeded else "-"
