"""The results of `mgpuctl bench`: rows, their numbers, and their forms as table, JSON and CSV."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multigpu.cli.tables import Column
from multigpu.cli.text import size

UNKNOWN = "n/a"


def mean_cosine(rows: NDArray[np.float32], others: NDArray[np.float32]) -> float | None:
    """The mean cosine of each row and its counterpart. None: a row is all zeros, or not finite."""
    a, b = rows.astype(np.float64), others.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    if not (np.isfinite(norms) & (norms > 0)).all():
        return None
    return float(np.mean((a * b).sum(1) / norms))


def agreement(rows: NDArray[np.float32], others: NDArray[np.float32]) -> float:
    """The share of rows whose largest value has the same index as their counterpart's."""
    return float(np.mean(rows.argmax(1) == others.argmax(1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination. None: unknown, or not measured."""

    kind: str
    # Empty if the kind needs none.
    model: str
    engine: str
    precision: str
    # Items in a task.
    batch_size: int
    # Tasks under way at the same time.
    concurrency: int
    # Why there are no results.
    error: str = ""
    tasks: int = 0
    items: int = 0
    items_per_s: float | None = None
    tokens_per_s: float | None = None
    # 0 to 1, the mean over the workers.
    utilization: float | None = None
    # The maximum over time of the sum over all devices.
    memory_bytes: int | None = None
    joules_per_item: float | None = None
    # Of the baseline.
    plain_items_per_s: float | None = None
    # Why there is no baseline.
    plain_error: str = ""
    # The median over the rounds of items/s divided by the baseline's in the same round.
    ratio: float | None = None
    # Mean, with the baseline's answers at fp32.
    cosine: float | None = None
    # The share of examples with the same most likely class as the baseline at fp32.
    top1: float | None = None
    # Of tasks, from the call to its result.
    min_latency_ms: float | None = None
    mean_latency_ms: float | None = None
    p50_latency_ms: float | None = None
    p95_latency_ms: float | None = None
    p99_latency_ms: float | None = None
    max_latency_ms: float | None = None


def latency_fields(seconds: Sequence[float]) -> dict[str, float]:
    """The latencies of a Row. Percentiles are by the nearest rank: always a value that was measured.

    https://en.wikipedia.org/wiki/Percentile#The_nearest-rank_method
    """
    ms = 1e3 * np.array(seconds)
    p50, p95, p99 = np.percentile(ms, (50, 95, 99), method="inverted_cdf").tolist()
    values = {"min": float(ms.min()), "mean": float(ms.mean()), "p50": p50, "p95": p95, "p99": p99}
    return {f"{name}_latency_ms": value for name, value in (values | {"max": float(ms.max())}).items()}


def rate_text(rate: float | None) -> str:
    return UNKNOWN if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"


def ratio_text(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _number(field: str, form: str) -> Any:
    """A cell of a Row's number; empty in a row without results."""

    def cell(row: Row) -> str:
        value = getattr(row, field)
        return "" if row.error else UNKNOWN if value is None else format(value, form)

    return cell


def _memory(row: Row) -> str:
    return "" if row.error else UNKNOWN if row.memory_bytes is None else size(row.memory_bytes)


COLUMNS = (
    Column("MODEL", lambda row: row.model or row.kind),
    Column("ENGINE", lambda row: row.engine, rank=1),
    Column("PRECISION", lambda row: row.precision, rank=2),
    Column("BATCH", lambda row: str(row.batch_size), right=True),
    Column("CALLERS", lambda row: str(row.concurrency), right=True),
    Column("ITEMS/S", lambda row: "failed" if row.error else rate_text(row.items_per_s), right=True),
    Column("TOKENS/S", _number("tokens_per_s", ",.0f"), right=True, rank=9),
    Column("VS PLAIN", lambda row: "" if row.error else ratio_text(row.ratio), right=True),
    Column("MIN MS", _number("min_latency_ms", ".1f"), right=True, rank=13),
    Column("MEAN", _number("mean_latency_ms", ".1f"), right=True, rank=12),
    Column("P50", _number("p50_latency_ms", ".1f"), right=True, rank=3),
    Column("P95", _number("p95_latency_ms", ".1f"), right=True, rank=11),
    Column("P99", _number("p99_latency_ms", ".1f"), right=True, rank=7),
    Column("MAX", _number("max_latency_ms", ".1f"), right=True, rank=10),
    Column("BUSY", _number("utilization", ".0%"), right=True, rank=8),
    Column("MEMORY", _memory, right=True, rank=15),
    Column("J/ITEM", _number("joules_per_item", ".3g"), right=True, rank=14),
    Column("COSINE", _number("cosine", ".6f"), right=True, rank=4),
    Column("TOP-1", _number("top1", ".1%"), right=True, rank=5),
)


def to_csv(rows: Sequence[Row]) -> bytes:
    """All results, one line a row under a heading; unknown values are empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return out.getvalue().encode()
