"""Checks of the fleet: the master, its journal, clocks, versions, devices."""

import importlib.metadata
import time

from multigpu.cli import show
from multigpu.cli.doctor.base import Finding, Host, fail, ok, warn
from multigpu.cli.failures import Failure, Unreachable
from multigpu.cli.fleet import device_columns
from multigpu.cli.text import age, duration, seconds_of, size

SKEW_WARN_S, SKEW_FAIL_S = 0.5, 5.0


def master(host: Host) -> list[Finding]:
    """A master answers."""
    address, stats = host.client_config.master, host.stats_or_failure
    if isinstance(stats, Unreachable):
        remedy = "`mgpuctl up` or `systemctl start mgpu-master` starts one; --master names another address"
        return warn("master", str(stats).partition("; ")[0], remedy)
    if isinstance(stats, Failure):
        return fail("master", f"{address}: {stats}", "use the right certificates and token: docs/security.md")
    return ok("master", f"{address}, version {stats.version}, up {age(stats, 'start_time')}")


def journal(host: Host) -> list[Finding]:
    """The master accepts durable tasks."""
    if not host.stats.journal_writable:
        remedy = "make room on its disk (never delete files in data_dir), or raise the limit"
        return fail("journal", f"durable tasks are rejected: {show.JOURNAL_FULL}", remedy)
    return ok("journal", f"writable, {size(host.stats.journal_bytes)}")


def clock(host: Host) -> list[Finding]:
    """The host's clock against the master's, halfway through the round trip."""
    assert host.stats is not None
    before = time.time()
    answer = host.ask_stats()
    after = time.time()
    return judge_clock((before + after) / 2 - seconds_of(answer.server_time), after - before)


def judge_clock(skew_s: float, trip_s: float) -> list[Finding]:
    """`skew_s`: how far this clock is ahead, ± half of `trip_s`, the round trip."""
    certain_s = max(0.0, abs(skew_s) - trip_s / 2)
    way = "ahead of" if skew_s > 0 else "behind"
    message = f"{duration(abs(skew_s))} {way} the master's, ± {duration(trip_s / 2)}"
    remedy = "synchronize both clocks with chrony or systemd-timesyncd: `timedatectl set-ntp true`; deadlines need it"
    if certain_s >= SKEW_WARN_S:
        return (fail if certain_s >= SKEW_FAIL_S else warn)("clock", message, remedy)
    return ok("clock", message)


def fleet_versions(host: Host) -> list[Finding]:
    """Master, workers and mgpuctl have the same version."""
    own = importlib.metadata.version("multigpu")
    others = {f"master {host.stats.version}"} if host.stats.version != own else set()
    others |= {f"{worker.worker_id} {worker.version}" for worker in host.connected if worker.version != own}
    if others:
        remedy = "`./deploy_multi_gpu.sh --upgrade` on the hosts that are behind"
        return warn("fleet versions", f"mgpuctl is {own}, but {', '.join(sorted(others))}", remedy)
    return ok("fleet versions", f"all are {own}: the master, {len(host.connected)} workers, mgpuctl")


def workers(host: Host) -> list[Finding]:
    """Every worker is connected and its device is healthy."""
    if not host.workers:
        remedy = "`mgpuctl up` or `systemctl start mgpu-worker@0` starts one"
        return warn("workers", "no worker has connected yet", remedy)
    findings: list[Finding] = []
    names = device_columns.short_names([worker.worker_id for worker in host.workers])
    for worker in host.workers:
        name, word = names[worker.worker_id], device_columns.health_word(worker)
        why = "; ".join(f"{reason.code}: {reason.message}" for reason in worker.health.reasons)
        message = f"{name} is {word}{f': {why}' if why else ''}"
        if word == "lost":
            seen = age(worker, "last_heartbeat_time") or "?"
            remedy = f"look at its host; if it is gone for good, `mgpuctl forget {name}`"
            findings += fail("workers", f"{name} is lost, last heard {seen} ago", remedy)
        elif word == "sick" or worker.quarantined:
            message = message if word == "sick" else f"{message}, and quarantined by the master"
            remedy = "do what the reasons ask for; it returns once a check passes; docs/health.md explains them"
            findings += fail("workers", message, remedy)
        elif word != "healthy":
            findings += warn("workers", message, "docs/health.md explains the reasons")
    return findings or ok("workers", device_columns.summary(host.workers))


def breaker(host: Host) -> list[Finding]:
    """The circuit breaker is closed: the master quarantines sick devices."""
    state = host.stats.breaker
    if not state.tripped:
        counts = f"{state.quarantines} of at most {state.quarantines_max}"
        return ok("breaker", f"not tripped: {counts} quarantines in its window")
    message = f"tripped: {state.quarantines} devices fell sick together, more than {state.quarantines_max}: "
    message += "not all are quarantined"
    remedy = "look for what they have in common (power, cooling, driver), then `mgpuctl breaker reset`"
    return fail("breaker", message, remedy)


CHECKS = (master, journal, clock, fleet_versions, workers, breaker)
