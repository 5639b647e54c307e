"""The plot of `mgpuctl bench`: items a second and latency by callers, a line for each batch size."""

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from multigpu.cli.bench.rows import Row
from multigpu.cli.failures import WrongUsage


def require() -> None:
    """Raises WrongUsage if nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise WrongUsage("--plot needs matplotlib: pip install 'multigpu[plot]'")


def plot(rows: Sequence[Row]) -> bytes:
    """A PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra, and slow to import)

    lines: dict[int, list[Row]] = {}
    for row in rows:
        lines.setdefault(row.batch_size, []).append(row)
    # Not pyplot: it needs a display.
    figure = Figure(figsize=(11, 5), layout="constrained")
    rates, times = figure.subplots(1, 2)
    counts = sorted({row.concurrency for row in rows})
    for points in lines.values():
        _draw(rates, times, sorted(points, key=lambda row: row.concurrency))
    for axes, title in ((rates, "items / s"), (times, "latency of a task, ms: p50, and to p99")):
        axes.set(xlabel="callers", title=title, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
    rates.legend(fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()


def _draw(rates: Any, times: Any, points: list[Row]) -> None:
    callers = [row.concurrency for row in points]
    label = f"{points[0].model or points[0].kind}, batches of {points[0].batch_size}"
    (line,) = rates.plot(callers, [row.items_per_s for row in points], marker="o", label=label)
    plain = [row.plain_items_per_s for row in points]
    if None not in plain:
        # One entry in the legend for all of them.
        label = "" if "baseline" in rates.get_legend_handles_labels()[1] else "baseline"
        rates.plot(callers, plain, linestyle=":", marker="x", color=line.get_color(), label=label)
    p50 = [row.p50_latency_ms for row in points]
    times.plot(callers, p50, marker="o", color=line.get_color())
    times.fill_between(callers, p50, [row.p99_latency_ms for row in points], color=line.get_color(), alpha=0.15)
