"""The plot of `mgpuctl bench`: items a second and latency by callers, a line for each batch size."""

import io
from collections.abc import Sequence

from multigpu.cli.bench.run import Row


def plot(rows: Sequence[Row]) -> bytes:
    """A PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra, and slow to import)

    # Not pyplot: it needs a display.
    figure = Figure(figsize=(11, 5), layout="constrained")
    rates, times = figure.subplots(1, 2)
    for batch_size in dict.fromkeys(row.batch_size for row in rows):
        points = sorted((row for row in rows if row.batch_size == batch_size), key=lambda row: row.concurrency)
        callers, p50 = [row.concurrency for row in points], [row.p50_latency_ms for row in points]
        label = f"{rows[0].model}, batches of {batch_size}"
        (line,) = rates.plot(callers, [row.items_per_s for row in points], marker="o", label=label)
        color = line.get_color()
        if plain := [row.plain_items_per_s for row in points if row.plain_items_per_s is not None]:
            rates.plot(callers, plain, linestyle=":", marker="x", color=color, label=f"baseline, {batch_size}")
        times.plot(callers, p50, marker="o", color=color)
        times.fill_between(callers, p50, [row.p99_latency_ms for row in points], color=color, alpha=0.15)
    counts = sorted({row.concurrency for row in rows})
    for axes, title in ((rates, "items / s"), (times, "latency of a task, ms: p50, and to p99")):
        axes.set(xlabel="callers", title=title, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, map(str, counts))
        axes.grid(visible=True, alpha=0.3)
    rates.legend(fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()
