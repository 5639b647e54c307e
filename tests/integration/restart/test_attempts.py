"""Attempts: handlers that misbehave, retries with backoff, deadlines, timeouts."""

import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2

from tests.fleet import Fleet, until

FLEET = {
    "handlers": ["trial_handlers"],
    "worker_flags": ["--engine-memory-bytes", "600MiB", "--slots", "2", "--result-bytes-max", "1MiB"],
}

SUCCEEDED = task_pb2.OUTCOME_STATE_SUCCEEDED
FAILED = task_pb2.OUTCOME_STATE_FAILED
EXPIRED = task_pb2.OUTCOME_STATE_EXPIRED
DEAD_LETTERED = task_pb2.OUTCOME_STATE_DEAD_LETTERED
SOON = Duration(nanos=20_000_000)


def from_now(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(time.time_ns() + int(seconds * 1e9))
    return stamp


@pytest.mark.parametrize(
    ("kind", "spec", "state", "error", "words"),
    [
        ("trial.raise", {}, DEAD_LETTERED, "LookupError", "not there: x"),
        ("trial.wrong_type", {}, FAILED, "WrongResultType", "which can't be sent"),
        ("trial.exit", {}, DEAD_LETTERED, "EngineDied", "7"),
        ("trial.hang", {"run_timeout": Duration(nanos=300_000_000)}, DEAD_LETTERED, "RunTimeout", "0.3"),
        ("trial.hoard", {}, DEAD_LETTERED, "OutOfMemory", "engine_memory_bytes"),
        ("trial.big", {"parameters": {"bytes": str(2 << 20)}}, FAILED, "ResultTooLarge", "result_bytes_max"),
        ("fail", {"parameters": {"mode": "segfault"}}, DEAD_LETTERED, "EngineDied", "SIGSEGV"),
    ],
)
def test_a_handler_that_misbehaves_harms_only_its_own_task(
    fleet: Fleet, kind: str, spec: dict[str, Any], state: int, error: str, words: str
) -> None:
    pids = {name: worker.pid for name, worker in fleet.workers.items()}
    neighbours = fleet.submit("trial.nap", *(b"%d" % n for n in range(4)), parameters={"seconds": "0.05"})
    (task_id,) = fleet.submit(kind, b"x", attempts_max=2, backoff_initial=SOON, **spec)
    outcome = fleet.outcome(task_id)
    assert (outcome.state, outcome.error.type) == (state, error), outcome
    assert words in outcome.error.message
    assert outcome.attempts == (1 if state == FAILED else 2)
    assert not outcome.result
    if kind == "trial.raise":
        assert "trial_handlers.py" in outcome.error.traceback
    for n, neighbour in enumerate(neighbours):
        assert fleet.outcome(neighbour).result == b"%d" % n
    assert {name: worker.pid for name, worker in fleet.workers.items() if worker.alive} == pids


def test_a_handler_that_forks_answers_once(fleet: Fleet) -> None:
    ids = fleet.submit("trial.fork", *(b"" for _ in range(5)))
    assert {fleet.outcome(i).result for i in ids} == {b"parent"}


def test_retries_wait_longer_each_time_and_get_the_checkpoint(fleet: Fleet) -> None:
    backoff = Duration(nanos=300_000_000)
    began = time.monotonic()
    (task_id,) = fleet.submit("trial.third_time", b"", backoff_initial=backoff)

    def between() -> Any:
        task = fleet.get(task_id)
        return task if task.HasField("not_before") else None

    waiting = until(between)
    assert (waiting.state, waiting.last_error.message) == (task_pb2.TASK_STATE_QUEUED, "attempt 1 fails")
    assert "more before attempt 2" in fleet.admin.Explain(admin_pb.ExplainRequest(task_id=task_id), timeout=30).summary
    outcome = fleet.outcome(task_id)
    assert (outcome.state, outcome.attempts, outcome.result) == (SUCCEEDED, 3, b"attempt 2")
    # 0.3 s, then 0.6 s, each less up to half.
    assert time.monotonic() - began >= 0.45


def test_backoff_has_a_limit(fleet: Fleet) -> None:
    began = time.monotonic()
    (task_id,) = fleet.submit("trial.raise", b"", attempts_max=14, backoff_initial=SOON, backoff_max=SOON)
    assert fleet.outcome(task_id).attempts == 14
    assert time.monotonic() - began < 30  # without one it would be a minute at least


def test_a_deadline_ends_a_task_wherever_it_is(fleet: Fleet, tmp_path: Path) -> None:
    never = str(tmp_path / "never").encode()
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="late"), timeout=30)
    (queued,) = fleet.submit("echo", b"x", queue="late", deadline=from_now(0.5))
    (running,) = fleet.submit("trial.gate", never, deadline=from_now(1.5))
    until(lambda: fleet.get(running).state == task_pb2.TASK_STATE_LEASED)
    for task_id, attempts in ((queued, 0), (running, 1)):
        outcome = fleet.outcome(task_id)
        assert (outcome.state, outcome.error.type, outcome.attempts) == (EXPIRED, "DeadlineExceeded", attempts)
    # The lease was revoked on the worker, which is free again.
    until(lambda: fleet.stats().leased == 0)
    until(lambda: all(w.leases == 0 for w in fleet.list_workers()))


def test_what_waits_in_a_worker(fleet: Fleet, tmp_path: Path) -> None:
    """Behind others, in the worker itself: what is past its deadline never begins, and the urgent go first."""
    gate, log = tmp_path / "gate", tmp_path / "log"
    logged: dict[str, Any] = {"parameters": {"log": str(log), "seconds": "0.01"}}
    fleet.admin.CordonWorker(admin_pb.CordonWorkerRequest(worker_id="w1"), timeout=30)
    try:
        # A worker that is fast is given more than its engine can take.
        for task_id in fleet.submit("echo", *([b"x"] * 2000)):
            fleet.outcome(task_id)
        # More than fit in an engine of two slots.
        running = fleet.submit("trial.gate", *([str(gate).encode()] * 6))
        until(lambda: fleet.stats().leased == 6)
        (late,) = fleet.submit("trial.logged", b"late", deadline=from_now(1), **logged)
        patient = fleet.submit("trial.logged", *([b"patient"] * 5), priority=5, **logged)
        (urgent,) = fleet.submit("trial.logged", b"urgent", priority=1, **logged)
        until(lambda: fleet.stats().leased == 13)
        outcome = fleet.outcome(late)
        assert (outcome.state, outcome.error.type, outcome.attempts) == (EXPIRED, "DeadlineExceeded", 1)
        gate.touch()
        assert all(fleet.outcome(i).state == SUCCEEDED for i in (*running, *patient, urgent))
    finally:
        fleet.admin.UncordonWorker(admin_pb.UncordonWorkerRequest(worker_id="w1"), timeout=30)
    began = [line.rsplit(" ", 1)[1] for line in log.read_text().splitlines()]
    assert sorted(began) == [*["patient"] * 5, "urgent"]
    # Two run at a time: neighbours may swap.
    assert began.index("urgent") <= 1


def test_queue_timeout_counts_until_the_first_dispatch_only(fleet: Fleet) -> None:
    half_a_second = Duration(nanos=500_000_000)
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="late"), timeout=30)
    (waits,) = fleet.submit("echo", b"x", queue="late", queue_timeout=half_a_second)
    (runs,) = fleet.submit("trial.nap", b"x", parameters={"seconds": "1"}, queue_timeout=half_a_second)
    outcome = fleet.outcome(waits)
    assert (outcome.state, outcome.error.type, outcome.attempts) == (EXPIRED, "QueueTimeout", 0)
    assert fleet.outcome(runs).state == SUCCEEDED


def test_an_attempt_whose_engine_was_ended_says_how_long_it_ran(fleet: Fleet) -> None:
    (task_id,) = fleet.submit("trial.hang", b"", run_timeout=Duration(nanos=300_000_000), attempts_max=1)
    stages = fleet.outcome(task_id).stages
    ran_s = stages.finish_time.ToNanoseconds() / 1e9 - stages.start_time.ToNanoseconds() / 1e9
    assert ran_s >= 0.3
    assert stages.dispatch_time.ToNanoseconds() <= stages.start_time.ToNanoseconds()
