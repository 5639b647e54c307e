"""`mgpuctl energy`: what tasks use of devices and energy, and the devices that a benchmark can use."""

import click

from multigpu.cli.commands import Group
from multigpu.cli.energy.devices import check, info, recommend
from multigpu.cli.energy.usage import usage


@click.group(
    cls=Group,
    examples=(
        ("mgpuctl energy usage --by submitter --since 30d", "Who used how much."),
        ("mgpuctl energy check CONFIG.yaml", "Whether a benchmark can run here."),
    ),
)
def energy() -> None:
    """What tasks use of devices and energy; devices for a benchmark."""


for command in (usage, check, info, recommend):
    energy.add_command(command)
