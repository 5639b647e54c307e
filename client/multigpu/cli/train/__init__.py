"""`mgpuctl train`: training jobs, which several workers run together."""

import click

from multigpu.cli.commands import Group
from multigpu.cli.train.finetune import finetune
from multigpu.cli.train.inspect import list_, logs, metrics, show_
from multigpu.cli.train.run import resume, run, stop


@click.group(cls=Group)
def train() -> None:
    """Run training scripts written for torchrun on several workers. Their jobs survive the end of any process."""


for _command in (run, finetune, list_, show_, logs, metrics, stop, resume):
    train.add_command(_command)
