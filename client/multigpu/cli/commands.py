"""Commands that teach: click's, with a section of examples at the end of every --help."""

from collections.abc import Sequence
from typing import Any

import click

Rows = Sequence[tuple[str, str]]


class Command(click.Command):
    """`examples`: what to type and what it does. `exits`: exit codes that only this command has words for."""

    def __init__(self, *args: Any, examples: Rows = (), exits: Rows = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.exits = exits

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        write_sections(formatter, self.examples, self.exits)


class Group(click.Group):
    """A group whose commands are `Command`s."""

    command_class = Command

    def __init__(self, *args: Any, examples: Rows = (), exits: Rows = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.exits = exits

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        write_sections(formatter, self.examples, self.exits)


def write_sections(formatter: click.HelpFormatter, examples: Rows, exits: Rows) -> None:
    if examples:
        with formatter.section("Examples"):
            formatter.write_dl(examples, col_max=46)
    if exits:
        with formatter.section("Exit codes"):
            formatter.write_dl(exits)
