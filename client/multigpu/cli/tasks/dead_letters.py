"""`mgpuctl dead-letters`: tasks that failed every attempt, kept with their input until requeued or deleted."""

import sys
from typing import Any

import click

from multigpu.cli import messages, show, tables
from multigpu.cli.commands import Group
from multigpu.cli.failures import NotFound
from multigpu.cli.options import TASK_ID, F, json_option, limit_option, queue_filter_option
from multigpu.cli.presence import note_unknown_queue
from multigpu.cli.rpc import Master, connected
from multigpu.cli.tables import Column
from multigpu.cli.text import age
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2


def _error(task: task_pb2.Task) -> str:
    error = task.outcome.error if task.outcome.HasField("error") else task.last_error
    return f"{error.type}: {error.message}".partition("\n")[0]


COLUMNS = (
    Column("TASK", lambda task: str(task.task_id), right=True),
    Column("KIND", lambda task: task.spec.kind),
    Column("QUEUE", lambda task: task.spec.queue),
    Column("AGE", lambda task: age(task, "submit_time")),
    Column("ATTEMPTS", lambda task: str(task.attempts), right=True),
    Column("WORKER", lambda task: task.outcome.worker_id or task.worker_id or "-"),
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
def list_(queue: str, limit: int, master: Master, as_json: bool) -> None:
    """Dead letters, the newest first."""
    found = master.newest_tasks(master.admin.ListDeadLetters, admin.ListDeadLettersRequest(queue=queue), limit)
    if not found:
        note_unknown_queue(master, queue)
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
def requeue(task_ids: tuple[int, ...], queue: str, master: Master, as_json: bool) -> None:
    """Run dead letters again, under their ids, with all attempts. Prints the ids."""
    request = admin.RequeueDeadLettersRequest(task_ids=task_ids, queue=queue)
    answer = _apply(master, master.admin.RequeueDeadLetters, request, admin.RequeueDeadLettersResponse())
    if as_json:
        show.value(messages.as_dict(answer))
    else:
        for task_id in answer.task_ids:
            show.line(str(task_id))
        if queue and not answer.task_ids:
            show.note(f"queue {queue} has no dead letters")
    _check_known(answer)


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
def delete(task_ids: tuple[int, ...], queue: str, yes: bool, master: Master, as_json: bool) -> None:
    """Delete dead letters with their input."""
    if queue and not task_ids and not yes:
        _confirm(queue)
    request = admin.DeleteDeadLettersRequest(task_ids=task_ids, queue=queue)
    answer = _apply(master, master.admin.DeleteDeadLetters, request, admin.DeleteDeadLettersResponse())
    if as_json:
        show.value(messages.as_dict(answer))
    else:
        show.line(f"deleted {answer.deleted:,}")
    _check_known(answer)


def _confirm(queue: str) -> None:
    try:
        sure = click.confirm(f"Delete every dead letter of queue {queue}?", err=True)
    except click.Abort:  # Ctrl-C, or the end of standard input
        if sys.stdin.isatty():
            raise
        raise click.UsageError("standard input gives no answer; --yes deletes without a confirmation") from None
    if not sure:
        raise click.Abort


def _apply(master: Master, method: Any, request: Any, answer: Any) -> Any:
    """Calls `method` page by page, merges the answers into `answer`, and reports progress on stderr."""
    if bool(request.task_ids) == bool(request.queue):
        raise click.UsageError("give either TASK_IDs or --queue; `mgpuctl dead-letters list` shows both")
    deleting = isinstance(answer, admin.DeleteDeadLettersResponse)
    for page in master.pages(method, request):
        if deleting:
            page.deleted += answer.deleted
        answer.MergeFrom(page)
        count = answer.deleted if deleting else len(answer.task_ids)
        if page.next_page_token:
            show.note(f"{'deleted' if deleting else 'requeued'} {count:,} so far")
    if not count:
        note_unknown_queue(master, request.queue)
    answer.ClearField("next_page_token")
    return answer


def _check_known(answer: Any) -> None:
    if answer.unknown_task_ids:
        unknown = ", ".join(map(str, answer.unknown_task_ids))
        raise NotFound(f"no dead letters: {unknown}; `mgpuctl dead-letters list` shows them")
