"""What the events of a training job say of it, for the command line and the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from multigpu._kinds.training import Job, read_job


@dataclass(slots=True)
class History:
    """`metrics`: as reported, in order, with the number of the attempt as `attempt`; a step that ran again is there
    twice.
    """

    attempts: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: dict[str, Any] | None = None
    # What a job that fine-tunes has made.
    finetuned: dict[str, Any] | None = None
    device_seconds: float = 0.0
    _last_s: float = 0.0  # of the attempt's events

    @classmethod
    def of(cls, partials: Iterable[bytes]) -> Self:
        found = cls()
        for data in partials:
            found.add(json.loads(data))
        return found

    @property
    def job(self) -> Job | None:
        """None: the job has not begun."""
        return read_job(self.attempts[-1]["job"]) if self.attempts else None

    @property
    def device_hours(self) -> float:
        """Of all attempts and ranks, each until its last event."""
        return self.device_seconds / 3600

    def add(self, event: dict[str, Any]) -> None:
        time_s = event.get("time", 0.0)
        if "job" in event:
            self.attempts.append(event)
        else:
            if self.attempts:
                self.device_seconds += self.attempts[-1]["world_size"] * max(0.0, time_s - self._last_s)
            if "metrics" in event:
                self.metrics.append(event | {"attempt": len(self.attempts)})
            elif "checkpoint" in event:
                self.checkpoint = event["checkpoint"]
            elif "finetuned" in event:
                self.finetuned = event["finetuned"]
        self._last_s = time_s


def by_step(past: History) -> list[dict[str, Any]]:
    """The reports in the order of steps. Those of one step are one; of a step that ran again, the last attempt's."""
    unnumbered = [report for report in past.metrics if report["step"] is None]
    numbered: dict[int, dict[str, Any]] = {}
    for report in past.metrics:
        if (step := report["step"]) is not None:
            before = numbered.get(step)
            earlier = before["metrics"] if before is not None and before["attempt"] == report["attempt"] else {}
            numbered[step] = report | {"metrics": earlier | report["metrics"]}
    return unnumbered + [numbered[step] for step in sorted(numbered)]
