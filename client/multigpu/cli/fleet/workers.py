"""`mgpuctl status`, `workers`, `drain`, `cordon`, `uncordon`, `check` and `forget`."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import click

from multigpu import AdminClient
from multigpu._units import format_size
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import complete_worker_id, connected, find_worker_id, workers_argument
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure, NotFound
from multigpu.cli.fleet.breaker import breaker_text
from multigpu.cli.fleet.device_columns import DEVICE
from multigpu.cli.options import json_option, seconds_option
from multigpu.cli.tables import Column
from multigpu.cli.text import clean, since
from multigpu.fleet import HealthState, Worker, WorkerState

DRAIN_POLL_INTERVAL_S = 0.2
# States of a device that takes tasks.
FIT = (HealthState.HEALTHY, HealthState.DEGRADED)
T = TypeVar("T")
SETTLED = ("succeeded", "failed", "cancelled", "expired", "dead_lettered")


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl status", "One screen about the master and its fleet."),
        ("mgpuctl status --json | jq .stats.queued", "How many tasks wait."),
    ),
)
@connected
@json_option
def status(admin: AdminClient, as_json: bool) -> None:
    """State of the master: tasks waiting and done, workers, journal."""
    stats = admin.stats()
    states = dict(sorted(Counter(state_of(worker) for worker in admin.list_workers()).items()))
    if as_json:
        show.value({"master": admin.master, "stats": messages.as_dict(stats), "workers": states})
        return
    rejects = f"NOT WRITABLE: durable submits are rejected; {show.JOURNAL_FULL}"
    facts = {
        "Master": f"{admin.master}, version {stats.version}, up {since(stats.start_time)}, "
        f"{format_size(stats.memory_bytes)} of memory",
        "Workers": ", ".join(f"{count} {state}" for state, count in states.items()) or "none",
        "Strategy": stats.strategy,
        "Tasks": f"{stats.queued:,} queued, {stats.leased:,} leased, {stats.submitted:,} submitted since the start",
        "Outcomes": ", ".join(f"{getattr(stats, name):,} {name.replace('_', '-')}" for name in SETTLED),
        "Kept": f"{stats.outcomes_retained:,} outcomes",
        "Faults": f"{stats.requeued:,} leases requeued, {stats.stale_reports:,} stale reports rejected",
        "Journal": f"{format_size(stats.journal_bytes)}, {'writable' if stats.journal_writable else rejects}",
    }
    show.facts(list(facts.items()))
    if stats.breaker.tripped:
        click.secho(breaker_text(stats.breaker), fg="red", bold=True)


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl workers", "A table of all workers."),
        ("mgpuctl workers --json | jq -r '.[].worker_id'", "Their ids."),
    ),
)
@connected
@json_option
def workers(admin: AdminClient, as_json: bool) -> None:
    """Every worker that the master knows: state, device and load."""
    show_workers(admin.list_workers(), as_json=as_json)


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl drain box-cpu-0", "No new tasks for it; running ones may finish."),
        ("mgpuctl drain box --timeout 60 --wait", "Revoke what still runs after a minute; wait for that."),
    ),
)
@workers_argument
@seconds_option("--timeout", "How long leases may run.")
@click.option("--wait", is_flag=True, help="Return only when the workers hold no lease any more.")
@connected
@json_option
def drain(worker_ids: tuple[str, ...], timeout_s: float | None, wait: bool, admin: AdminClient, as_json: bool) -> None:
    """Give workers no new tasks and let theirs finish. `uncordon` ends it.

    A WORKER is an id, or the beginning of one.
    """
    drained = _for_each(admin, worker_ids, partial(admin.drain_worker, grace_s=timeout_s))
    found = {worker.worker_id for worker in drained}
    while wait and any(worker.leases for worker in drained):
        time.sleep(DRAIN_POLL_INTERVAL_S)
        drained = [worker for worker in admin.list_workers() if worker.worker_id in found]
    show_workers(drained, as_json=as_json)


@click.command(
    cls=Command,
    examples=(("mgpuctl cordon box-cpu-0 --reason 'fan replaced at noon'", "No new tasks until uncordoned."),),
)
@workers_argument
@click.option("--reason", default="", help="Why, for other people.")
@connected
@json_option
def cordon(worker_ids: tuple[str, ...], reason: str, admin: AdminClient, as_json: bool) -> None:
    """Give workers no new tasks. They keep the tasks that they have.

    A WORKER is an id, or the beginning of one. Survives restarts.
    """
    show_workers(_for_each(admin, worker_ids, partial(admin.cordon_worker, reason=reason)), as_json=as_json)


@click.command(cls=Command, examples=(("mgpuctl uncordon box-cpu-0", "It takes tasks again."),))
@workers_argument
@connected
@json_option
def uncordon(worker_ids: tuple[str, ...], admin: AdminClient, as_json: bool) -> None:
    """End a cordon or a drain: the workers take tasks again.

    A WORKER is an id, or the beginning of one.
    """
    show_workers(_for_each(admin, worker_ids, admin.uncordon_worker), as_json=as_json)


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl check --all", "Every GPU of the fleet, one after the other."),
        ("mgpuctl check box-cuda-0", "One, after a repair."),
    ),
)
@click.argument("worker_ids", metavar="[WORKER]...", nargs=-1, shell_complete=complete_worker_id)
@click.option("--all", "everywhere", is_flag=True, help="All workers. A lost one is not fit.")
@connected
@json_option
def check(worker_ids: tuple[str, ...], everywhere: bool, admin: AdminClient, as_json: bool) -> None:
    """Have workers check their devices.

    One after the other: the driver answers, an engine starts, and, if it uses torch, a computation with a known result
    is right. A worker gets no tasks meanwhile; its running ones go on. The exit code is 1 if a device is not fit.

    A WORKER is an id, or the beginning of one.
    """
    if bool(worker_ids) == everywhere:
        raise click.UsageError("give either WORKERs or --all")
    lost: list[Worker] = []
    if everywhere:
        known = admin.list_workers()
        lost = [each for each in known if each.state is WorkerState.LOST]
        worker_ids = tuple(each.worker_id for each in known if each not in lost)
    checked = [*_for_each(admin, tuple(dict.fromkeys(worker_ids)), admin.check_worker), *lost]
    if not checked:
        raise NotFound("no worker has connected yet; start some with `mgpuctl up` or `mgpu-worker`")
    show_workers(checked, as_json=as_json)
    if unfit := [each for each in checked if each.health is None or each.health.state not in FIT]:
        why = [f"{each.worker_id}: {text}" for each in unfit for text in _faults(each)]
        raise Failure("\n".join([f"{len(unfit)} of {len(checked)} devices are not fit", *map(clean, why)]))


def _faults(worker: Worker) -> list[str]:
    if worker.state is WorkerState.LOST or worker.health is None:
        return ["its worker is lost: start it, or see its log"]
    return [reason.message for reason in worker.health.reasons]


@click.command(cls=Command, examples=(("mgpuctl forget oldbox-cpu-0", "Take a lost worker off the list."),))
@workers_argument
@connected
def forget(worker_ids: tuple[str, ...], admin: AdminClient) -> None:
    """Remove lost workers from the master's list. A connected worker can't be forgotten."""
    _for_each(admin, worker_ids, admin.forget_worker)


def _for_each(admin: AdminClient, prefixes: Sequence[str], change: Callable[[str], T]) -> list[T]:
    """Changes each worker. Finds every worker before it changes the first one."""
    return [change(worker_id) for worker_id in [find_worker_id(admin, prefix) for prefix in prefixes]]


def state_of(worker: Worker) -> str:
    """active, quarantined, cordoned, draining or lost."""
    state = worker.state.name.lower()
    if state != "active":
        return state
    return "cordoned" if worker.cordoned else "quarantined" if worker.quarantined else state


COLUMNS = (
    Column("WORKER", lambda worker: worker.worker_id),
    Column("STATE", state_of),
    *(column for column in DEVICE if column.name in ("DEVICE", "MEMORY", "BUSY", "LEASES", "HEALTH")),
    Column("DONE", lambda worker: f"{worker.succeeded:,}", right=True, rank=60),
    Column("FAILED", lambda worker: f"{worker.failed:,}", right=True, rank=70),
    Column("HEARD", lambda worker: since(worker.last_heartbeat_time) or "-", rank=80),
)


def show_workers(known: list[Worker], *, as_json: bool) -> None:
    empty = "no worker has connected yet; start some with `mgpuctl up` or `mgpu-worker`"
    tables.show_rows(known, COLUMNS, as_json=as_json, empty=empty)
