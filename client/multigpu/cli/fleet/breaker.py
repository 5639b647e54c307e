"""`mgpuctl breaker`: the circuit breaker, which keeps a common cause from quarantining the whole fleet."""

import click

from multigpu import AdminClient
from multigpu.cli import messages, show
from multigpu.cli.admin import connected
from multigpu.cli.commands import Group
from multigpu.cli.options import json_option
from multigpu.cli.text import since
from multigpu.fleet import Breaker


@click.group(
    cls=Group,
    examples=(
        ("mgpuctl breaker show", "Whether it has tripped, and how near it is."),
        ("mgpuctl breaker reset", "Quarantine sick devices again."),
    ),
)
def breaker() -> None:
    """See and reset the circuit breaker of sick devices.

    If too many devices fall sick in a short time, the cause is likely elsewhere. The breaker trips: no more devices are
    quarantined, except those that can't run anything, until an operator resets it.
    """


@breaker.command("show", examples=(("mgpuctl breaker show --json", "For scripts."),))
@connected
@json_option
def show_(admin: AdminClient, as_json: bool) -> None:
    """Whether it has tripped, and how near it is."""
    _show(admin.stats().breaker, as_json=as_json)


@breaker.command("reset", examples=(("mgpuctl breaker reset", "After the cause was found."),))
@connected
@json_option
def reset(admin: AdminClient, as_json: bool) -> None:
    """Quarantine sick devices again. Devices that are sick now count, and may trip it again."""
    _show(admin.reset_breaker(), as_json=as_json)


def breaker_text(found: Breaker) -> str:
    if not found.tripped:
        counts = f"{found.quarantines} of at most {found.quarantines_max}"
        return f"the circuit breaker is closed: {counts} devices were quarantined lately"
    return (
        f"THE CIRCUIT BREAKER TRIPPED {since(found.trip_time)} ago: too many devices fell sick together. Sick "
        "devices that can run anything stay in use. Find the common cause, then: mgpuctl breaker reset"
    )


def _show(found: Breaker, *, as_json: bool) -> None:
    if as_json:
        show.value(messages.as_dict(found))
    else:
        click.secho(breaker_text(found), fg="red" if found.tripped else None, bold=found.tripped)
