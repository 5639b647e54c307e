"""`mgpuctl watch`: prints the outcome of each task that ends, and at its own end the cursor to continue from."""

import click

from multigpu import Client, Outcome
from multigpu.cli import messages, show
from multigpu.cli.commands import Command
from multigpu.cli.options import json_option, master_option, queue_filter_option
from multigpu.cli.sdk_errors import sdk_session
from multigpu.cli.tasks.tasks import stages_text
from multigpu.cli.text import clean


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl watch", "Every retained outcome, then each new one; Ctrl-C ends it."),
        ("mgpuctl watch --from-now --kind embed", "Only new ones, of one kind."),
        ('mgpuctl watch --cursor "$CURSOR" --json | jq .task_id', "Continue after the last watch."),
    ),
)
@click.option("--cursor", default="", help="Continue after this point, which an earlier watch printed when it ended.")
@click.option("--from-now", is_flag=True, help="Omit tasks that have ended already.")
@queue_filter_option
@click.option("--kind", default="", metavar="KIND", help="Only tasks of this kind.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after N outcomes.")
@master_option
@json_option
def watch(cursor: str, from_now: bool, queue: str, kind: str, limit: int | None, address: str, as_json: bool) -> None:
    """Print outcomes as they come. Each durable task that ends, once.

    Continues through restarts of the master. When it ends, it prints the cursor to continue from to stderr.
    """
    if cursor and from_now:
        raise click.UsageError("give either --cursor or --from-now")
    printed = 0
    try:
        with sdk_session(), Client(address) as client:
            if from_now:
                cursor = client.current_cursor()  # printed even if no task ends
            for outcome, after in client.watch(cursor=cursor, queue=queue, kind=kind):
                show.line(show.as_json(messages.as_dict(outcome)) if as_json else _line(outcome))
                cursor = after
                printed += 1
                if printed == limit:
                    break
    finally:
        if cursor:
            show.note(f"cursor: {cursor}")


def _line(outcome: Outcome) -> str:
    error = f"  {outcome.error_type}: {outcome.error_message}".partition("\n")[0] if outcome.error_type else ""
    times = stages_text(outcome.message.stages)
    return clean(f"{outcome.task_id:>10}  {outcome.state.name.lower():<13} {outcome.worker_id or '-'}  {times}{error}")
