"""`mgpuctl certs`: the certificates of a fleet, from a certificate authority in a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Group
from multigpu.cli.failures import Failure, NotFound
from multigpu.cli.options import F, json_option
from multigpu.cli.security import authority
from multigpu.cli.tables import Column

FOLDER = click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))


def _days_option(default: int, noun: str) -> Callable[[F], F]:
    return click.option(
        "--days",
        type=click.IntRange(min=1, max=36500),
        default=default,
        show_default=True,
        metavar="N",
        help=f"How long the {noun} valid.",
    )


COLUMNS = (
    Column("NAME", lambda cert: cert.name),
    Column("KIND", lambda cert: cert.kind),
    Column("HOSTS", lambda cert: " ".join(cert.hosts) or "-"),
    Column("VALID UNTIL", lambda cert: f"{cert.ends:%Y-%m-%d %H:%M}Z"),
    Column("DAYS", lambda cert: f"{cert.days_left:.0f}", right=True),
    Column("OURS", lambda cert: "yes" if cert.ours else "NO"),
)


@click.group(cls=Group)
def certs() -> None:
    """Make and renew the certificates of a fleet.

    Keep DIR where only administrators can read it: ca.key signs certificates for every role.
    """


@contextmanager
def failures() -> Iterator[None]:
    """Turns errors of the folder into Failures."""
    try:
        yield
    except authority.AuthorityError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"can't use {error.filename}: {error.strerror}") from error


@certs.command("init", examples=(("mgpuctl certs init /etc/multigpu/certs", "An authority: ca.crt and ca.key."),))
@FOLDER
@_days_option(authority.CA_DAYS, "authority is")
def init(folder: Path, days: int) -> None:
    """Make an authority. An existing one does not change."""
    with failures():
        made = authority.init(folder, days=days)
    show.line(f"{folder}: {'a new authority' if made else 'the authority is there already'}")


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
@_days_option(authority.DAYS, "certificates are")
@json_option
def issue(folder: Path, kind: str, name: str | None, hosts: tuple[str, ...], days: int, as_json: bool) -> None:
    """Make a key and a certificate: NAME.key, NAME.crt. NAME is the kind unless given. Replaces existing files."""
    with failures():
        made = authority.issue(folder, kind, name or kind, hosts, days=days)
    _show([made], as_json=as_json)


@certs.command(
    "renew",
    examples=(
        ("mgpuctl certs renew DIR", "Certificates that end within 30 days. Run it daily."),
        ("mgpuctl certs renew DIR master --force", "This one, now."),
    ),
)
@FOLDER
@click.argument("names", nargs=-1)
@click.option("--within-days", type=click.IntRange(min=0), default=30, show_default=True, help="Which to renew.")
@click.option("--force", is_flag=True, help="Renew certificates that are valid for longer, too.")
@_days_option(authority.DAYS, "certificates are")
@json_option
def renew(folder: Path, names: tuple[str, ...], within_days: int, force: bool, days: int, as_json: bool) -> None:
    """Extend certificates; their keys stay. Masters and workers load them without a restart."""
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
    if not as_json:
        tables.show_rows(certificates, COLUMNS, empty="no certificates")
        return
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
