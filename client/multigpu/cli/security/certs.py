"""`mgpuctl certs`: the certificates of a fleet, from a certificate authority in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from multigpu.cli import show
from multigpu.cli.commands import Group
from multigpu.cli.failures import Failure
from multigpu.cli.security import authority

FOLDER = click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
DAYS = click.option(
    "--days",
    type=click.IntRange(min=1, max=36500),
    default=authority.DAYS,
    show_default=True,
    metavar="N",
    help="How long certificates are valid.",
)


@click.group(cls=Group)
def certs() -> None:
    """Make and renew the certificates of a fleet.

    Keep DIR where only administrators can read it: ca.key signs certificates for every role.
    """


@contextmanager
def failures() -> Iterator[None]:
    """Turns errors of files into Failures."""
    try:
        yield
    except OSError as error:
        raise Failure(f"can't use {error.filename}: {error.strerror}") from error


@certs.command(
    "issue",
    examples=(
        ("mgpuctl certs issue DIR master --host gpu1 --host 10.0.0.5", "master.crt and master.key."),
        ("mgpuctl certs issue DIR worker gpu2-workers", "For the workers of another host."),
        ("mgpuctl certs issue DIR client alice", "For a client, if the master requires certificates."),
    ),
)
@FOLDER
@click.argument("kind", type=click.Choice(authority.KINDS))
@click.argument("name", required=False)
@click.option("--host", "hosts", multiple=True, metavar="NAME|IP", help="Its host name or address. Repeatable.")
@DAYS
def issue(folder: Path, kind: str, name: str | None, hosts: tuple[str, ...], days: int) -> None:
    """Make a key and a certificate: NAME.key, NAME.crt. NAME is the kind unless given. Replaces existing files.

    The first time it makes the authority in DIR: ca.crt, ca.key.
    """
    with failures():
        if authority.init(folder):
            show.note(f"{folder}: a new authority")
        _show(authority.issue(folder, kind, name or kind, hosts, days=days))


@certs.command("renew", examples=(("mgpuctl certs renew DIR", "Certificates that end within 30 days. Run it daily."),))
@FOLDER
@click.option("--within-days", type=click.IntRange(min=0), default=30, show_default=True, help="Which to renew.")
@DAYS
def renew(folder: Path, within_days: int, days: int) -> None:
    """Extend certificates; their keys stay. Masters and workers load them without a restart."""
    with failures():
        renewed = authority.renew(folder, within_days=within_days, days=days)
        for path in renewed:
            _show(path)
    if not renewed:
        show.line(f"nothing to renew: no certificate ends within {within_days} days")


def _show(path: Path) -> None:
    show.line(f"{path}: valid until {authority.read(path).not_valid_after_utc:%Y-%m-%d %H:%M}Z")
