"""`mgpuctl dead-letters`: tasks whose every attempt failed, kept with their input until a person decides."""

import sys

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Group
from multigpu.cli.failures import NotFound
from multigpu.cli.options import TASK_ID, json_option, master_option
from multigpu.cli.rpc import Master
from multigpu.cli.tasks.queues import note_unknown_queue
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2


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
@click.option("--queue", default="", metavar="QUEUE", help="Only of this queue.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="At most N dead letters."
)
@master_option
@json_option
def list_(queue: str, limit: int, address: str, as_json: bool) -> None:
    """Dead letters, the newest first."""
    with Master(address) as master:
        found = master.newest_tasks(master.admin.ListDeadLetters, admin.ListDeadLettersRequest(queue=queue), limit)
        if not found:
            note_unknown_queue(master, queue)
    if as_json:
        show.value([show.as_dict(task) for task in found])
        return
    columns = ("TASK", "KIND", "QUEUE", "AGE", "ATTEMPTS", "WORKER", "ERROR")
    rows = [dead_letter_row(task) for task in found]
    tables.table(columns, rows, right=("TASK", "ATTEMPTS"), empty="no dead letters")


def dead_letter_row(task: task_pb2.Task) -> tuple[str, ...]:
    error = task.outcome.error if task.outcome.HasField("error") else task.last_error
    said = f"{error.type}: {error.message}".partition("\n")[0]
    worker_id = task.outcome.worker_id or task.worker_id
    age = show.age(task, "submit_time")
    return (str(task.task_id), task.spec.kind, task.spec.queue, age, str(task.attempts), worker_id or "-", said)


@dead_letters.command(
    "requeue",
    examples=(
        ("mgpuctl dead-letters requeue 17 21", "Try these two again, with all their attempts."),
        ("mgpuctl dead-letters requeue --queue night", "Every dead letter of a queue."),
    ),
)
@click.argument("task_ids", metavar="[TASK_ID]...", nargs=-1, type=TASK_ID)
@click.option("--queue", default="", metavar="QUEUE", help="Instead of ids: every dead letter of this queue.")
@master_option
@json_option
def requeue(task_ids: tuple[int, ...], queue: str, address: str, as_json: bool) -> None:
    """Queue dead letters again, as new tasks. Prints the new ids."""
    require_one(task_ids, queue)
    with Master(address) as master:
        request = admin.RequeueDeadLettersRequest(task_ids=task_ids, queue=queue)
        answer = admin.RequeueDeadLettersResponse()
        for page in master.pages(master.admin.RequeueDeadLetters, request):
            answer.MergeFrom(page)
            if page.next_page_token:
                show.note(f"requeued {len(answer.task_ids):,} so far")
        if not answer.task_ids:
            note_unknown_queue(master, queue)
        answer.ClearField("next_page_token")
    if as_json:
        show.value(show.as_dict(answer))
    else:
        for task_id in answer.task_ids:
            show.line(str(task_id))
        if queue and not answer.task_ids:
            show.note(f"queue {queue} has no dead letters")
    reject_unknown(list(answer.unknown_task_ids))


@dead_letters.command(
    "delete",
    examples=(
        ("mgpuctl dead-letters delete 17 21", "Their input is gone for good."),
        ("mgpuctl dead-letters delete --queue night --yes", "All of a queue, without being asked."),
    ),
)
@click.argument("task_ids", metavar="[TASK_ID]...", nargs=-1, type=TASK_ID)
@click.option("--queue", default="", metavar="QUEUE", help="Instead of ids: every dead letter of this queue.")
@click.option("--yes", is_flag=True, help="Don't ask before deleting a whole queue's.")
@master_option
@json_option
def delete(task_ids: tuple[int, ...], queue: str, yes: bool, address: str, as_json: bool) -> None:
    """Delete dead letters with their input."""
    require_one(task_ids, queue)
    if queue and not yes:
        try:
            sure = click.confirm(f"Delete every dead letter of queue {queue}?", err=True)
        except click.Abort:  # Ctrl-C, or the end of standard input
            if sys.stdin.isatty():
                raise
            raise click.UsageError("standard input gives no answer; --yes deletes without being asked") from None
        if not sure:
            raise click.Abort
    with Master(address) as master:
        request = admin.DeleteDeadLettersRequest(task_ids=task_ids, queue=queue)
        answer = admin.DeleteDeadLettersResponse()
        for page in master.pages(master.admin.DeleteDeadLetters, request):
            page.deleted += answer.deleted
            answer.MergeFrom(page)
            if page.next_page_token:
                show.note(f"deleted {answer.deleted:,} so far")
        if not answer.deleted:
            note_unknown_queue(master, queue)
        answer.ClearField("next_page_token")
    if as_json:
        show.value(show.as_dict(answer))
    else:
        show.line(f"deleted {answer.deleted:,}")
    reject_unknown(list(answer.unknown_task_ids))


def require_one(task_ids: tuple[int, ...], queue: str) -> None:
    if bool(task_ids) == bool(queue):
        raise click.UsageError("give either TASK_IDs or --queue; `mgpuctl dead-letters list` shows both")


def reject_unknown(task_ids: list[int]) -> None:
    if task_ids:
        raise NotFound(f"no dead letters: {', '.join(map(str, task_ids))}; `mgpuctl dead-letters list` shows them")
