"""Checks of the fleet that this host belongs to: the master, clocks, versions, devices, the journal."""

import importlib.metadata
import time

from multigpu.cli import show
from multigpu.cli.doctor.base import CLOCK_ROUNDS, Finding, Place, Verdict, fail, ok, skip, warn
from multigpu.cli.failures import Failure, Unreachable
from multigpu.cli.fleet import device_columns
from multigpu.cli.text import age, duration, seconds_of, size
from multigpu.handlers import RESERVED_KINDS
from multigpu.v1 import admin_service_pb2 as admin

NO_MASTER = "no master answers"
SKEW_WARN_S, SKEW_FAIL_S = 0.5, 5.0
# A sample is taken shortly before the heartbeat that brings it: what is older tells of another clock, or of a driver
# that hangs.
SAMPLE_AGE_WARN_S = 15.0


def master(place: Place) -> list[Finding]:
    """A master answers."""
    if isinstance(place.stats, Unreachable):
        remedy = "`mgpuctl up` or `systemctl start mgpu-master` starts one; --master names another address"
        return warn("master", str(place.stats).partition("; ")[0], remedy)
    if isinstance(place.stats, Failure):
        remedy = "it lets us in with the right certificates and token: docs/security.md"
        return fail("master", f"{place.address}: {place.stats}", remedy)
    stats = place.stats
    return ok("master", f"{place.address}, version {stats.version}, up {age(stats, 'start_time')}")


def journal(place: Place) -> list[Finding]:
    """Durable tasks are taken."""
    if isinstance(place.stats, Failure):
        return skip("journal", NO_MASTER)
    if not place.stats.journal_writable:
        remedy = "make room on its disk (never delete files in data_dir), or raise the limit"
        return fail("journal", f"durable tasks are rejected: {show.JOURNAL_FULL}", remedy)
    return ok("journal", f"writable, {size(place.stats.journal_bytes)}")


def clock(place: Place) -> list[Finding]:
    """The host's clock against the master's, halfway between question and answer; the quickest of a few rounds."""
    if isinstance(place.stats, Failure):
        return skip("clock", NO_MASTER)
    if not place.stats.HasField("server_time"):
        return skip("clock", f"a master of version {place.stats.version} doesn't tell its time")
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        before = time.time()
        answer = place.ask_stats()
        after = time.time()
        rounds.append((after - before, (before + after) / 2 - seconds_of(answer.server_time)))
    trip_s, skew_s = min(rounds)
    return judge_clock(skew_s, trip_s)


def judge_clock(skew_s: float, trip_s: float) -> list[Finding]:
    """`skew_s`: how far this clock is ahead; it is known to within half of `trip_s`, the round trip."""
    sure_s = max(0.0, abs(skew_s) - trip_s / 2)
    way = "ahead of" if skew_s > 0 else "behind"
    told = f"{duration(abs(skew_s))} {way} the master's, give or take {duration(trip_s / 2)}"
    remedy = "let chrony or systemd-timesyncd keep both clocks: `timedatectl set-ntp true`; deadlines go by them"
    if sure_s >= SKEW_WARN_S:
        return (fail if sure_s >= SKEW_FAIL_S else warn)("clock", told, remedy)
    return ok("clock", told)


def worker_clocks(place: Place) -> list[Finding]:
    """What workers sampled was sampled before the master heard of it, and not long before."""
    active = [
        worker
        for worker in place.workers
        if worker.state != admin.WORKER_STATE_LOST and worker.telemetry.HasField("sample_time")
    ]
    if not active:
        return skip("worker clocks", "no connected worker tells of its device")
    names = device_columns.short_names([worker.worker_id for worker in place.workers])
    wrong = []
    for worker in active:
        age_s = seconds_of(worker.last_heartbeat_time) - seconds_of(worker.telemetry.sample_time)
        if age_s < -SKEW_WARN_S:
            wrong.append(f"{names[worker.worker_id]} is {duration(-age_s)} or more ahead")
        elif age_s > SAMPLE_AGE_WARN_S:
            wrong.append(f"{names[worker.worker_id]} is {duration(age_s)} behind, or its driver doesn't answer")
    if wrong:
        remedy = "`timedatectl set-ntp true` on these hosts; `mgpuctl doctor` there says more"
        return warn("worker clocks", "; ".join(wrong), remedy)
    return ok("worker clocks", f"{len(active)} workers agree with the master")


def fleet_versions(place: Place) -> list[Finding]:
    """Master, workers and this program are of one version."""
    if isinstance(place.stats, Failure):
        return skip("fleet versions", NO_MASTER)
    own = importlib.metadata.version("multigpu")
    others = {f"master {place.stats.version}"} if place.stats.version != own else set()
    connected = [worker for worker in place.workers if worker.state != admin.WORKER_STATE_LOST]
    others |= {f"{worker.worker_id} {worker.version}" for worker in connected if worker.version != own}
    if others:
        remedy = "`./deploy_multi_gpu.sh --upgrade` on the hosts that are behind"
        return warn("fleet versions", f"mgpuctl is {own}, but {', '.join(sorted(others))}", remedy)
    return ok("fleet versions", f"all are {own}: the master, {len(connected)} workers, mgpuctl")


def handlers(place: Place) -> list[Finding]:
    """Workers that offer the same kind run one version of its handlers."""
    if isinstance(place.stats, Failure):
        return skip("handlers", NO_MASTER)
    versions: dict[str, dict[str, list[str]]] = {}
    for worker in place.workers:
        if worker.state != admin.WORKER_STATE_LOST and worker.handlers.version:
            for kind in {c.kind for c in worker.capabilities} - RESERVED_KINDS:
                versions.setdefault(kind, {}).setdefault(worker.handlers.version, []).append(worker.worker_id)
    differing = {str(sorted(found.items())): kind for kind, found in sorted(versions.items()) if len(found) > 1}
    if not differing:
        return ok("handlers", f"{len(versions)} kinds, each of one version") if versions else skip("handlers", "none")
    told = (
        f"{kind}: "
        + ", ".join(f"{version} on {' and '.join(names)}" for version, names in sorted(versions[kind].items()))
        for kind in differing.values()
    )
    remedy = "`mgpuctl handlers reload --all`, once the files are the same on all hosts"
    return warn("handlers", f"workers run different versions of {'; '.join(told)}", remedy)


def workers(place: Place) -> list[Finding]:
    """Every device is there and fit."""
    if isinstance(place.stats, Failure):
        return skip("workers", NO_MASTER)
    if not place.workers:
        return warn(
            "workers", "no worker has connected yet", "`mgpuctl up` or `systemctl start mgpu-worker@0` starts one"
        )
    findings: list[Finding] = []
    names = device_columns.short_names([worker.worker_id for worker in place.workers])
    for worker in place.workers:
        name, word = names[worker.worker_id], device_columns.health_word(worker)
        why = "; ".join(f"{reason.code}: {reason.message}" for reason in worker.health.reasons)
        told = f"{name} is {word}{f': {why}' if why else ''}"
        if word == "lost":
            seen = age(worker, "last_heartbeat_time") or "?"
            remedy = f"look at its host; if it is gone for good, `mgpuctl forget {name}`"
            findings += fail("workers", f"{name} is lost, last heard {seen} ago", remedy)
        elif word == "sick" or worker.quarantined:
            told = told if word == "sick" else f"{told}, and quarantined by the master"
            remedy = "do what the reasons ask for; it returns once a check passes; docs/health.md explains them"
            findings += fail("workers", told, remedy)
        elif word != "healthy":
            findings += warn("workers", told, "docs/health.md has the reasons")
    bad = [finding for finding in findings if finding.verdict is not Verdict.OK]
    return bad or ok("workers", device_columns.summary(place.workers))


def model_memory(place: Place) -> list[Finding]:
    """Workers that share a device share its memory too: what each takes for models is not more than there is."""
    if isinstance(place.stats, Failure):
        return skip("model memory", NO_MASTER)
    sharing: dict[tuple[str, str], list[admin.Worker]] = {}
    for worker in place.workers:
        if worker.state != admin.WORKER_STATE_LOST and worker.model_memory_bytes:
            sharing.setdefault((worker.host, worker.device.device_id), []).append(worker)
    if not sharing:
        return skip("model memory", "no connected worker tells how much it takes for models")
    names = device_columns.short_names([worker.worker_id for worker in place.workers])
    findings: list[Finding] = []
    for workers_there in sharing.values():
        total = workers_there[0].device.memory_total_bytes
        taken = sum(worker.model_memory_bytes for worker in workers_there)
        if total and taken > total:
            told = " and ".join(names[worker.worker_id] for worker in workers_there)
            device = workers_there[0].device.name
            findings += warn(
                "model memory",
                f"{told}: models may take {size(taken)} of the {size(total)} that {device} has",
                f"set device_workers = {len(workers_there)} for each worker there, or lower its model_memory_bytes",
            )
    return findings or ok("model memory", f"{len(sharing)} devices have as much as their workers may take for models")


def breaker(place: Place) -> list[Finding]:
    """The fleet takes sick devices out by itself."""
    if isinstance(place.stats, Failure):
        return skip("breaker", NO_MASTER)
    state = place.stats.breaker
    if state.tripped:
        message = f"tripped: {state.quarantines} devices fell sick together, more than {state.quarantines_max}: "
        message += "not all are quarantined"
        remedy = "look for what they have in common (power, cooling, driver), then `mgpuctl breaker reset`"
        return fail("breaker", message, remedy)
    return ok(
        "breaker", f"not tripped: {state.quarantines} of at most {state.quarantines_max} quarantines in its window"
    )


CHECKS = (master, journal, clock, worker_clocks, fleet_versions, handlers, workers, model_memory, breaker)
