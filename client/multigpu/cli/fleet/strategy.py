"""`mgpuctl strategy`: which policy chooses a worker for a task, for the fleet or for one queue."""

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Group
from multigpu.cli.options import json_option, master_option
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin


@click.group(cls=Group)
def strategy() -> None:
    """See or change how tasks are placed on workers."""


@strategy.command(
    "get",
    examples=(
        ("mgpuctl strategy get", "The fleet's, and all there are."),
        ("mgpuctl strategy get --queue night", "That of one queue."),
    ),
)
@click.option("--queue", default="", metavar="QUEUE", help="Of this queue.  [default: the fleet's]")
@master_option
@json_option
def get(queue: str, address: str, as_json: bool) -> None:
    """The strategy in force, and those that could be."""
    with Master(address) as master:
        answer = master.call(master.admin.GetStrategy, admin.GetStrategyRequest(queue=queue))
    if as_json:
        show.value(show.as_dict(answer))
        return
    rows = [
        ("*" if info.name == answer.strategy else "", info.name, ", ".join(info.aliases), info.summary)
        for info in answer.available
    ]
    if queue:
        origin = ", inherited from the fleet" if answer.inherited else ""
        show.line(f"Queue {show.clean(queue)}: {answer.strategy}{origin}")
    else:
        show.line(f"Fleet: {answer.strategy}")
    show.line()
    tables.table(("", "STRATEGY", "ALSO", "CHOOSES"), rows, empty="the master lists no strategies")


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
@click.option("--inherit", is_flag=True, help="The queue has none of its own any more.")
@master_option
@json_option
def set_(name: str, queue: str, inherit: bool, address: str, as_json: bool) -> None:
    """Change the strategy. It takes effect at once, and survives restarts."""
    if inherit == bool(name) or (inherit and not queue):
        raise click.UsageError(
            "give either a STRATEGY, or --inherit with --queue; `mgpuctl strategy get` lists strategies"
        )
    with Master(address) as master:
        answer = master.call(master.admin.SetStrategy, admin.SetStrategyRequest(queue=queue, strategy=name))
    if as_json:
        show.value(show.as_dict(answer))
    else:
        show.line(f"{'Queue ' + show.clean(queue) if queue else 'Fleet'}: {answer.strategy}")
