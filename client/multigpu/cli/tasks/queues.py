"""`mgpuctl queues`: lists queues with their numbers of tasks; pauses, resumes and limits a queue."""

import click

from multigpu import AdminClient
from multigpu._units import format_duration, format_size
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import connected
from multigpu.cli.commands import Group, list_by_default
from multigpu.cli.options import json_option, parse_size
from multigpu.cli.presence import note_unknown_queue
from multigpu.cli.tables import Column
from multigpu.fleet import Queue, QueueLimits

COLUMNS = (
    Column("QUEUE", lambda queue: queue.queue),
    Column("STATE", lambda queue: "paused" if queue.paused else "open"),
    Column("QUEUED", lambda queue: f"{queue.queued:,}", right=True),
    Column("BYTES", lambda queue: format_size(queue.queued_bytes), right=True),
    Column("OLDEST", lambda queue: "-" if queue.oldest_age_s is None else format_duration(queue.oldest_age_s)),
    Column("LEASED", lambda queue: f"{queue.leased:,}", right=True),
    Column("LIMITS", lambda queue: limits_text(queue.limits)),
    Column("STRATEGY", lambda queue: queue.strategy or "fleet's"),
)
EMPTY = "no queue has tasks or rules"


@click.group(cls=Group, invoke_without_command=True)
@json_option
@click.pass_context
def queues(context: click.Context, as_json: bool) -> None:
    """See, pause, resume and limit queues. Without a command, lists them."""
    list_by_default(context, list_, as_json=as_json)


@queues.command("list", examples=(("mgpuctl queues list", "All queues, and what waits in them."),))
@connected
@json_option
def list_(admin: AdminClient, as_json: bool) -> None:
    """All queues, by name."""
    tables.show_rows(admin.list_queues(), COLUMNS, as_json=as_json, empty=EMPTY)


@queues.command("pause", examples=(("mgpuctl queues pause night", "Its tasks wait until it is resumed."),))
@click.argument("queue")
@connected
@json_option
def pause(queue: str, admin: AdminClient, as_json: bool) -> None:
    """Stop dispatching from a queue. It still takes tasks; running ones continue. Survives restarts."""
    note_unknown_queue(admin, queue)
    _show(admin.pause_queue(queue), as_json=as_json)


@queues.command("resume", examples=(("mgpuctl queues resume night", "Dispatch from it again."),))
@click.argument("queue")
@connected
@json_option
def resume(queue: str, admin: AdminClient, as_json: bool) -> None:
    """Dispatch from a paused queue again."""
    note_unknown_queue(admin, queue)
    _show(admin.resume_queue(queue), as_json=as_json)


@queues.command(
    "limits",
    examples=(
        ("mgpuctl queues limits night --tasks-max 100000", "More are rejected with RESOURCE_EXHAUSTED."),
        ("mgpuctl queues limits night --bytes-max 2GiB", "The same by payload bytes."),
        ("mgpuctl queues limits night --tasks-max 0", "The master's own limit again."),
    ),
)
@click.argument("queue")
@click.option("--tasks-max", type=click.IntRange(min=0), metavar="N", help="Unsettled tasks; 0: the master's limit.")
@click.option("--bytes-max", type=parse_size, metavar="SIZE", help="Their payload bytes; 0: the master's limit.")
@connected
@json_option
def limits(queue: str, tasks_max: int | None, bytes_max: int | None, admin: AdminClient, as_json: bool) -> None:
    """Set how much may wait in a queue. An omitted limit does not change."""
    if tasks_max is None and bytes_max is None:
        raise click.UsageError("no limit given: use --tasks-max, --bytes-max or both; `queues list` shows the limits")
    note_unknown_queue(admin, queue)
    for known in admin.list_queues():
        if known.queue == queue:
            tasks_max = known.limits.tasks_max if tasks_max is None else tasks_max
            bytes_max = known.limits.bytes_max if bytes_max is None else bytes_max
    _show(admin.set_queue_limits(queue, tasks_max=tasks_max or 0, bytes_max=bytes_max or 0), as_json=as_json)


def _show(queue: Queue, *, as_json: bool) -> None:
    if as_json:
        show.value(messages.as_dict(queue))
    else:
        tables.show_rows([queue], COLUMNS)


def limits_text(limits: QueueLimits) -> str:
    parts = [f"{limits.tasks_max:,} tasks"] if limits.tasks_max else []
    parts += [format_size(limits.bytes_max)] if limits.bytes_max else []
    return ", ".join(parts) or "master's"
