"""`mgpuctl certs`: the certificates of a fleet, from an authority of its own in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Group
from multigpu.cli.failures import Failure, NotFound
from multigpu.cli.options import json_option
from multigpu.cli.security import authority

FOLDER = click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
DAYS = click.option(
    "--days", type=click.IntRange(min=1, max=36500), default=authority.DAYS, show_default=True, metavar="N",
    help="How long the certificates are valid.",
)  # fmt: skip
YES_OR_NO = {True: "yes", False: "NO"}


@click.group(cls=Group)
def certs() -> None:
    """Make and renew the certificates of a fleet.

    Keep DIR where only administrators can read it: ca.key signs certificates for every role.
    """


@contextmanager
def failures() -> Iterator[None]:
    """Ends the command as Failure where the folder lacks a file, or can't be read or written."""
    try:
        yield
    except authority.AuthorityError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"can't use {error.filename}: {error.strerror}") from error


@certs.command("init", examples=(("mgpuctl certs init /etc/multigpu/certs", "An authority: ca.crt and ca.key."),))
@FOLDER
@click.option(
    "--days", type=click.IntRange(min=1, max=36500), default=authority.CA_DAYS, show_default=True, metavar="N",
    help="How long the authority is valid.",
)  # fmt: skip
def init(folder: Path, days: int) -> None:
    """Make an authority. One that is there already is left as it is."""
    with failures():
        made = authority.init(folder, days=days)
    show.line(f"{folder}: {'a new authority' if made else 'the authority is there already'}")


@certs.command(
    "issue",
    examples=(
        ("mgpuctl certs issue DIR master --host gpu1 --host 10.0.0.5", "master.crt and master.key."),
        ("mgpuctl certs issue DIR worker gpu2-workers", "For the workers of another host."),
        ("mgpuctl certs issue DIR client alice", "For a client, where the master asks for certificates."),
    ),
)
@FOLDER
@click.argument("kind", type=click.Choice(authority.KINDS))
@click.argument("name", required=False)
@click.option("--host", "hosts", multiple=True, metavar="NAME|IP", help="A name it is reached by. Repeatable.")
@DAYS
@json_option
def issue(folder: Path, kind: str, name: str | None, hosts: tuple[str, ...], days: int, as_json: bool) -> None:
    """Make a key and a certificate NAME.key, NAME.crt. NAME is the kind unless given. Replaces those of that name."""
    with failures():
        made = authority.issue(folder, kind, name or kind, hosts, days=days)
    _show([made], as_json=as_json)


@certs.command(
    "renew",
    examples=(
        ("mgpuctl certs renew DIR", "All that end within 30 days. Run it daily."),
        ("mgpuctl certs renew DIR master --force", "This one, now."),
    ),
)
@FOLDER
@click.argument("names", nargs=-1)
@click.option(
    "--within-days",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    metavar="N",
    help="Renew certificates that end within N days.",
)
@click.option("--force", is_flag=True, help="Renew also certificates that are valid for longer.")
@DAYS
@json_option
def renew(folder: Path, names: tuple[str, ...], within_days: int, force: bool, days: int, as_json: bool) -> None:
    """Extend certificates; their keys stay. Masters and workers notice by themselves, without a restart."""
    with failures():
        authority.read(folder, authority.CA)
        known = [authority.read(folder, name) for name in names or authority.names(folder)]
        due = [c.name for c in known if force or c.days_left <= within_days]
        renewed = [authority.renew(folder, name, days=days) for name in due]
    if as_json or renewed:
        _show(renewed, as_json=as_json)
    else:
        show.line(f"nothing to renew: none of {len(known)} ends within {within_days} days")


@certs.command("show", examples=(("mgpuctl certs show DIR", "Each certificate, and how long it is valid."),))
@FOLDER
@json_option
def show_(folder: Path, as_json: bool) -> None:
    """Every certificate in DIR. Exit code 1: one has expired, is of another authority, or can't be read."""
    known, wrong = [], []
    for name in (authority.CA, *authority.names(folder)):
        try:
            known.append(authority.read(folder, name))
        except authority.AuthorityError as error:
            if not (folder / f"{name}.crt").is_file():
                raise NotFound(str(error)) from error
            wrong.append(str(error))
    _show(known, as_json=as_json)
    bad = [c.name for c in known if c.days_left < 0 or not c.ours]
    if bad:
        wrong.append(f"expired, or of another authority: {', '.join(bad)}")
    if wrong:
        raise Failure(f"{'; '.join(wrong)}; `mgpuctl certs issue` makes new ones")


def _show(certificates: list[authority.Certificate], *, as_json: bool) -> None:
    if as_json:
        show.value(
            [
                {
                    "name": c.name, "kind": c.kind, "hosts": list(c.hosts), "certificate": str(c.path),
                    "key": str(c.path.with_suffix(".key")), "serial": c.serial, "begins": c.begins.isoformat(),
                    "ends": c.ends.isoformat(), "days_left": round(c.days_left, 2), "of_this_authority": c.ours,
                }
                for c in certificates
            ]
        )  # fmt: skip
        return
    rows = [
        (c.name, c.kind, " ".join(c.hosts) or "-", f"{c.ends:%Y-%m-%d %H:%M}Z", f"{c.days_left:.0f}", YES_OR_NO[c.ours])
        for c in certificates
    ]
    tables.table(
        ("NAME", "KIND", "HOSTS", "VALID UNTIL", "DAYS", "OURS"), rows, right=("DAYS",), empty="no certificates"
    )
