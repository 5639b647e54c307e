"""What a gateway counts of each model's requests, since it started."""

import time
from dataclasses import dataclass
from datetime import datetime

from multigpu.outcome import Outcome

from multigpu_gateway.kserve import open_inference_pb2 as pb


@dataclass(slots=True)
class Duration:
    """How often something happened, and how long it took altogether."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += max(0, ns)

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


class Counted:
    """Of one model."""

    def __init__(self) -> None:
        self.examples = 0
        self.last_ms = 0
        self.durations = {name: Duration() for name in ("success", "fail", "queue", "compute_infer")}

    def add(self, outcome: Outcome, examples: int, ns: int) -> None:
        """A request ended. `ns`: how long it took here, in nanoseconds."""
        self.last_ms = time.time_ns() // 1_000_000
        self.durations["success" if outcome.succeeded else "fail"].add(ns)
        if not outcome.succeeded:
            return
        self.examples += examples
        for name, begin, end in (
            ("queue", outcome.submit_time, outcome.start_time),
            ("compute_infer", outcome.start_time, outcome.finish_time),
        ):
            if begin is not None and end is not None:
                self.durations[name].add(_ns(begin, end))

    def fill(self, message: pb.ModelStatistics) -> None:
        """Adds these counts to those of a message."""
        message.last_inference = max(message.last_inference, self.last_ms)
        message.inference_count += self.examples
        message.execution_count += self.durations["success"].count
        for name, duration in self.durations.items():
            total = getattr(message.inference_stats, name)
            total.count += duration.count
            total.ns += duration.ns


def _ns(begin: datetime, end: datetime) -> int:
    return int((end - begin).total_seconds() * 1e9)


class Statistics:
    """By name and version as requests gave them."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], Counted] = {}

    def add(self, name: str, version: str, outcome: Outcome, examples: int, ns: int) -> None:
        """See Counted.add. Only of tasks that a worker ran: else callers could fill the memory with names."""
        if outcome.start_time is not None:
            self._counted.setdefault((name, version), Counted()).add(outcome, examples, ns)

    def of(self, name: str, version: str, *, current: bool) -> pb.ModelStatistics:
        """Of a version. `current`: requests without a version were for it."""
        message = pb.ModelStatistics(name=name, version=version)
        message.inference_stats.SetInParent()
        for key in {(name, version), (name, "")} if current else {(name, version)}:
            if key in self._counted:
                self._counted[key].fill(message)
        return message
