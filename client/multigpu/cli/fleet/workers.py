"""`mgpuctl status`, `workers`, and what is done to a worker: `drain`, `cordon`, `uncordon`, `forget`."""

import time
from collections import Counter
from typing import Any

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Command
from multigpu.cli.fleet.breaker import words_of
from multigpu.cli.options import Number, complete_worker_id, json_option, master_option
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin

DRAIN_POLL_INTERVAL_S = 0.2


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl status", "One screen about the master and its fleet."),
        ("mgpuctl status --json | jq .stats.queued", "How many tasks wait."),
    ),
)
@master_option
@json_option
def status(address: str, as_json: bool) -> None:
    """State of the master: tasks waiting and done, workers, journal."""
    with Master(address) as master:
        stats = master.call(master.admin.GetStats, admin.GetStatsRequest())
        workers = master.list_workers()
    states = Counter(state_of(worker) for worker in workers)
    if as_json:
        show.value({"master": address, "stats": show.as_dict(stats), "workers": dict(sorted(states.items()))})
        return
    settled = {name: getattr(stats, name) for name in ("succeeded", "failed", "cancelled", "expired", "dead_lettered")}
    journal = f"{show.size(stats.journal_bytes)}, "
    journal += "writable" if stats.journal_writable else f"NOT WRITABLE: durable submits are rejected; {show.NO_ROOM}"
    uptime = show.age(stats, "start_time")
    show.facts(
        [
            ("Master", f"{address}, version {stats.version}, up {uptime}, {show.size(stats.memory_bytes)} of memory"),
            ("Workers", ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"),
            ("Strategy", stats.strategy),
            (
                "Tasks",
                f"{stats.queued:,} queued, {stats.leased:,} leased, {stats.submitted:,} submitted since the start",
            ),
            ("Outcomes", ", ".join(f"{count:,} {name.replace('_', '-')}" for name, count in settled.items())),
            ("Kept", f"{stats.outcomes_retained:,} outcomes"),
            ("Faults", f"{stats.requeued:,} leases requeued, {stats.stale_reports:,} stale reports rejected"),
            ("Journal", journal),
        ]
    )
    if stats.breaker.tripped:
        click.secho(words_of(stats.breaker), fg="red", bold=True)


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl workers", "A table of all workers."),
        ("mgpuctl workers --json | jq -r '.[].worker_id'", "Their ids."),
    ),
)
@master_option
@json_option
def workers(address: str, as_json: bool) -> None:
    """Every worker that the master knows: state, device and load."""
    with Master(address) as master:
        known = master.list_workers()
    show_workers(known, as_json=as_json)


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl drain box-cpu-0", "No new work for it; what it runs may finish."),
        ("mgpuctl drain box --timeout 60 --wait", "Revoke what still runs after a minute; wait for that."),
    ),
)
@click.argument("worker_ids", metavar="WORKER...", nargs=-1, required=True, shell_complete=complete_worker_id)
@click.option("--timeout", "timeout_s", type=Number(min=0), metavar="SECONDS", help="How long leases may run.")
@click.option("--wait", is_flag=True, help="Return only when the workers hold no lease any more.")
@master_option
@json_option
def drain(worker_ids: tuple[str, ...], timeout_s: float | None, wait: bool, address: str, as_json: bool) -> None:
    """Give workers no new tasks and let theirs finish. `uncordon` ends it.

    A WORKER is an id, or the beginning of one.
    """
    with Master(address) as master:
        found = [master.find_worker_id(prefix) for prefix in worker_ids]
        drained = []
        for worker_id in found:
            request = admin.DrainWorkerRequest(worker_id=worker_id)
            if timeout_s is not None:
                request.timeout.FromNanoseconds(round(timeout_s * 1e9))
            drained.append(master.call(master.admin.DrainWorker, request).worker)
        while wait and any(worker.leases for worker in drained):
            time.sleep(DRAIN_POLL_INTERVAL_S)
            drained = [worker for worker in master.list_workers() if worker.worker_id in found]
    show_workers(drained, as_json=as_json)


@click.command(
    cls=Command,
    examples=(("mgpuctl cordon box-cpu-0 --reason 'fan replaced at noon'", "No new tasks until uncordoned."),),
)
@click.argument("worker_ids", metavar="WORKER...", nargs=-1, required=True, shell_complete=complete_worker_id)
@click.option("--reason", default="", help="Why, for other people.")
@master_option
@json_option
def cordon(worker_ids: tuple[str, ...], reason: str, address: str, as_json: bool) -> None:
    """Give workers no new tasks. What they hold they keep.

    A WORKER is an id, or the beginning of one. Survives restarts.
    """
    cordoned = on_each_worker(address, worker_ids, "CordonWorker", admin.CordonWorkerRequest, {"reason": reason})
    show_workers(cordoned, as_json=as_json)


@click.command(cls=Command, examples=(("mgpuctl uncordon box-cpu-0", "It takes tasks again."),))
@click.argument("worker_ids", metavar="WORKER...", nargs=-1, required=True, shell_complete=complete_worker_id)
@master_option
@json_option
def uncordon(worker_ids: tuple[str, ...], address: str, as_json: bool) -> None:
    """End a cordon or a drain: the workers take tasks again.

    A WORKER is an id, or the beginning of one.
    """
    uncordoned = on_each_worker(address, worker_ids, "UncordonWorker", admin.UncordonWorkerRequest, {})
    show_workers(uncordoned, as_json=as_json)


@click.command(cls=Command, examples=(("mgpuctl forget oldbox-cpu-0", "Take a lost worker off the list."),))
@click.argument("worker_ids", metavar="WORKER...", nargs=-1, required=True, shell_complete=complete_worker_id)
@master_option
def forget(worker_ids: tuple[str, ...], address: str) -> None:
    """Remove lost workers from the master's list. A connected worker can't be forgotten."""
    on_each_worker(address, worker_ids, "ForgetWorker", admin.ForgetWorkerRequest, {})


def on_each_worker(
    address: str, prefixes: tuple[str, ...], method: str, request_class: Any, fields: dict[str, Any]
) -> list[admin.Worker]:
    """Calls an AdminService method for each worker named. All names are looked up before anything is done."""
    with Master(address) as master:
        found = [master.find_worker_id(prefix) for prefix in prefixes]
        answers = [
            master.call(getattr(master.admin, method), request_class(worker_id=worker_id, **fields))
            for worker_id in found
        ]
    return [answer.worker for answer in answers if "worker" in answer.DESCRIPTOR.fields_by_name]


def state_of(worker: admin.Worker) -> str:
    """In one word: active, quarantined, cordoned, draining or lost."""
    state = show.enum_name(worker, "state").lower()
    if state != "active":
        return state
    return "cordoned" if worker.cordoned else "quarantined" if worker.quarantined else state


def health_of(worker: admin.Worker) -> str:
    """The state of its device's health, and the code of the gravest reason."""
    health = worker.health
    state = show.enum_name(health, "state").lower() if health.state else "-"
    return f"{state}: {health.reasons[0].code}" if health.reasons else state


def show_workers(workers: list[admin.Worker], *, as_json: bool) -> None:
    if as_json:
        show.value([show.as_dict(worker) for worker in workers])
        return
    tables.table(
        WORKER_COLUMNS,
        [worker_row(worker) for worker in workers],
        right=("LEASES", "DONE", "FAILED"),
        optional=WORKER_OPTIONAL,
        empty="no worker has connected yet; start some with `mgpuctl up` or `mgpu-worker`",
    )


WORKER_COLUMNS = ("WORKER", "STATE", "HEALTH", "DEVICE", "MEMORY", "BUSY", "LEASES", "DONE", "FAILED", "HEARD")
WORKER_OPTIONAL = ("HEARD", "FAILED", "DONE", "MEMORY", "BUSY", "DEVICE", "LEASES", "HEALTH")


def worker_row(worker: admin.Worker) -> tuple[str, ...]:
    """One line about a worker. What its device doesn't tell is "-"."""
    telemetry = worker.telemetry
    total = worker.device.memory_total_bytes
    memory = show.size(total) if total else "-"
    if total and telemetry.HasField("memory_used_bytes"):
        memory = f"{telemetry.memory_used_bytes / total:.0%} of {memory}"
    return (
        worker.worker_id,
        state_of(worker),
        health_of(worker),
        worker.device.name or "-",
        memory,
        f"{telemetry.utilization:.0%}" if telemetry.HasField("utilization") else "-",
        f"{worker.leases:,}",
        f"{worker.succeeded:,}",
        f"{worker.failed:,}",
        show.age(worker, "last_heartbeat_time") or "-",
    )
