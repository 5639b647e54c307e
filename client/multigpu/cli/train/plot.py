"""The plot of `mgpuctl train metrics`: each metric by step."""

import io
import itertools
from typing import Any

from multigpu.cli.failures import Failure


def plot(name: str, reports: list[dict[str, Any]]) -> bytes:
    """A PNG with a diagram for each metric."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra, and slow to import)

    names = list(dict.fromkeys(itertools.chain.from_iterable(report["metrics"] for report in reports)))
    if not names:
        raise Failure(f"{name} has reported no metrics: there is nothing to draw")
    figure = Figure(figsize=(8, 3 * len(names)), layout="constrained")
    for axes, metric in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
        points = [(index if r["step"] is None else r["step"], r["metrics"][metric]) for index, r in enumerate(reports)
                  if isinstance(r["metrics"].get(metric), float)]  # fmt: skip
        axes.plot([x for x, _ in points], [y for _, y in points])
        axes.set(xlabel="step", title=metric)
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(name)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()
