"""`mgpuctl status`, `workers`, `drain`, `cordon`, `uncordon` and `forget`."""

import time
from collections import Counter
from typing import Any

import click

from multigpu.cli import messages, show, tables
from multigpu.cli.commands import Command
from multigpu.cli.fleet.breaker import breaker_text
from multigpu.cli.options import json_option, seconds_option
from multigpu.cli.rpc import Master, connected, workers_argument
from multigpu.cli.tables import Column
from multigpu.cli.text import age, format_size
from multigpu.v1 import admin_service_pb2 as admin

DRAIN_POLL_INTERVAL_S = 0.2
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
def status(master: Master, as_json: bool) -> None:
    """State of the master: tasks waiting and done, workers, journal."""
    stats = master.call(master.admin.GetStats, admin.GetStatsRequest())
    states = dict(sorted(Counter(state_of(worker) for worker in master.list_workers()).items()))
    if as_json:
        show.value({"master": master.address, "stats": messages.as_dict(stats), "workers": states})
        return
    rejects = f"NOT WRITABLE: durable submits are rejected; {show.JOURNAL_FULL}"
    facts = {
        "Master": f"{master.address}, version {stats.version}, up {age(stats, 'start_time')}, "
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
def workers(master: Master, as_json: bool) -> None:
    """Every worker that the master knows: state, device and load."""
    show_workers(master.list_workers(), as_json=as_json)


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
def drain(worker_ids: tuple[str, ...], timeout_s: float | None, wait: bool, master: Master, as_json: bool) -> None:
    """Give workers no new tasks and let theirs finish. `uncordon` ends it.

    A WORKER is an id, or the beginning of one.
    """
    request = admin.DrainWorkerRequest()
    if timeout_s is not None:
        request.timeout.FromNanoseconds(round(timeout_s * 1e9))
    drained = _for_each(master, master.admin.DrainWorker, worker_ids, request)
    found = {worker.worker_id for worker in drained}
    while wait and any(worker.leases for worker in drained):
        time.sleep(DRAIN_POLL_INTERVAL_S)
        drained = [worker for worker in master.list_workers() if worker.worker_id in found]
    show_workers(drained, as_json=as_json)


@click.command(
    cls=Command,
    examples=(("mgpuctl cordon box-cpu-0 --reason 'fan replaced at noon'", "No new tasks until uncordoned."),),
)
@workers_argument
@click.option("--reason", default="", help="Why, for other people.")
@connected
@json_option
def cordon(worker_ids: tuple[str, ...], reason: str, master: Master, as_json: bool) -> None:
    """Give workers no new tasks. They keep the tasks that they have.

    A WORKER is an id, or the beginning of one. Survives restarts.
    """
    request = admin.CordonWorkerRequest(reason=reason)
    show_workers(_for_each(master, master.admin.CordonWorker, worker_ids, request), as_json=as_json)


@click.command(cls=Command, examples=(("mgpuctl uncordon box-cpu-0", "It takes tasks again."),))
@workers_argument
@connected
@json_option
def uncordon(worker_ids: tuple[str, ...], master: Master, as_json: bool) -> None:
    """End a cordon or a drain: the workers take tasks again.

    A WORKER is an id, or the beginning of one.
    """
    request = admin.UncordonWorkerRequest()
    show_workers(_for_each(master, master.admin.UncordonWorker, worker_ids, request), as_json=as_json)


@click.command(cls=Command, examples=(("mgpuctl forget oldbox-cpu-0", "Take a lost worker off the list."),))
@workers_argument
@connected
def forget(worker_ids: tuple[str, ...], master: Master) -> None:
    """Remove lost workers from the master's list. A connected worker can't be forgotten."""
    for worker_id in [master.find_worker_id(prefix) for prefix in worker_ids]:
        master.call(master.admin.ForgetWorker, admin.ForgetWorkerRequest(worker_id=worker_id))


def _for_each(master: Master, method: Any, prefixes: tuple[str, ...], request: Any) -> list[admin.Worker]:
    """Sends the request for each worker. Finds every worker before it sends the first request."""
    changed = []
    for worker_id in [master.find_worker_id(prefix) for prefix in prefixes]:
        request.worker_id = worker_id
        changed.append(master.call(method, request).worker)
    return changed


def state_of(worker: admin.Worker) -> str:
    """active, quarantined, cordoned, draining or lost."""
    state = messages.enum_name(worker, "state").lower()
    if state != "active":
        return state
    return "cordoned" if worker.cordoned else "quarantined" if worker.quarantined else state


def _health(worker: admin.Worker) -> str:
    """The health state, and the code of its gravest reason."""
    state = messages.enum_name(worker.health, "state").lower() if worker.health.state else "-"
    return f"{state}: {worker.health.reasons[0].code}" if worker.health.reasons else state


def _memory(worker: admin.Worker) -> str:
    total = worker.device.memory_total_bytes
    if total and worker.telemetry.HasField("memory_used_bytes"):
        return f"{worker.telemetry.memory_used_bytes / total:.0%} of {format_size(total)}"
    return format_size(total) if total else "-"


def _busy(worker: admin.Worker) -> str:
    return f"{worker.telemetry.utilization:.0%}" if worker.telemetry.HasField("utilization") else "-"


COLUMNS = (
    Column("WORKER", lambda worker: worker.worker_id),
    Column("STATE", state_of),
    Column("HEALTH", _health, rank=1),
    Column("DEVICE", lambda worker: worker.device.name or "-", rank=3),
    Column("MEMORY", _memory, rank=5),
    Column("BUSY", _busy, rank=4),
    Column("LEASES", lambda worker: f"{worker.leases:,}", right=True, rank=2),
    Column("DONE", lambda worker: f"{worker.succeeded:,}", right=True, rank=6),
    Column("FAILED", lambda worker: f"{worker.failed:,}", right=True, rank=7),
    Column("HEARD", lambda worker: age(worker, "last_heartbeat_time") or "-", rank=8),
)


def show_workers(known: list[admin.Worker], *, as_json: bool) -> None:
    empty = "no worker has connected yet; start some with `mgpuctl up` or `mgpu-worker`"
    tables.show_rows(known, COLUMNS, as_json=as_json, empty=empty)
