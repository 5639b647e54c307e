"""The gateway's counters of each model's requests, since the gateway started."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime

from multigpu.outcome import Outcome
from prometheus_client.core import Metric, UnknownMetricFamily

from multigpu_gateway.kserve import open_inference_pb2 as pb

DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
# Triton's metrics, without the common prefix. Not of type counter: prometheus_client would append _total to the names.
_METRICS: dict[str, tuple[str, Callable[[pb.ModelStatistics], int]]] = {
    "request_success": ("Requests that succeeded.", lambda each: each.inference_stats.success.count),
    "request_failure": ("Requests that failed.", lambda each: each.inference_stats.fail.count),
    "count": ("Examples.", lambda each: each.inference_count),
    "exec_count": ("Requests that a worker ran.", lambda each: each.execution_count),
    "request_duration_us": ("Microseconds of requests.", lambda each: each.inference_stats.success.ns // 1000),
    "queue_duration_us": ("Microseconds in the queue.", lambda each: each.inference_stats.queue.ns // 1000),
    "compute_infer_duration_us": (
        "Microseconds on workers.", lambda each: each.inference_stats.compute_infer.ns // 1000
    ),
}  # fmt: skip


class Statistics:
    """Counters by the model name and version in the requests. A request without a version counts under ""."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], pb.ModelStatistics] = {}

    def collect(self) -> Iterator[Metric]:
        """Yields the counters as Triton's metrics, for prometheus_client."""
        for name, (text, value_of) in _METRICS.items():
            metric = UnknownMetricFamily(f"nv_inference_{name}", text, labels=("model", "version"))
            for each in self._counted.values():
                metric.add_metric((each.name, each.version), value_of(each))
            yield metric

    def add(self, name: str, version: str, outcome: Outcome, examples: int, ns: int) -> None:
        """Counts a request that took `ns` nanoseconds, but only if a worker ran its task: otherwise clients could fill
        the memory with names of models that do not exist.
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
        # Their time is part of compute_infer. perf_analyzer fails if the three counts differ.
        _add(stats.compute_input, 0)
        _add(stats.compute_output, 0)

    def of(self, name: str, version: str, *, current: bool) -> pb.ModelStatistics:
        """Returns the counters of a version. `current`: those of requests without a version are added."""
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
    """Returns the nanoseconds between two times; 0 if one is unknown, or if clocks differ and `end` is earlier."""
    return max(0, int((end - begin).total_seconds() * 1e9)) if begin and end else 0
