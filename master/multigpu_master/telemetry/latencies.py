"""Histograms of waiting, running and total time of succeeded tasks, by kind. Kept only while metrics are collected."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from multigpu.daemon.metrics import Histogram, Metric, sample

from multigpu_master.core.model import OutcomeState, Task

# Upper bounds in seconds: three a decade.
BOUNDS = tuple(float(f"{step}e{power}") for power in range(-3, 4) for step in (1, 2.5, 5))
# Limit of the kinds that are counted separately. The others are counted together, as the kind "other".
KINDS_MAX = 100
MEASURES = (
    ("mgpu_task_queue_seconds", "From the submit of a task to its last dispatch."),
    ("mgpu_task_run_seconds", "From the start of the last attempt of a task on its engine to its end."),
    ("mgpu_task_duration_seconds", "From the submit of a task to its outcome."),
)


class _Counts:
    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total_s += seconds


class Latencies:
    """The histograms since the master started."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[_Counts, ...]] = {}

    def observe(self, tasks: Sequence[Task]) -> None:
        """Counts the settled tasks that succeeded, and ignores the others."""
        for task in tasks:
            outcome = task.outcome
            if outcome is None or outcome.state is not OutcomeState.SUCCEEDED:
                continue
            queue, run, duration = self._counts_of(task.spec.kind)
            queue.add(max(0.0, outcome.dispatch_s - task.submit_s))
            duration.add(max(0.0, outcome.finish_s - task.submit_s))
            if outcome.start_s:  # 0: unknown
                run.add(max(0.0, outcome.finish_s - outcome.start_s))

    def _counts_of(self, kind: str) -> tuple[_Counts, ...]:
        found = self._kinds.get(kind)
        if found is None:
            name = kind if len(self._kinds) < KINDS_MAX else "other"
            found = self._kinds.setdefault(name, tuple(_Counts() for _ in MEASURES))
        return found

    def metrics(self) -> Iterator[Metric]:
        for index, (name, text) in enumerate(MEASURES):
            samples = [
                sample(Histogram(BOUNDS, tuple(each[index].counts), each[index].total_s), kind=kind)
                for kind, each in self._kinds.items()
            ]
            yield Metric(name, f"{text} Of tasks that succeeded.", samples, "histogram", unit="s")
