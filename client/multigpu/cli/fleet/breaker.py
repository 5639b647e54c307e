"""`mgpuctl breaker`: the circuit breaker that keeps a common cause from taking the whole fleet out of work."""

import click

from multigpu.cli import show
from multigpu.cli.commands import Group
from multigpu.cli.options import json_option, master_option
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin


@click.group(
    cls=Group,
    examples=(
        ("mgpuctl breaker show", "Whether it has tripped, and how near it is."),
        ("mgpuctl breaker reset", "Quarantine sick devices again."),
    ),
)
def breaker() -> None:
    """See and reset the circuit breaker of sick devices.

    When too large a share of the devices falls sick in a short time the cause is likely elsewhere. The breaker trips:
    no more devices are quarantined, except those that can't run anything, until a person resets it.
    """


@breaker.command("show", examples=(("mgpuctl breaker show --json", "For scripts."),))
@master_option
@json_option
def show_(address: str, as_json: bool) -> None:
    """Whether it has tripped, and how near it is."""
    with Master(address) as master:
        _show(master.call(master.admin.GetStats, admin.GetStatsRequest()).breaker, as_json=as_json)


@breaker.command("reset", examples=(("mgpuctl breaker reset", "After the cause was found."),))
@master_option
@json_option
def reset(address: str, as_json: bool) -> None:
    """Quarantine sick devices again. Those that are sick now are, and may trip it again."""
    with Master(address) as master:
        _show(master.call(master.admin.ResetBreaker, admin.ResetBreakerRequest()).breaker, as_json=as_json)


def words_of(message: admin.Breaker) -> str:
    """One line about the breaker."""
    of = f"{message.quarantines} of at most {message.quarantines_max} devices were quarantined lately"
    if not message.tripped:
        return f"the circuit breaker is closed: {of}"
    return (
        f"THE CIRCUIT BREAKER TRIPPED {show.age(message, 'trip_time')} ago: too many devices fell sick together, and "
        "those that can run anything go on. Look for a common cause (mgpuctl workers), then: mgpuctl breaker reset"
    )


def _show(message: admin.Breaker, *, as_json: bool) -> None:
    if as_json:
        show.value(show.as_dict(message))
    else:
        click.secho(words_of(message), fg="red" if message.tripped else None, bold=message.tripped)
