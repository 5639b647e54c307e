"""`mgpuctl energy`: the energy benchmark, and what the fleet's tasks use of devices and energy."""

import click

from multigpu.cli.commands import Group
from multigpu.cli.energy.compare import compare
from multigpu.cli.energy.devices import check, info, recommend
from multigpu.cli.energy.report import report
from multigpu.cli.energy.run import run
from multigpu.cli.energy.usage import usage


@click.group(
    cls=Group,
    examples=(
        ("mgpuctl energy usage --by submitter --since 30d", "Who used how much."),
        ("mgpuctl energy check config.yaml", "Whether a benchmark can run here."),
        ("mgpuctl energy run config.yaml --html report.html", "Run it."),
        ("mgpuctl energy compare before.json after.json", "Does the second take more?"),
    ),
)
def energy() -> None:
    """The energy of a model, measured on this host; and what the fleet's tasks use of devices and energy."""


for command in (run, check, info, recommend, compare, report, usage):
    energy.add_command(command)
