"""Histograms of task durations."""

from multigpu.daemon.metrics import Histogram
from multigpu_master.core.model import Outcome, OutcomeState, Task
from multigpu_master.core.spec import Spec
from multigpu_master.telemetry.latencies import Latencies


def test_a_run_time_is_counted_unless_the_start_is_unknown() -> None:
    latencies = Latencies()
    for start_s in (0.0, 100.0, 101.0):
        task = Task(Spec(kind="k"), "", b"", submit_s=40.0)
        task.outcome = Outcome(OutcomeState.SUCCEEDED, 103.0, dispatch_s=start_s, start_s=start_s)
        latencies.observe([task])
    counted = {each.name: each.samples[0].value for each in latencies.metrics()}
    run, duration = counted["mgpu_task_run_seconds"], counted["mgpu_task_duration_seconds"]
    assert isinstance(run, Histogram)
    assert isinstance(duration, Histogram)
    assert (sum(run.counts), run.total) == (2, 5.0)
    assert sum(duration.counts) == 3
