"""Devices as rows of a table that fits: what `mgpuctl gpus` and `mgpuctl top` show of a worker's device.

A column has a long form and perhaps a short one. Where the terminal is too narrow for all of them, first the short
forms are taken, then the columns that matter least are left out. What a device doesn't tell is "-", never zero.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multigpu.cli import show
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import device_pb2

NOTHING = "-"
GAP = 2
UUID = re.compile(r"((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# From the best to the worst; "lost" is what the master says of a worker, not a state of health.
HEALTH_WORDS = ("healthy", "degraded", "recovering", "sick", "lost")
HEALTH_STYLES = {"degraded": "yellow", "recovering": "cyan", "sick": "bold red", "lost": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    cell: Callable[[admin.Worker], str]
    # For narrow terminals; None: the same.
    short: Callable[[admin.Worker], str] | None = None
    right: bool = False
    # The higher, the sooner it is left out.
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Columns that were chosen, and a row of cells for each worker."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    widths: tuple[int, ...]


def fit(workers: Sequence[admin.Worker], width: int | None) -> Grid:
    """What of COLUMNS goes into `width`; None: everything, in its long form."""
    names = short_names([worker.worker_id for worker in workers])
    long = {column: [show.clean(column.cell(worker)) for worker in workers] for column in COLUMNS}
    if width is None:
        return _grid(long)
    # Where no device has anything to say there is no column: a fleet of CPUs has no temperatures.
    told = {column: cells for column, cells in long.items() if column.rank == 0 or set(cells) - {NOTHING, ""}}
    if _width(told) <= width:
        return _grid(told)
    for column in told:
        if column is WORKER:
            told[column] = [show.clean(names[worker.worker_id]) for worker in workers]
        elif column.short is not None:
            told[column] = [show.clean(column.short(worker)) for worker in workers]
    for column in sorted(told, key=lambda column: -column.rank):
        if _width(told) <= width or column.rank == 0:
            break
        del told[column]
    _lengthen(told, long, width)
    return _grid(told, width)


def _lengthen(cells: dict[Column, list[str]], long: dict[Column, list[str]], width: int) -> None:
    """Long forms again where there is room for them, the most important first."""
    for column in sorted(cells, key=lambda column: column.rank):
        if column.short is not None and column is not WORKER and _width(cells | {column: long[column]}) <= width:
            cells[column] = long[column]


def _width(cells: dict[Column, list[str]]) -> int:
    return sum(_column_width(column, each) + GAP for column, each in cells.items()) - GAP


def _column_width(column: Column, cells: Sequence[str]) -> int:
    return max(len(column.name), *map(len, cells), 0)


def _grid(cells: dict[Column, list[str]], width: int | None = None) -> Grid:
    columns = tuple(column for column in COLUMNS if column in cells)
    widths = [_column_width(column, cells[column]) for column in columns]
    if width is not None and (over := sum(widths) + GAP * (len(widths) - 1) - width) > 0:
        widths[0] = max(8, widths[0] - over)
    rows = tuple(zip(*(cells[column] for column in columns), strict=True))
    return Grid(columns=columns, rows=rows, widths=tuple(widths))


def row_text(grid: Grid, cells: Sequence[str]) -> str:
    """A row, or the heading, as a line."""
    padded = zip(cells, grid.columns, grid.widths, strict=True)
    return (" " * GAP).join(pad(cell, width, right=column.right) for cell, column, width in padded).rstrip()


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Text as wide as its column, cut with an ellipsis if it is wider."""
    if len(text) > width:
        text = text[: max(0, width - 1)] + "…"
    return text.rjust(width) if right else text.ljust(width)


def short_names(worker_ids: Sequence[str]) -> dict[str, str]:
    """Worker ids with their UUIDs cut to the first eight digits: still the beginning of one id only, so that commands
    take them; an id that would become another's beginning stays whole.
    """
    cut = {worker_id: UUID.sub(r"\1", worker_id) for worker_id in worker_ids}
    many = Counter(cut.values())
    return {
        worker_id: short
        if many[short] == 1 and sum(other.startswith(short) for other in worker_ids) == 1
        else worker_id
        for worker_id, short in cut.items()
    }


def health_word(worker: admin.Worker) -> str:
    """One of HEALTH_WORDS. A worker that says nothing of its health is healthy, as far as anybody knows."""
    if worker.state == admin.WORKER_STATE_LOST:
        return "lost"
    if worker.health.state == device_pb2.HEALTH_STATE_UNSPECIFIED:
        return "healthy"
    return show.enum_name(worker.health, "state").lower()


def style(worker: admin.Worker) -> str:
    """The colour of a device's row; empty: the terminal's own."""
    word = health_word(worker)
    if word == "healthy" and (worker.cordoned or worker.state == admin.WORKER_STATE_DRAINING):
        return "magenta"
    return "bold red" if worker.quarantined and word == "healthy" else HEALTH_STYLES.get(word, "")


def health(worker: admin.Worker, *, reasons: int | None = None) -> str:
    """How a device is: its state, why, and what keeps work from it. `reasons`: at most so many."""
    word = health_word(worker)
    if word == "lost":
        return word
    parts = []
    if codes := [reason.code for reason in worker.health.reasons][:reasons]:
        word += f": {', '.join(codes)}"
    parts = [word] if word != "healthy" else []
    if worker.quarantined and health_word(worker) in ("healthy", "degraded"):
        parts.append("quarantined")
    if worker.state == admin.WORKER_STATE_DRAINING:
        parts.append("draining")
    elif worker.cordoned:
        parts.append("cordoned")
    return ", ".join(parts) or word


def memory(worker: admin.Worker) -> str:
    total = memory_total(worker)
    if not worker.telemetry.HasField("memory_used_bytes"):
        return show.size(total) if total else NOTHING
    used = worker.telemetry.memory_used_bytes
    return f"{show.size(used)} of {show.size(total)}" if total else show.size(used)


def memory_share(worker: admin.Worker) -> float | None:
    total = memory_total(worker)
    return (
        worker.telemetry.memory_used_bytes / total if total and worker.telemetry.HasField("memory_used_bytes") else None
    )


def memory_total(worker: admin.Worker) -> int:
    return int(worker.telemetry.memory_total_bytes or worker.device.memory_total_bytes)


def value(worker: admin.Worker, field: str) -> float | None:
    """A figure of the telemetry; None if the device doesn't tell."""
    return float(getattr(worker.telemetry, field)) if worker.telemetry.HasField(field) else None


def _told(figure: float | None, form: str) -> str:
    return NOTHING if figure is None else form.format(figure)


def power(worker: admin.Worker) -> str:
    watts, limit = value(worker, "power_watts"), value(worker, "power_limit_watts")
    return (
        _told(watts, "{:.0f}") + _told(limit, " of {:.0f} W")
        if None not in (watts, limit)
        else _told(watts, "{:.0f} W")
    )


def energy(joules: float | None) -> str:
    """Energy for people: "512 J", "1.2 MJ"."""
    if joules is None:
        return NOTHING
    for unit in ("J", "kJ", "MJ", "GJ"):
        if joules < 1000:
            return f"{joules:.3g} {unit}"
        joules /= 1000
    return f"{joules:.3g} TJ"


def mps(worker: admin.Worker) -> str:
    if not worker.HasField("mps"):
        return NOTHING
    word = show.enum_name(worker.mps, "state").lower()
    return f"{worker.mps.clients} of {worker.mps.clients_max}" if word == "running" else word


def product(worker: admin.Worker) -> str:
    return f"{worker.device.product} (simulated)" if worker.device.simulated else worker.device.product or NOTHING


def processes(worker: admin.Worker) -> str:
    if not worker.device.device_id or worker.device.device_id == "cpu" or not worker.HasField("telemetry"):
        return NOTHING
    return str(len(worker.telemetry.processes))


WORKER = Column(name="WORKER", cell=lambda w: w.worker_id, rank=0)
COLUMNS = (
    Column(name="HOST", cell=lambda w: w.host or NOTHING, rank=90),
    WORKER,
    Column(name="DEVICE", cell=lambda w: w.device.name or NOTHING, rank=10),
    Column(name="PRODUCT", cell=product, short=lambda w: product(w).removeprefix("NVIDIA "), rank=85),
    Column(
        name="MEMORY",
        cell=memory,
        short=lambda w: _told(memory_share(w), "{:.0%}"),
        right=True,
        rank=20,
    ),
    Column(name="BUSY", cell=lambda w: _told(value(w, "utilization"), "{:.0%}"), right=True, rank=5),
    Column(name="TEMP", cell=lambda w: _told(value(w, "temperature_celsius"), "{:.0f}°C"), right=True, rank=30),
    Column(name="POWER", cell=power, short=lambda w: _told(value(w, "power_watts"), "{:.0f} W"), right=True, rank=40),
    Column(
        name="CLOCK",
        cell=lambda w: _told(None if (hertz := value(w, "sm_clock_hertz")) is None else hertz / 1e9, "{:.2f} GHz"),
        right=True,
        rank=70,
    ),
    Column(
        name="THROTTLED",
        cell=lambda w: ", ".join(w.telemetry.throttle_reasons) or NOTHING,
        short=lambda w: w.telemetry.throttle_reasons[0] if w.telemetry.throttle_reasons else NOTHING,
        rank=60,
    ),
    Column(name="ENERGY", cell=lambda w: energy(value(w, "energy_joules")), right=True, rank=80),
    Column(name="MPS", cell=mps, rank=65),
    Column(name="LEASES", cell=lambda w: f"{w.leases:,}", right=True, rank=50),
    Column(name="PROCS", cell=processes, right=True, rank=75),
    Column(name="HEALTH", cell=health, short=lambda w: health(w, reasons=0), rank=1),
)


def summary(workers: Sequence[admin.Worker]) -> str:
    """All devices in one line."""
    hosts = len({worker.host for worker in workers})
    words = Counter(health_word(worker) for worker in workers)
    parts = [f"{words[word]} {word}" for word in HEALTH_WORDS if words[word]]
    line = f"{len(workers)} device{'s' * (len(workers) != 1)} on {hosts} host{'s' * (hosts != 1)}: {', '.join(parts)}"
    watts = [figure for worker in workers if (figure := value(worker, "power_watts")) is not None]
    if watts:
        line += f"; {sum(watts) / 1000:.2f} kW" if sum(watts) >= 1000 else f"; {sum(watts):.0f} W"
    return line


def complaints(workers: Sequence[admin.Worker]) -> list[str]:
    """A line for each thing that is wrong with a device, in words."""
    lines = []
    names = short_names([worker.worker_id for worker in workers])
    for worker in workers:
        name = names[worker.worker_id]
        for reason in worker.health.reasons:
            since = f" for {show.age(reason, 'since_time')}" if reason.HasField("since_time") else ""
            lines.append(f"{name}: {health_word(worker)}{since}: {reason.code}: {reason.message}")
        if worker.mps.state == device_pb2.MPS_STATE_FAULT:
            lines.append(f"{name}: MPS fault: {worker.mps.message}")
        if worker.cordoned and worker.cordon_reason:
            lines.append(f"{name}: cordoned: {worker.cordon_reason}")
    return [show.clean(line) for line in lines]
