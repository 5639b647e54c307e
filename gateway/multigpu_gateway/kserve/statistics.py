"""What a gateway counts of each model's requests, since it started."""

import time
from collections.abc import Iterator
from datetime import datetime

from multigpu.outcome import Outcome

from multigpu_gateway.kserve import open_inference_pb2 as pb

DURATIONS = ("success", "fail", "queue", "compute_infer")


class Statistics:
    """By name and version as requests gave them."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], pb.ModelStatistics] = {}

    def __iter__(self) -> Iterator[pb.ModelStatistics]:
        return iter(self._counted.values())

    def add(self, name: str, version: str, outcome: Outcome, examples: int, ns: int) -> None:
        """A request ended that took `ns` nanoseconds here. Only tasks that a worker ran are counted: else callers could
        fill the memory with names.
        """
        if outcome.start_time is None:
            return
        counted = self._counted.setdefault((name, version), pb.ModelStatistics(name=name, version=version))
        counted.last_inference = time.time_ns() // 1_000_000
        stats = counted.inference_stats
        if not outcome.succeeded:
            _add(stats.fail, ns)
            return
        counted.inference_count += examples
        counted.execution_count += 1
        _add(stats.success, ns)
        _add(stats.queue, _ns(outcome.submit_time, outcome.start_time))
        _add(stats.compute_infer, _ns(outcome.start_time, outcome.finish_time))

    def of(self, name: str, version: str, *, current: bool) -> pb.ModelStatistics:
        """Of a version. `current`: requests without a version were for it."""
        total = pb.ModelStatistics(name=name, version=version)
        total.inference_stats.SetInParent()
        for key in {(name, version), (name, "")} if current else {(name, version)}:
            if (each := self._counted.get(key)) is None:
                continue
            total.last_inference = max(total.last_inference, each.last_inference)
            total.inference_count += each.inference_count
            total.execution_count += each.execution_count
            for duration in DURATIONS:
                more = getattr(each.inference_stats, duration)
                _add(getattr(total.inference_stats, duration), more.ns, more.count)
        return total


def _add(duration: pb.StatisticDuration, ns: int, count: int = 1) -> None:
    duration.count += count
    duration.ns += ns


def _ns(begin: datetime | None, end: datetime | None) -> int:
    """Between two times; 0: one is not known, or a host's clock differs."""
    return max(0, int((end - begin).total_seconds() * 1e9)) if begin and end else 0
