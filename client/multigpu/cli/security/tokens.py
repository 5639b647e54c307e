"""`mgpuctl tokens`: the access tokens of a master. Its calls need an administrator's token."""

import sys
from pathlib import Path
from typing import Any

import click

from multigpu import AdminClient
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import connected
from multigpu.cli.commands import Group, list_by_default
from multigpu.cli.failures import Failure
from multigpu.cli.options import Number, json_option
from multigpu.cli.tables import Column
from multigpu.daemon.files import replace_file
from multigpu.fleet import Role, Token

ROLES = ("submit", "read", "worker", "admin")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _scope(token: Token) -> str:
    return " ".join((*token.queues, *token.worker_ids)) or "all"


def _roles(token: Token) -> str:
    return " ".join(role.name.lower() for role in token.roles)


def _expiry(token: Token) -> str:
    return f"{token.expire_time:%Y-%m-%d %H:%M}Z" if token.expire_time is not None else "never"


COLUMNS = (
    Column("TOKEN", lambda token: token.token_id),
    Column("NAME", lambda token: token.name),
    Column("ROLES", _roles),
    Column("FOR", _scope),
    Column("EXPIRES", _expiry),
    Column("TASKS/S", lambda token: f"{token.task_rate:g}" if token.task_rate else "-", right=True),
    Column("CALLS", lambda token: str(token.calls), right=True),
)


def ttl(text: str) -> float:
    """Seconds: 90s, 30m, 12h, 90d. For `click.option(type=ttl)`."""
    number, unit = text[:-1], text[-1:]
    if not number.isdigit() or unit not in UNITS or not int(number):
        raise click.BadParameter(f"{text!r} is no duration: write a number with s, m, h or d, such as 90d")
    return float(int(number) * UNITS[unit])


@click.group(cls=Group, invoke_without_command=True)
@json_option
@click.pass_context
def tokens(context: click.Context, as_json: bool) -> None:
    """Make, list and revoke the access tokens of a master. Without a command, lists them.

    For a master that runs with --require-tokens. The first token is in the file admin.token of the master's data
    directory: name it with MGPU_TOKEN_FILE.
    """
    list_by_default(context, list_, as_json=as_json)


@tokens.command(
    "create",
    examples=(
        ("mgpuctl tokens create alice --role submit --queue night", "For a client: tasks of one queue."),
        ("mgpuctl tokens create gpu2 --role worker --worker-id 'gpu2-*' -o gpu2.token", "For the workers of one host."),
        ("mgpuctl tokens create grafana --role read --ttl 90d", "Valid for 90 days."),
        ("mgpuctl tokens create batch --role submit --tasks-per-s 500", "More are rejected for a while."),
    ),
)
@click.argument("name")
@click.option("--role", "roles", multiple=True, required=True, type=click.Choice(ROLES), help="Repeatable.")
@click.option("--queue", "queues", multiple=True, metavar="QUEUE", help="Only tasks of this queue. Repeatable.")
@click.option(
    "--worker-id", "worker_ids", multiple=True, metavar="ID|PREFIX*", help="Only workers with this id. Repeatable."
)
@click.option("--ttl", type=ttl, metavar="DURATION", help="How long it is valid: 12h, 90d.  [default: until revoked]")
@click.option("--tasks-per-s", type=Number(min=0), default=0, metavar="N", help="0: no limit.")
@click.option(
    "--calls-max", type=click.IntRange(min=0), default=0, metavar="N", help="Open calls. 0: the master's limit."
)
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the token there, for the owner alone, instead of printing it.",
)  # fmt: skip
@connected
@json_option
def create(admin: AdminClient, output: Path | None, as_json: bool, **wanted: Any) -> None:
    """Make a token, and print it. It can't be shown again: the master keeps its hash."""
    if output is not None and (output.exists() or output.is_symlink()):
        raise Failure(f"{output} is there already, so no token was made: remove it, or name another file")
    answer = admin.create_token(
        wanted["name"],
        [Role[role.upper()] for role in wanted["roles"]],
        queues=wanted["queues"],
        worker_ids=wanted["worker_ids"],
        ttl_s=wanted["ttl"],
        task_rate=wanted["tasks_per_s"],
        calls_max=wanted["calls_max"],
    )
    if output is not None:
        try:
            replace_file(output, f"{answer.secret}\n".encode(), 0o600)
        except OSError as error:
            admin.revoke_token(answer.token.token_id)
            raise Failure(f"{output} can't be written, so no token was made: {error}") from error
    if as_json:
        where = {"file": str(output)} if output is not None else {"token": answer.secret}
        show.value(messages.as_dict(answer.token) | where)
    elif output is not None:
        show.line(f"{output}: token {answer.token.token_id}")
    else:
        show.line(answer.secret)
        if sys.stdout.isatty():
            show.note(f"token {answer.token.token_id}; it can't be shown again")


@tokens.command("list", examples=(("mgpuctl tokens list", "All valid tokens, without their secrets."),))
@connected
@json_option
def list_(admin: AdminClient, as_json: bool) -> None:
    """Every valid token, the oldest first."""
    tables.show_rows(admin.list_tokens(), COLUMNS, as_json=as_json, empty="no tokens")


@tokens.command("revoke", examples=(("mgpuctl tokens revoke 3f9a0c71b2de", "Its calls end at once."),))
@click.argument("token_ids", nargs=-1, required=True, metavar="TOKEN…")
@connected
@json_option
def revoke(token_ids: tuple[str, ...], admin: AdminClient, as_json: bool) -> None:
    """End tokens, and every open call that uses them. Tasks that were submitted with them continue."""
    ended = [admin.revoke_token(token_id) for token_id in token_ids]
    if as_json:
        show.value([messages.as_dict(token) for token in ended])
        return
    for token in ended:
        show.line(f"revoked {token.token_id} ({token.name})")
