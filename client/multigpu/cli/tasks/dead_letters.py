"""`mgpuctl dead-letters`: tasks that failed every attempt, kept with their input until requeued or deleted."""

import sys
from collections.abc import Sequence

import click

from multigpu import AdminClient, Task
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import connected, newest
from multigpu.cli.commands import Group
from multigpu.cli.failures import NotFound
from multigpu.cli.options import TASK_ID, F, json_option, limit_option, queue_filter_option
from multigpu.cli.presence import note_unknown_queue
from multigpu.cli.tables import Column
from multigpu.cli.text import since


def _error(task: Task) -> str:
    message = task.message
    error = message.outcome.error if message.outcome.HasField("error") else message.last_error
    return f"{error.type}: {error.message}".partition("\n")[0]


COLUMNS = (
    Column("TASK", lambda task: str(task.task_id), right=True),
    Column("KIND", lambda task: task.kind),
    Column("QUEUE", lambda task: task.message.spec.queue),
    Column("AGE", lambda task: since(task.submit_time)),
    Column("ATTEMPTS", lambda task: str(task.attempts), right=True),
    Column("WORKER", lambda task: task.message.outcome.worker_id or task.worker_id or "-"),
    Column("ERROR", _error),
)


@click.group(cls=Group)
def dead_letters() -> None:
    """See, requeue and delete tasks that failed every attempt."""


@dead_letters.command(
    "list",
    examples=(
        ("mgpuctl dead-letters list", "The newest, and why they failed."),
        ("mgpuctl dead-letters list --queue night --limit 1000", "More, of one queue."),
    ),
)
@queue_filter_option
@limit_option("dead letters")
@connected
@json_option
def list_(queue: str, limit: int, admin: AdminClient, as_json: bool) -> None:
    """Dead letters, the newest first."""
    found = newest(admin.list_dead_letters(queue), limit)
    if not found:
        note_unknown_queue(admin, queue)
    tables.show_rows(found, COLUMNS, as_json=as_json, empty="no dead letters")


def chosen(command: F) -> F:
    """Adds TASK_IDs and --queue to a command, which accepts one of the two."""
    queue = click.option("--queue", default="", metavar="QUEUE", help="Instead of ids: every dead letter of QUEUE.")
    return click.argument("task_ids", metavar="[TASK_ID]...", nargs=-1, type=TASK_ID)(queue(command))


@dead_letters.command(
    "requeue",
    examples=(
        ("mgpuctl dead-letters requeue 17 21", "Try these two again, with all their attempts."),
        ("mgpuctl dead-letters requeue --queue night", "Every dead letter of a queue."),
    ),
)
@chosen
@connected
@json_option
def requeue(task_ids: tuple[int, ...], queue: str, admin: AdminClient, as_json: bool) -> None:
    """Run dead letters again, under their ids, with all attempts. Prints the ids."""
    _check_chosen(task_ids, queue)
    result = admin.requeue_dead_letters(task_ids, queue=queue)
    if not result.task_ids:
        note_unknown_queue(admin, queue)
    if as_json:
        show.value(messages.as_dict(result))
    else:
        for task_id in result.task_ids:
            show.line(str(task_id))
        if queue and not result.task_ids:
            show.note(f"queue {queue} has no dead letters")
    _check_known(result.unknown_task_ids)


@dead_letters.command(
    "delete",
    examples=(
        ("mgpuctl dead-letters delete 17 21", "Deletes their input too."),
        ("mgpuctl dead-letters delete --queue night --yes", "All of a queue, without a confirmation."),
    ),
)
@chosen
@click.option("--yes", is_flag=True, help="Delete a whole queue's without a confirmation.")
@connected
@json_option
def delete(task_ids: tuple[int, ...], queue: str, yes: bool, admin: AdminClient, as_json: bool) -> None:
    """Delete dead letters with their input."""
    _check_chosen(task_ids, queue)
    if queue and not yes:
        _confirm(queue)
    result = admin.delete_dead_letters(task_ids, queue=queue)
    if not result.deleted:
        note_unknown_queue(admin, queue)
    if as_json:
        show.value(messages.as_dict(result))
    else:
        show.line(f"deleted {result.deleted:,}")
    _check_known(result.unknown_task_ids)


def _confirm(queue: str) -> None:
    try:
        sure = click.confirm(f"Delete every dead letter of queue {queue}?", err=True)
    except click.Abort:  # Ctrl-C, or the end of standard input
        if sys.stdin.isatty():
            raise
        raise click.UsageError("standard input gives no answer; --yes deletes without a confirmation") from None
    if not sure:
        raise click.Abort


def _check_chosen(task_ids: Sequence[int], queue: str) -> None:
    if bool(task_ids) == bool(queue):
        raise click.UsageError("give either TASK_IDs or --queue; `mgpuctl dead-letters list` shows both")


def _check_known(unknown: Sequence[int]) -> None:
    if unknown:
        raise NotFound(f"no dead letters: {', '.join(map(str, unknown))}; `mgpuctl dead-letters list` shows them")
