"""mgpuctl: the operator's and the impatient user's way to a master, one command a file.

Nothing here imports grpc, numpy or rich until a command needs it: `mgpuctl --help` must answer at once.
"""

import sys

import click

from multigpu.cli.commands import Group
from multigpu.cli.failures import EXIT_CODES, INTERRUPTED
from multigpu.cli.options import CONFIG_HELP, MASTER_HELP, Globals
from multigpu.cli.up import up


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    examples=(
        ("mgpuctl up &", "A master and its workers on this machine."),
        ("mgpuctl status", "How they are."),
        ("mgpuctl submit --kind echo --payload hi --wait", "One task, there and back."),
        ("mgpuctl embed corpus.txt -o vectors.npy", "One vector for each line."),
    ),
    exits=EXIT_CODES,
)
@click.option("--master", metavar="HOST:PORT", default=None, help=MASTER_HELP)
@click.option("--config", "config_file", metavar="FILE", default=None, help=CONFIG_HELP)
@click.pass_context
def cli(context: click.Context, master: str | None, config_file: str | None) -> None:
    """Run, ask and steer a multigpu fleet.

    Every command has --help with examples; most have --json for pipes.
    """
    context.obj = Globals(master=master, config_file=config_file)


for command in (up,):
    cli.add_command(command)


def main() -> None:
    """The entry point of mgpuctl."""
    try:
        exit_code = cli.main(prog_name="mgpuctl", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(exit_code if isinstance(exit_code, int) else 0)
