"""The results of `mgpuctl bench`: rows, their numbers, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multigpu.cli.tables import Column

UNKNOWN = "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A batch size with a number of callers. None: unknown, or not measured."""

    kind: str
    # Empty if the kind needs none.
    model: str
    # Items in a task.
    batch_size: int
    # Tasks under way at the same time.
    concurrency: int
    tasks: int = 0
    items: int = 0
    items_per_s: float | None = None
    tokens_per_s: float | None = None
    joules_per_item: float | None = None
    # Of the baseline.
    plain_items_per_s: float | None = None
    # Why there is no baseline.
    plain_error: str = ""
    # The median over the rounds of items/s divided by the baseline's in the same round.
    ratio: float | None = None
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
    def cell(row: Row) -> str:
        value = getattr(row, field)
        return UNKNOWN if value is None else format(value, form)

    return cell


COLUMNS = (
    Column("MODEL", lambda row: row.model or row.kind),
    Column("BATCH", lambda row: str(row.batch_size), right=True),
    Column("CALLERS", lambda row: str(row.concurrency), right=True),
    Column("ITEMS/S", lambda row: rate_text(row.items_per_s), right=True),
    Column("TOKENS/S", _number("tokens_per_s", ",.0f"), right=True, rank=9),
    Column("VS PLAIN", lambda row: ratio_text(row.ratio), right=True),
    Column("MIN MS", _number("min_latency_ms", ".1f"), right=True, rank=13),
    Column("MEAN", _number("mean_latency_ms", ".1f"), right=True, rank=12),
    Column("P50", _number("p50_latency_ms", ".1f"), right=True, rank=3),
    Column("P95", _number("p95_latency_ms", ".1f"), right=True, rank=11),
    Column("P99", _number("p99_latency_ms", ".1f"), right=True, rank=7),
    Column("MAX", _number("max_latency_ms", ".1f"), right=True, rank=10),
    Column("J/ITEM", _number("joules_per_item", ".3g"), right=True, rank=14),
)
