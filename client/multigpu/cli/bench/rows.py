"""What `mgpuctl bench` finds out: rows, the figures in them, and their forms as table, JSON and CSV.

Nothing here measures. A percentile is by the nearest rank: the smallest value that at least p percent of all values
don't exceed, so always one that was measured. https://en.wikipedia.org/wiki/Percentile#The_nearest-rank_method
"""

import csv
import dataclasses
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multigpu.cli import show

UNKNOWN = "n/a"
# Below it a rate is told with two digits behind the point.
RATE_WITHOUT_FRACTION = 10
# Below it a ratio is told with two digits that count.
RATIO_WITH_TWO_DIGITS = 0.1


def percentile(values: Sequence[float], p: float) -> float:
    """By the nearest rank; `p` is 0 to 100. `values` need not be sorted, but there must be one."""
    assert values
    assert 0 <= p <= 100
    return sorted(values)[max(0, math.ceil(p / 100 * len(values)) - 1)]


def mean_cosine(rows: NDArray[np.float32], others: NDArray[np.float32]) -> float | None:
    """The mean of the cosines between a row and its counterpart. None: one is all zeros, or holds no numbers."""
    a, b = rows.astype(np.float64), others.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    if not (np.isfinite(norms) & (norms > 0)).all():
        return None
    return float(np.mean((a * b).sum(1) / norms))


def agreement(rows: NDArray[np.float32], others: NDArray[np.float32]) -> float:
    """The share of rows whose largest value is where their counterpart's is."""
    return float(np.mean(rows.argmax(1) == others.argmax(1)))


def spearman(a: NDArray[Any], b: NDArray[Any]) -> float | None:
    """Spearman's rank correlation, equal values sharing the mean of their ranks. None: all of one side are equal."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = (ends - counts + 1 + ends) / 2
    return means[places]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of tasks, from the call to its result, in milliseconds."""

    min_ms: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        ms = [1e3 * value for value in seconds]
        p50, p95, p99 = (percentile(ms, p) for p in (50, 95, 99))
        return cls(min_ms=min(ms), mean_ms=statistics.fmean(ms), p50_ms=p50, p95_ms=p95, p99_ms=p99, max_ms=max(ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination. None: not told, or not measured."""

    kind: str
    # Empty where the kind needs none.
    model: str
    engine: str
    precision: str
    # Items in a task, and tasks under way at the same time.
    batch_size: int
    concurrency: int
    # Why there are no figures.
    error: str = ""
    tasks: int = 0
    items: int = 0
    latency: Latency | None = None
    items_per_s: float | None = None
    tokens_per_s: float | None = None
    # 0 to 1, the mean over the workers.
    utilization: float | None = None
    # The most at any instant, over all devices together.
    memory_bytes: int | None = None
    joules_per_item: float | None = None
    plain_items_per_s: float | None = None
    # Why there is no plain loop.
    plain_error: str = ""
    # The median over the rounds of items/s to the plain loop's in the same round.
    ratio: float | None = None
    # Mean, to the plain loop's answers at fp32.
    cosine: float | None = None
    # The share of examples whose likeliest class is that of the plain loop at fp32.
    top1: float | None = None
    # In points of 100.
    spearman: float | None = None

    def plain(self) -> dict[str, Any]:
        """As plain values: the latencies beside the other figures."""
        values = dataclasses.asdict(self)
        latency = values.pop("latency") or dict.fromkeys(field.name for field in dataclasses.fields(Latency))
        return values | {name.replace("_ms", "_latency_ms"): value for name, value in latency.items()}


TABLE = (
    *("MODEL", "ENGINE", "PRECISION", "BATCH", "CALLERS", "ITEMS/S", "TOKENS/S", "VS PLAIN", "MIN MS", "MEAN", "P50"),
    *("P95", "P99", "MAX", "BUSY", "MEMORY", "J/ITEM", "COSINE", "TOP-1", "SPEARMAN"),
)
# On a narrow terminal these go, the first of them first.
OPTIONAL = (
    *("MEMORY", "J/ITEM", "MIN MS", "MEAN", "P95", "MAX", "TOKENS/S", "BUSY"),
    *("P99", "SPEARMAN", "TOP-1", "COSINE", "P50", "PRECISION", "ENGINE"),
)


def table_row(row: Row) -> tuple[str, ...]:
    """The cells of TABLE."""
    head = (row.model or row.kind, row.engine, row.precision, str(row.batch_size), str(row.concurrency))
    if row.latency is None:
        return (*head, "failed", *[""] * (len(TABLE) - len(head) - 1))
    times = dataclasses.astuple(row.latency)
    return (
        *head,
        _number(row.items_per_s, rate_form(row.items_per_s)),
        _number(row.tokens_per_s, ",.0f"),
        _number(row.ratio, ratio_form(row.ratio)),
        *(f"{value:.1f}" for value in times),
        _number(row.utilization, ".0%"),
        UNKNOWN if row.memory_bytes is None else show.size(row.memory_bytes),
        _number(row.joules_per_item, ".3g"),
        _number(row.cosine, ".6f"),
        _number(row.top1, ".1%"),
        _number(row.spearman, ".2f"),
    )


def plural(count: int, noun: str) -> str:
    """A number of things, for people."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def rate_form(rate: float | None) -> str:
    """How many digits a rate is told with."""
    return ",.0f" if rate is None or rate >= RATE_WITHOUT_FRACTION else ".2f"


def ratio_form(ratio: float | None) -> str:
    return ".2f" if ratio is None or ratio >= RATIO_WITH_TWO_DIGITS else ".2g"


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def to_csv(rows: Sequence[Row]) -> bytes:
    """All figures, one line a row under a heading; what is unknown is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0].plain()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.plain() for row in rows)
    return out.getvalue().encode()
