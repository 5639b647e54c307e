"""Records two spans of a sampled task when it has settled: from submit to the last dispatch, and the last attempt."""

from multigpu.daemon.telemetry import span_from

from multigpu_master.core.model import Task


def record_spans(task: Task) -> None:
    """Records the spans of a settled task with a trace context. A task that ended without a lease, even after earlier
    attempts, gets only one, from submit to its end.
    """
    outcome, extra = task.outcome, task.extra
    assert outcome is not None, "it is settled"
    assert extra is not None, "it carries a trace context"
    dispatch_s = outcome.dispatch_s or outcome.finish_s
    attributes = {"multigpu.task_id": task.task_id, "multigpu.kind": task.spec.kind, "multigpu.queue": task.spec.queue}
    span_from(extra.traceparent, "multigpu.queue", _ns(task.submit_s), _ns(dispatch_s), attributes)
    if outcome.dispatch_s:
        more = {**attributes, "multigpu.worker_id": outcome.worker_id, "multigpu.attempt": task.attempts}
        error = outcome.error.message if outcome.error is not None else ""
        span_from(extra.traceparent, "multigpu.attempt", _ns(dispatch_s), _ns(outcome.finish_s), more, error=error)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
