"""click's commands with a section of examples at the end of --help, and a group that imports a command when it runs.

`mgpuctl --help` answers at once, because it imports none of the commands' modules, nor grpc, numpy or rich.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

Rows = Sequence[tuple[str, str]]


class _WithExamples(click.Command):
    """`examples`: a command line and what it does. `exits`: exit codes with a meaning of this command."""

    def __init__(self, *args: Any, examples: Rows = (), exits: Rows = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.exits = exits

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        for title, rows, width in (("Examples", self.examples, 46), ("Exit codes", self.exits, 30)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=width)


class Command(_WithExamples):
    """A command."""


class Group(_WithExamples, click.Group):
    """A group whose commands are `Command`s."""

    command_class = Command


def list_by_default(context: click.Context, command: click.Command, *, as_json: bool) -> None:
    """Runs a group's command `list` if the command line names none."""
    if context.invoked_subcommand is None:
        context.invoke(command, as_json=as_json)
    elif as_json:
        raise click.UsageError(f"--json belongs to the command: write it after {context.invoked_subcommand!r}")


class LazyGroup(Group):
    """`entries`: each command's "module:name" and summary, in the order of --help."""

    def __init__(self, *args: Any, entries: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in self.entries:
            return None
        module, _, name = self.entries[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.entries.items()])
