"""Checks of the fleet: the master, clocks, versions, devices, the journal."""

import time

import multigpu
from multigpu._units import format_duration, format_size
from multigpu.cli import show
from multigpu.cli.doctor.base import Finding, Host, SkipCheck, fail, ok, warn
from multigpu.cli.failures import Failure, Unreachable
from multigpu.cli.fleet import device_columns
from multigpu.cli.models.models import id_of
from multigpu.cli.sdk_errors import failures
from multigpu.cli.text import plural, since
from multigpu.fleet import Worker, WorkerRejection
from multigpu.handlers import RESERVED_KINDS

CLOCK_ROUNDS = 3
SKEW_WARN_S, SKEW_FAIL_S = 0.5, 5.0
# A sample is taken shortly before its heartbeat: an older one means a wrong clock or a driver that hangs.
SAMPLE_AGE_WARN_S = 15.0
REJECTED_RECENTLY_S = 3600.0
NAMED_MODELS_MAX = 20
RETRIED_S = 30.0  # a worker that is rejected tries again within seconds


def check_master(host: Host) -> Finding:
    """A master answers."""
    address, stats = host.client_config.master, host.stats_or_failure
    if isinstance(stats, Unreachable):
        remedy = "`mgpuctl up` or `systemctl start mgpu-master` starts one; --master names another address"
        return warn("master", str(stats).partition("; ")[0], remedy)
    if isinstance(stats, Failure):
        return fail("master", f"{address}: {stats}", "use the right certificates and token: docs/security.md")
    return ok("master", f"{address}, version {stats.version}, up {since(stats.start_time)}")


def check_journal(host: Host) -> Finding:
    """The master accepts durable tasks."""
    if not host.stats.journal_writable:
        remedy = "make room on its disk (never delete files in data_dir), or raise the limit"
        return fail("journal", f"durable tasks are rejected: {show.JOURNAL_FULL}", remedy)
    return ok("journal", f"writable, {format_size(host.stats.journal_bytes)}")


def check_clock(host: Host) -> Finding:
    """The clock skew to the master, by the fastest of a few round trips."""
    if host.stats.server_time is None:
        raise SkipCheck(f"a master of version {host.stats.version} doesn't report its time")
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        before = time.time()
        server_time = host.ask_stats().server_time
        after = time.time()
        assert server_time is not None
        rounds.append((after - before, (before + after) / 2 - server_time.timestamp()))
    trip_s, skew_s = min(rounds)
    return judge_clock(skew_s, trip_s)


def judge_clock(skew_s: float, trip_s: float) -> Finding:
    """`skew_s`: how far this clock is ahead, ± half of `trip_s`, the round trip."""
    min_skew_s = max(0.0, abs(skew_s) - trip_s / 2)
    way = "ahead of" if skew_s > 0 else "behind"
    message = f"{format_duration(abs(skew_s))} {way} the master's, ± {format_duration(trip_s / 2)}"
    remedy = "synchronize both clocks with chrony or systemd-timesyncd: `timedatectl set-ntp true`; deadlines need it"
    if min_skew_s >= SKEW_WARN_S:
        return (fail if min_skew_s >= SKEW_FAIL_S else warn)("clock", message, remedy)
    return ok("clock", message)


def check_worker_clocks(host: Host) -> Finding:
    """Workers' samples are a little older than the heartbeats that bring them."""
    ages_s = {
        worker.worker_id: (worker.last_heartbeat_time - worker.telemetry.sample_time).total_seconds()
        for worker in host.connected
        if worker.telemetry is not None and worker.telemetry.sample_time and worker.last_heartbeat_time
    }
    if not ages_s:
        raise SkipCheck("no connected worker reports its device")
    names = device_columns.short_names([worker.worker_id for worker in host.workers])
    wrong = []
    for worker_id, age_s in ages_s.items():
        if age_s < -SKEW_WARN_S:
            wrong.append(f"{names[worker_id]} is {format_duration(-age_s)} or more ahead")
        elif age_s > SAMPLE_AGE_WARN_S:
            wrong.append(f"{names[worker_id]} is {format_duration(age_s)} behind, or its driver doesn't answer")
    if wrong:
        remedy = "`timedatectl set-ntp true` on these hosts; `mgpuctl doctor` there says more"
        return warn("worker clocks", "; ".join(wrong), remedy)
    return ok("worker clocks", f"{len(ages_s)} workers agree with the master")


def check_fleet_versions(host: Host) -> Finding:
    """Master, workers and mgpuctl have the same version."""
    own = multigpu.__version__
    others = {f"master {host.stats.version}"} if host.stats.version != own else set()
    others |= {f"{worker.worker_id} {worker.version}" for worker in host.connected if worker.version != own}
    if others:
        remedy = "`./deploy_multi_gpu.sh --upgrade` on the hosts that are behind"
        return warn("fleet versions", f"mgpuctl is {own}, but {', '.join(sorted(others))}", remedy)
    return ok("fleet versions", f"all are {own}: the master, {len(host.connected)} workers, mgpuctl")


def check_handlers(host: Host) -> Finding:
    """Workers that serve the same kind have the same version of its handlers."""
    versions: dict[str, dict[str, list[str]]] = {}
    for worker in host.connected:
        if worker.handlers is not None and worker.handlers.version:
            for kind in {c.kind for c in worker.capabilities} - RESERVED_KINDS:
                versions.setdefault(kind, {}).setdefault(worker.handlers.version, []).append(worker.worker_id)
    # Kinds with the same map of versions are reported once.
    differing = {str(sorted(found.items())): kind for kind, found in sorted(versions.items()) if len(found) > 1}
    if not versions:
        raise SkipCheck("none")
    if not differing:
        return ok("handlers", f"{len(versions)} kinds, each of one version")
    texts = (
        f"{kind}: "
        + ", ".join(f"{version} on {' and '.join(names)}" for version, names in sorted(versions[kind].items()))
        for kind in differing.values()
    )
    remedy = "`mgpuctl handlers reload --all`, once the files are the same on all hosts"
    return warn("handlers", f"workers run different versions of {'; '.join(texts)}", remedy)


def check_workers(host: Host) -> list[Finding]:
    """Every worker is connected and its device is healthy."""
    if not host.workers:
        remedy = "`mgpuctl up` or `systemctl start mgpu-worker@cuda:0` starts one"
        return [warn("workers", "no worker has connected yet", remedy)]
    findings: list[Finding] = []
    names = device_columns.short_names([worker.worker_id for worker in host.workers])
    for worker in host.workers:
        name, word = names[worker.worker_id], device_columns.health_word(worker)
        why = "; ".join(f"{reason.code}: {reason.message}" for reason in device_columns.reasons(worker))
        message = f"{name} is {word}{f': {why}' if why else ''}"
        if word == "lost":
            seen = since(worker.last_heartbeat_time) or "?"
            remedy = f"look at its host; if it is gone for good, `mgpuctl forget {name}`"
            findings.append(fail("workers", f"{name} is lost, last heard {seen} ago", remedy))
        elif word == "sick" or worker.quarantined:
            message = message if word == "sick" else f"{message}, and quarantined by the master"
            remedy = "do what the reasons ask for; it returns once a check passes; docs/health.md explains them"
            findings.append(fail("workers", message, remedy))
        elif word != "healthy":
            findings.append(warn("workers", message, "docs/health.md explains the reasons"))
    return findings or [ok("workers", device_columns.summary(host.workers))]


def check_rejected_workers(host: Host) -> Finding:
    """The master rejected no worker recently that has not joined since."""
    now = host.stats.server_time

    def within(rejection: WorkerRejection, seconds: float) -> bool:
        return bool(now and rejection.reject_time and (now - rejection.reject_time).total_seconds() < seconds)

    recent = [each for each in host.stats.worker_rejections if within(each, REJECTED_RECENTLY_S)]
    text = "\n".join(
        f"{r.worker_id or '(no worker_id)'} ({r.peer}), {since(r.reject_time)} ago: {r.reason}" for r in recent
    )
    remedy = "correct this on their hosts, and start the workers again if they have ended"
    if any(within(each, RETRIED_S) for each in recent):
        return fail("rejected workers", text, remedy)
    return warn("rejected workers", text, remedy) if text else ok("rejected workers", "none within the last hour")


def check_models(host: Host) -> Finding:
    """Every folder of the workers' model repositories is a model that can be served."""
    with failures():
        broken = [e for e in host.admin.list_models() if e.model.error]
    texts = [f"{id_of(e.model)} on {', '.join(e.worker_ids)}: {e.model.error}" for e in broken[:NAMED_MODELS_MAX]]
    message = f"{plural(len(broken), 'model')} can't be served\n" + "\n".join(texts)
    remedy = "repair or remove their folders; `mgpuctl models` lists all"
    return warn("models", message, remedy) if broken else ok("models", "no worker reports an error")


def check_model_memory(host: Host) -> list[Finding]:
    """The sum of the model_memory_bytes of workers that share a device fits into its memory."""
    sharing: dict[tuple[str, str], list[Worker]] = {}
    for worker in host.connected:
        if worker.model_memory_bytes:
            sharing.setdefault((worker.host, worker.device.device_id), []).append(worker)
    if not sharing:
        raise SkipCheck("no connected worker reports its limit for models")
    names = device_columns.short_names([worker.worker_id for worker in host.workers])
    findings: list[Finding] = []
    for sharers in sharing.values():
        device = sharers[0].device
        allowed = sum(worker.model_memory_bytes for worker in sharers)
        if device.memory_total_bytes and allowed > device.memory_total_bytes:
            sizes = f"{format_size(allowed)} of the {format_size(device.memory_total_bytes)}"
            who = " and ".join(names[worker.worker_id] for worker in sharers)
            message = f"{who}: models may take {sizes} that {device.name} has"
            remedy = f"set device_workers = {len(sharers)} for each worker there, or lower its model_memory_bytes"
            findings.append(warn("model memory", message, remedy))
    return findings or [
        ok("model memory", f"the limits of models fit into the memory of {plural(len(sharing), 'device')}")
    ]


def check_breaker(host: Host) -> Finding:
    """The circuit breaker is closed: the master quarantines sick devices."""
    state = host.stats.breaker
    if not state.tripped:
        counts = f"{state.quarantines} of at most {state.quarantines_max}"
        return ok("breaker", f"not tripped: {counts} quarantines in its window")
    message = f"tripped: {state.quarantines} devices fell sick together, more than {state.quarantines_max}: "
    message += "not all are quarantined"
    remedy = "look for what they have in common (power, cooling, driver), then `mgpuctl breaker reset`"
    return fail("breaker", message, remedy)


CHECKS = (check_master, check_journal, check_clock, check_worker_clocks, check_fleet_versions, check_handlers,
          check_workers, check_rejected_workers, check_models, check_model_memory, check_breaker)  # fmt: skip
