"""`mgpuctl energy`: what the fleet's tasks use of devices and energy."""

import click

from multigpu.cli.commands import Group
from multigpu.cli.energy.usage import usage


@click.group(cls=Group, examples=(("mgpuctl energy usage --by submitter --since 30d", "Who used how much."),))
def energy() -> None:
    """What tasks use: device time and energy, by queue, token or model."""


energy.add_command(usage)
