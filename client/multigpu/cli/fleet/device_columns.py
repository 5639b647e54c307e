"""The columns that `mgpuctl gpus` and `mgpuctl top` show of a worker's device. Unknown values are "-", never zero."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from multigpu._units import format_size
from multigpu.cli.tables import Column
from multigpu.cli.text import clean, plural, since
from multigpu.fleet import HealthReason, MpsState, Worker, WorkerState

UUID = re.compile(r"((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# From the best to the worst. "lost" is a state of the worker, not of its health.
HEALTH_WORDS = ("healthy", "degraded", "recovering", "sick", "lost")
HEALTH_STYLES = {"degraded": "yellow", "recovering": "cyan", "sick": "bold red", "lost": "red"}


def rows(workers: Sequence[Worker]) -> list[Worker]:
    """The rows of a table: each worker, and below it each of its devices if it owns several. Such rows have no
    worker_id, and the health of their worker.
    """
    found = []
    for worker in workers:
        found.append(worker)
        samples = worker.telemetry.members if worker.telemetry is not None else ()
        for index, member in enumerate(worker.device.members):
            sample = samples[index] if index < len(samples) else None
            device = dataclasses.replace(member, name=f"  {member.name}")
            found.append(dataclasses.replace(worker, worker_id="", host=" ", device=device, telemetry=sample, mps=None))
    return found


def columns(workers: Sequence[Worker]) -> tuple[Column, ...]:
    """The columns of these workers' devices; narrow terminals show their ids without the rest of the UUID."""
    names = {"": ""} | short_names([worker.worker_id for worker in workers])
    worker_column = Column("WORKER", lambda worker: worker.worker_id, short=lambda worker: names[worker.worker_id])
    return (HOST, worker_column, *DEVICE)


def short_names(worker_ids: Sequence[str]) -> dict[str, str]:
    """Worker ids with their UUIDs cut to the first eight digits, if that is still the beginning of one id only, so that
    commands accept it.
    """
    cut = {worker_id: UUID.sub(r"\1", worker_id) for worker_id in worker_ids}
    many = Counter(cut.values())
    return {
        worker_id: short
        if many[short] == 1 and sum(other.startswith(short) for other in worker_ids) == 1
        else worker_id
        for worker_id, short in cut.items()
    }


def health_word(worker: Worker) -> str:
    """One of HEALTH_WORDS. A worker without a health state counts as healthy."""
    if worker.state == WorkerState.LOST:
        return "lost"
    if worker.health is None or not worker.health.state:
        return "healthy"
    return worker.health.state.name.lower()


def reasons(worker: Worker) -> tuple[HealthReason, ...]:
    return worker.health.reasons if worker.health is not None else ()


def style(worker: Worker) -> str:
    """The colour of a device's row; empty: the terminal's default."""
    word = health_word(worker)
    if word == "healthy" and (worker.cordoned or worker.state == WorkerState.DRAINING):
        return "magenta"
    return "bold red" if worker.quarantined and word == "healthy" else HEALTH_STYLES.get(word, "")


def health(worker: Worker, *, reasons_max: int | None = None) -> str:
    """The state, its reasons (at most `reasons_max`), and what keeps tasks away."""
    word = health_word(worker)
    if word == "lost":
        return word
    codes = ", ".join(reason.code for reason in reasons(worker)[:reasons_max])
    parts = [f"{word}: {codes}" if codes else word] if word != "healthy" or codes else []
    if worker.quarantined and word in ("healthy", "degraded"):
        parts.append("quarantined")
    if worker.state == WorkerState.DRAINING:
        parts.append("draining")
    elif worker.cordoned:
        parts.append("cordoned")
    return ", ".join(parts) or word


def value(worker: Worker, field: str) -> float | None:
    """A value of the telemetry; None: unknown."""
    found = getattr(worker.telemetry, field, None)
    return None if found is None else float(found)


def _number(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)


def _memory_total(worker: Worker) -> int:
    return int(value(worker, "memory_total_bytes") or worker.device.memory_total_bytes)


def memory_share(worker: Worker) -> float | None:
    used, total = value(worker, "memory_used_bytes"), _memory_total(worker)
    return used / total if total and used is not None else None


def _memory(worker: Worker) -> str:
    used, total = value(worker, "memory_used_bytes"), _memory_total(worker)
    if used is None:
        return format_size(total) if total else "-"
    return f"{format_size(int(used))} of {format_size(total)}" if total else format_size(int(used))


def _power(worker: Worker) -> str:
    watts, limit = value(worker, "power_watts"), value(worker, "power_limit_watts")
    if watts is None or limit is None:
        return _number(watts, "{:.0f} W")
    return f"{watts:.0f} of {limit:.0f} W"


def _mps(worker: Worker) -> str:
    if worker.mps is None:
        return "-"
    word = worker.mps.state.name.lower()
    return f"{worker.mps.clients} of {worker.mps.clients_max}" if word == "running" else word


def _product(worker: Worker) -> str:
    return f"{worker.device.product} (simulated)" if worker.device.simulated else worker.device.product or "-"


def _throttled(worker: Worker) -> tuple[str, ...]:
    return worker.telemetry.throttle_reasons if worker.telemetry is not None else ()


def _row_health(worker: Worker, *, reasons_max: int | None = None) -> str:
    return health(worker, reasons_max=reasons_max) if worker.worker_id else ""


HOST = Column("HOST", lambda w: w.host or "-", rank=90)
DEVICE = (
    Column("DEVICE", lambda w: w.device.name or "-", rank=10),
    Column("PRODUCT", _product, short=lambda w: _product(w).removeprefix("NVIDIA "), rank=85),
    Column("MEMORY", _memory, short=lambda w: _number(memory_share(w), "{:.0%}"), right=True, rank=20),
    Column("BUSY", lambda w: _number(value(w, "utilization"), "{:.0%}"), right=True, rank=5),
    Column("TEMP", lambda w: _number(value(w, "temperature_celsius"), "{:.0f}°C"), right=True, rank=30),
    Column("POWER", _power, short=lambda w: _number(value(w, "power_watts"), "{:.0f} W"), right=True, rank=40),
    Column(
        "THROTTLED",
        lambda w: ", ".join(_throttled(w)) or "-",
        short=lambda w: ", ".join(_throttled(w)[:1]) or "-",
        rank=60,
    ),
    Column("MPS", _mps, rank=65),
    Column("LEASES", lambda w: f"{w.leases:,}" if w.worker_id else "", right=True, rank=50),
    Column("HEALTH", _row_health, short=lambda w: _row_health(w, reasons_max=0), rank=1),
)


def summary(workers: Sequence[Worker]) -> str:
    """All devices on one line."""
    hosts = len({worker.host for worker in workers})
    counts = Counter(health_word(worker) for worker in workers for _ in worker.device.members or (None,))
    states = ", ".join(f"{counts[word]} {word}" for word in HEALTH_WORDS if counts[word])
    line = f"{plural(counts.total(), 'device')} on {plural(hosts, 'host')}: {states}"
    found = [watts for worker in workers if (watts := value(worker, "power_watts")) is not None]
    if found:
        line += f"; {sum(found) / 1000:.2f} kW" if sum(found) >= 1000 else f"; {sum(found):.0f} W"
    return line


def problems(workers: Sequence[Worker]) -> list[str]:
    """A line for each health reason, MPS fault and cordon."""
    lines = []
    names = short_names([worker.worker_id for worker in workers])
    for worker in workers:
        name = names[worker.worker_id]
        for reason in reasons(worker):
            how_long = f" for {since(reason.since_time)}" if reason.since_time is not None else ""
            lines.append(f"{name}: {health_word(worker)}{how_long}: {reason.code}: {reason.message}")
        if worker.mps is not None and worker.mps.state is MpsState.FAULT:
            lines.append(f"{name}: MPS fault: {worker.mps.message}")
        if worker.cordoned and worker.cordon_reason:
            lines.append(f"{name}: cordoned: {worker.cordon_reason}")
    return [clean(line) for line in lines]
