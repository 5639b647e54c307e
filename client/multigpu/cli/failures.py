"""Failures of a command: a message for people, and an exit code that means the same in every command."""

from typing import IO, Any, ClassVar

import click

from multigpu.cli.text import clean_lines

WARNINGS = 6
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143

EXIT_CODES: tuple[tuple[str, str], ...] = (
    ("0", "Done."),
    ("1", "The operation failed."),
    ("2", "The command line or the configuration is wrong."),
    ("3", "No master answers."),
    ("4", "There is no such task, worker, queue or model."),
    ("5", "Some tasks failed, were cancelled, expired or were rejected."),
    ("6", "`doctor`: no check fails, and there are warnings."),
    ("130", "Interrupted by Ctrl-C."),
    ("143", "Ended by SIGTERM."),
)


class TerminatedError(KeyboardInterrupt):
    """SIGTERM ends a command as Ctrl-C does: its tasks are cancelled, and no partly written file remains."""


class Failure(click.ClickException):
    """The operation failed. Shown on stderr; ends the command with its exit code."""

    exit_code: ClassVar[int] = 1

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"mgpuctl: {clean_lines(self.format_message())}", file=file, err=file is None)


class WrongUsage(Failure):
    """The command line, the environment or the configuration file is wrong."""

    exit_code: ClassVar[int] = 2


class Unreachable(Failure):
    """No master answers."""

    exit_code: ClassVar[int] = 3


class NotFound(Failure):
    """The task, worker, queue or other object that the command names does not exist."""

    exit_code: ClassVar[int] = 4


class TasksFailed(Failure):
    """Some tasks failed, were cancelled, expired or were rejected."""

    exit_code: ClassVar[int] = 5
