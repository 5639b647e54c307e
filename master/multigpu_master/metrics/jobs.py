"""Metrics of training jobs that run: `mgpu_job_*`, from what their scripts report (multigpu.train)."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice

from multigpu._kinds.training import KIND
from multigpu.daemon.metrics import Metric, metric, sample

from multigpu_master.core.model import Lease, Task, Worker

# How many of a job's newest events are searched for metrics. Most events have metrics.
EVENTS_READ = 16
FLOAT_END = 1 << 1023  # float() of a smaller integer does not overflow


def running_jobs(workers: Iterable[Worker]) -> list[Lease]:
    """Returns a lease of each running job: that of rank 0. A worker runs its oldest leases first."""
    oldest = (lease for worker in workers for lease in islice(worker.leases.values(), worker.usable_slots))
    return [lease for lease in oldest if lease.task.spec.kind == KIND and lease.rank == 0]


def job_metrics(leases: list[Lease]) -> Iterator[Metric]:
    text = "Share of a training job that is done, as its script has reported it."
    yield metric("mgpu_job_fraction_done", text, *[sample(x.fraction, job=x.task.request_id) for x in leases])
    text = "Ranks of a training job that runs."
    ranks = [sample(len(x.gang.leases) if x.gang is not None else 1, job=x.task.request_id) for x in leases]
    yield metric("mgpu_job_ranks", text, *ranks)
    values = [
        sample(value, job=lease.task.request_id, metric=name)
        for lease in leases
        for name, value in last_report(lease.task).items()
    ]
    yield metric("mgpu_job_metric", "Metrics of a training job, as its script has last reported them.", *values)


def last_report(task: Task) -> dict[str, float]:
    """Returns the numeric metrics of the last reported step, and the step itself. Their names are valid Unicode, as
    Prometheus and OTLP require.
    """
    partials = task.extra.partials if task.extra is not None else []
    found: dict[str, object] = {}
    for data in islice(reversed(partials), EVENTS_READ):
        match _event(data):
            case {"metrics": dict(metrics), "step": step} if not found or found["step"] == step:
                found = {**metrics, **found, "step": step}
    return {
        name.encode(errors="replace").decode(): float(value)
        for name, value in found.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) < FLOAT_END)
    }


def _event(data: bytes) -> object:
    """Returns the parsed event, or None if the data is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
