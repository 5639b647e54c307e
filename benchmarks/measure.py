"""Clocks and summaries for all benchmarks."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, all its threads (the scheduler's own counters, in nanoseconds)."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def children(pid: int) -> list[int]:
    """The processes that this one started and that live."""
    return [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no VmRSS")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def payloads(n: int, size: int = 100) -> list[bytes]:
    """n different payloads of this size."""
    return [b"%012d" % i + b"x" * (size - 12) for i in range(n)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return ""
    keys = list(dict.fromkeys(k for r in rows for k in r))
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    lines += ["| " + " | ".join(str(r.get(k, "")) for k in keys) + " |" for r in rows]
    return "\n".join(lines)
