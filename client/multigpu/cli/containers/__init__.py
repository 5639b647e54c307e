"""`mgpuctl containers`: model servers in containers, on chosen GPUs of this host."""

import click

from multigpu.cli.commands import Group
from multigpu.cli.containers.deploy import deploy
from multigpu.cli.containers.manage import detect, list_, logs, stop


@click.group(
    cls=Group, examples=(("mgpuctl containers deploy --model facebook/opt-1.3b --devices 0,1", "On two GPUs."),)
)
def containers() -> None:
    """Model servers in containers, on chosen GPUs of this host."""


for command in (deploy, list_, logs, stop, detect):
    containers.add_command(command)
