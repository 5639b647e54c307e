"""`mgpuctl queues`: what waits where; pausing, resuming and limiting a queue."""

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Group
from multigpu.cli.options import json_option, master_option, size
from multigpu.cli.presence import there_are
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
def queues(context: click.Context) -> None:
    """See, pause, resume and limit queues. Without a command, lists them."""
    if context.invoked_subcommand is None:
        context.invoke(list_)


@queues.command("list", examples=(("mgpuctl queues list", "All queues, and what waits in them."),))
@master_option
@json_option
def list_(address: str, as_json: bool) -> None:
    """All queues, by name."""
    with Master(address) as master:
        known = all_queues(master)
    if as_json:
        show.value([show.as_dict(queue) for queue in known])
    else:
        show_queues(known)


@queues.command("pause", examples=(("mgpuctl queues pause night", "Nothing of it is dispatched until it is resumed."),))
@click.argument("queue")
@master_option
@json_option
def pause(queue: str, address: str, as_json: bool) -> None:
    """Stop dispatching from a queue. It still takes tasks; what runs goes on. Survives restarts."""
    with Master(address) as master:
        note_unknown_queue(master, queue)
        answer = master.call(master.admin.PauseQueue, admin.PauseQueueRequest(queue=queue))
    show_queue(answer.queue, as_json=as_json)


@queues.command("resume", examples=(("mgpuctl queues resume night", "Dispatch from it again."),))
@click.argument("queue")
@master_option
@json_option
def resume(queue: str, address: str, as_json: bool) -> None:
    """Dispatch from a paused queue again."""
    with Master(address) as master:
        note_unknown_queue(master, queue)
        answer = master.call(master.admin.ResumeQueue, admin.ResumeQueueRequest(queue=queue))
    show_queue(answer.queue, as_json=as_json)


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
@click.option("--bytes-max", type=size, metavar="SIZE", help="Their payload bytes; 0: the master's limit.")
@master_option
@json_option
def limits(queue: str, tasks_max: int | None, bytes_max: int | None, address: str, as_json: bool) -> None:
    """Set how much may wait in a queue. A limit that is not given stays as it is."""
    if tasks_max is None and bytes_max is None:
        raise click.UsageError("say what to limit: --tasks-max, --bytes-max or both; `queues list` shows what is set")
    with Master(address) as master:
        note_unknown_queue(master, queue)
        wanted = admin.QueueLimits()
        for known in all_queues(master):
            if known.queue == queue:
                wanted.CopyFrom(known.limits)
        if tasks_max is not None:
            wanted.tasks_max = tasks_max
        if bytes_max is not None:
            wanted.bytes_max = bytes_max
        answer = master.call(master.admin.SetQueueLimits, admin.SetQueueLimitsRequest(queue=queue, limits=wanted))
    show_queue(answer.queue, as_json=as_json)


def note_unknown_queue(master: Master, name: str) -> None:
    """Notes on stderr that no queue of this name has tasks or rules: it may be mistyped."""
    if name not in ("", "default") and name not in (names := [queue.queue for queue in all_queues(master)]):
        show.note(f"no queue {name!r} has tasks or rules{there_are(name, names)}")


def all_queues(master: Master) -> list[admin.Queue]:
    request = admin.ListQueuesRequest(page_size=1000)
    return [queue for page in master.pages(master.admin.ListQueues, request) for queue in page.queues]


def show_queue(queue: admin.Queue, *, as_json: bool) -> None:
    if as_json:
        show.value(show.as_dict(queue))
    else:
        show_queues([queue])


def show_queues(known: list[admin.Queue]) -> None:
    columns = ("QUEUE", "STATE", "QUEUED", "BYTES", "OLDEST", "LEASED", "LIMITS", "STRATEGY")
    rows = [
        (
            queue.queue,
            "paused" if queue.paused else "open",
            f"{queue.queued:,}",
            show.size(queue.queued_bytes),
            show.duration(show.seconds_of(queue.oldest_age)) if queue.HasField("oldest_age") else "-",
            f"{queue.leased:,}",
            limits_in_words(queue.limits),
            queue.strategy or "fleet's",
        )
        for queue in known
    ]
    tables.table(columns, rows, right=("QUEUED", "BYTES", "LEASED"), empty="no queue has tasks or rules")


def limits_in_words(limits: admin.QueueLimits) -> str:
    parts = [f"{limits.tasks_max:,} tasks"] if limits.tasks_max else []
    parts += [show.size(limits.bytes_max)] if limits.bytes_max else []
    return ", ".join(parts) or "master's"
