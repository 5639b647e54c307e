"""`mgpuctl strategy`: the policy that chooses a worker for a task, for the fleet or for one queue."""

import click

from multigpu import AdminClient
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import connected
from multigpu.cli.commands import Group
from multigpu.cli.options import json_option
from multigpu.cli.tables import Column
from multigpu.cli.text import clean


@click.group(cls=Group)
def strategy() -> None:
    """See or change how tasks are placed on workers."""


@strategy.command(
    "get",
    examples=(
        ("mgpuctl strategy get", "The fleet's, and all there are."),
        ("mgpuctl strategy get --queue night", "The strategy of one queue."),
    ),
)
@click.option("--queue", default="", metavar="QUEUE", help="Of this queue.  [default: the fleet's]")
@connected
@json_option
def get(queue: str, admin: AdminClient, as_json: bool) -> None:
    """The strategy in force, and the available ones."""
    answer = admin.get_strategy(queue)
    if as_json:
        show.value(messages.as_dict(answer))
        return
    inherited = ", inherited from the fleet" if queue and answer.inherited else ""
    show.line(f"{_scope(queue)}: {answer.strategy}{inherited}")
    show.line()
    columns = (
        Column("", lambda info: "*" if info.name == answer.strategy else ""),
        Column("STRATEGY", lambda info: info.name),
        Column("ALSO", lambda info: ", ".join(info.aliases)),
        Column("CHOOSES", lambda info: info.summary),
    )
    tables.show_rows(answer.available, columns, empty="the master lists no strategies")


@strategy.command(
    "set",
    examples=(
        ("mgpuctl strategy set round_robin", "For the fleet, from the next task on."),
        ("mgpuctl strategy set least_loaded --queue night", "For one queue."),
        ("mgpuctl strategy set --inherit --queue night", "The queue follows the fleet again."),
    ),
)
@click.argument("name", metavar="[STRATEGY]", default="")
@click.option("--queue", default="", metavar="QUEUE", help="For this queue.  [default: for the fleet]")
@click.option("--inherit", is_flag=True, help="The queue follows the fleet again.")
@connected
@json_option
def set_(name: str, queue: str, inherit: bool, admin: AdminClient, as_json: bool) -> None:
    """Change the strategy. It takes effect at once, and survives restarts."""
    if inherit == bool(name) or (inherit and not queue):
        raise click.UsageError(
            "give either a STRATEGY, or --inherit with --queue; `mgpuctl strategy get` lists strategies"
        )
    chosen = admin.set_strategy(name, queue=queue)
    if as_json:
        show.value({"strategy": chosen})
    else:
        show.line(f"{_scope(queue)}: {chosen}")


def _scope(queue: str) -> str:
    return f"Queue {clean(queue)}" if queue else "Fleet"
