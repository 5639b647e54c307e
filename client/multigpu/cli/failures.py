"""How mgpuctl fails: an exception carries a sentence for a person and an exit code for a script.

Exit codes are part of the interface: scripts branch on them, so each has one meaning in every command.
"""

from typing import IO, Any, ClassVar

import click

WARNINGS = 6
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143

EXIT_CODES: tuple[tuple[str, str], ...] = (
    ("0", "Done."),
    ("1", "The operation failed."),
    ("2", "The command line or the configuration is wrong."),
    ("3", "No master answers."),
    ("4", "There is no such task, worker or queue."),
    ("5", "Some tasks failed, were cancelled or expired."),
    ("6", "`doctor`: no check fails, and there are warnings."),
    ("130", "Interrupted by Ctrl-C."),
)


class Failure(click.ClickException):
    """The operation failed. Shown on stderr; ends the command with its exit code."""

    exit_code: ClassVar[int] = 1

    def show(self, file: IO[Any] | None = None) -> None:
        from multigpu.cli.show import clean_lines  # noqa: PLC0415  it imports this module

        click.echo(f"mgpuctl: {clean_lines(self.format_message())}", file=file, err=file is None)


class WrongUsage(Failure):
    """The command line, the environment or the configuration file is wrong."""

    exit_code: ClassVar[int] = 2


class Unreachable(Failure):
    """No master answers."""

    exit_code: ClassVar[int] = 3


class NotFound(Failure):
    """What the command names does not exist."""

    exit_code: ClassVar[int] = 4


class TasksFailed(Failure):
    """Some tasks failed, were cancelled, expired or were rejected."""

    exit_code: ClassVar[int] = 5
