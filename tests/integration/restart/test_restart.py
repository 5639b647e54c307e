"""Master, worker and engine are killed and restarted: no outcome is lost or repeated, and streams resume."""

import os
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import multigpu
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu_master.core.ledger import TIMER_LATE_S

from tests.fleet import Fleet, rejected, until
from tests.integration.streams import Feed, collect, run_frame

FLEET = {"handlers": ["trial_handlers"]}

PARTS = [b"p-%d" % n for n in range(12)]


def watch(fleet: Fleet, cursor: str, count: int, **options: Any) -> tuple[list[Any], str]:
    """Reads `count` outcomes after a cursor. Returns them and the cursor after them."""
    call = fleet.tasks.Watch(task_service_pb2.WatchRequest(cursor=cursor, **options), timeout=20, wait_for_ready=True)
    outcomes: list[Any] = []
    for frame in call:
        outcomes += frame.outcomes
        cursor = frame.cursor
        if len(outcomes) >= count:
            break
    call.cancel()
    return outcomes, cursor


def worker_of(fleet: Fleet, request_id: str) -> str:
    """The worker that runs a task."""

    def worker() -> str:
        task = fleet.tasks.Get(task_service_pb2.GetRequest(request_id=request_id), timeout=30).task
        return str(task.worker_id)

    return until(worker)


def test_a_task_of_which_get_has_told_is_not_forgotten_by_a_restart(fleet: Fleet) -> None:
    """Its write was deferred: the next master did not know the task_id that another client had."""
    with fleet.client() as first, fleet.client() as second, ThreadPoolExecutor(1) as pool:
        result = pool.submit(first.run, "trial.nap", b"abc", parameters={"seconds": "1"}, request_id="told")
        handle = until(lambda: found(second, "told"))
        fleet.restart_master()
        assert handle.result(timeout=60) == b"cba"
        assert result.result(60) == b"cba"
        assert second.handle("told").id == handle.id


def found(client: multigpu.Client, request_id: str) -> Any:
    try:
        return client.handle(request_id)
    except multigpu.NotFoundError:
        return None


def test_a_request_stays_one_task_across_a_death_of_the_master(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (running,) = fleet.submit("trial.gate", str(gate).encode(), request_ids=["runs"])
    (settled,) = fleet.submit("echo", b"first", request_ids=["settled"])
    fleet.outcome(settled)
    watch(fleet, "", 1)
    until(lambda: fleet.get(running).state == task_pb2.TASK_STATE_LEASED)
    fleet.restart_master()
    assert fleet.submit("trial.gate", str(gate).encode(), request_ids=["runs"]) == [running]
    assert fleet.submit("echo", b"first", request_ids=["settled"]) == [settled]
    assert fleet.outcome(settled).result == b"first"
    gate.touch()
    outcome = fleet.outcome(running)
    # The worker kept its lease: no second attempt was needed.
    assert (outcome.result, outcome.attempts) == (b"opened", 1)
    received = collect(fleet.tasks.Run(iter([run_frame("echo", ("settled", b"first"))]), timeout=30))
    assert [(o.task_id, o.result) for o in received.outcomes] == [(settled, b"first")]


def test_watch_from_now_omits_earlier_outcomes(fleet: Fleet) -> None:
    (before,) = fleet.submit("echo", b"before", queue="from now")
    fleet.outcome(before)
    watch(fleet, "", 1, queue="from now")
    call = fleet.tasks.Watch(task_service_pb2.WatchRequest(from_now=True, queue="from now"), timeout=20)
    assert next(call).cursor
    (after,) = fleet.submit("echo", b"after", queue="from now")
    assert next(o.task_id for frame in call for o in frame.outcomes) == after
    call.cancel()


def test_the_sdk_watches_through_a_death_of_the_master(fleet: Fleet) -> None:
    with fleet.client() as client:
        ids = fleet.submit("echo", *(b"%d" % n for n in range(5)), queue="sdk-watched")
        watching = client.watch(queue="sdk-watched")
        seen = [next(watching)[0].task_id for _ in range(5)]
        fleet.restart_master()
        ids += fleet.submit("echo", *(b"%d" % n for n in range(5)), queue="sdk-watched")
        seen += [next(watching)[0].task_id for _ in range(5)]
    assert sorted(seen) == sorted(ids)


@pytest.mark.parametrize(
    "cursor", ["junk", "w.", "w.-3", "w.x", "w.1", "w.abc.", "w.abc.x", "p.1", "w.abc.0", "w.abc.999999999999"]
)
def test_a_cursor_that_is_malformed_or_of_another_journal_is_rejected(fleet: Fleet, cursor: str) -> None:
    invalid, foreign = (grpc.StatusCode.INVALID_ARGUMENT, "cursor"), (grpc.StatusCode.OUT_OF_RANGE, "another journal")
    with rejected(*(foreign if cursor.rpartition(".")[2].isdigit() and "abc" in cursor else invalid)):
        next(fleet.tasks.Watch(task_service_pb2.WatchRequest(cursor=cursor), timeout=30))


def test_from_now_does_not_go_with_a_cursor(fleet: Fleet) -> None:
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "from_now"):
        next(fleet.tasks.Watch(task_service_pb2.WatchRequest(cursor="w.abc.1", from_now=True), timeout=30))


def test_a_cursor_whose_outcomes_are_gone_is_out_of_range_though_an_older_one_remains(tmp_path: Path) -> None:
    with Fleet(tmp_path, workers=1) as fleet:
        for task_id in fleet.submit("echo", *(b"%d" % n for n in range(6))):
            fleet.outcome(task_id)
        seen, old = watch(fleet, "", 6)
        second = old.rpartition(".")[0] + ".2"
        call = fleet.tasks.Watch(task_service_pb2.WatchRequest(), timeout=30)
        first_frame = next(call).cursor
        call.cancel()
        assert fleet.master.stop() == 0
        # Simulate expiry.
        with sqlite3.connect(fleet.data_dir / "journal.sqlite3") as journal:
            newest = "(SELECT max(cursor) FROM outcome)"
            journal.execute(f"INSERT INTO setting SELECT 'journal.removed', {newest} - 1")
            journal.execute(f"DELETE FROM outcome WHERE cursor < {newest} AND cursor > 1")
        fleet.start_master()
        for cursor in (first_frame, second):
            with rejected(grpc.StatusCode.OUT_OF_RANGE, "empty cursor"):
                next(fleet.tasks.Watch(task_service_pb2.WatchRequest(cursor=cursor), timeout=30, wait_for_ready=True))
        # The last cursor is still valid, and an empty one returns the oldest remaining outcome.
        assert [o.task_id for o in watch(fleet, "", 2)[0]] == [seen[0].task_id, seen[-1].task_id]
        (new,) = fleet.submit("echo", b"new")
        assert [o.task_id for o in watch(fleet, old, 1)[0]] == [new]


@pytest.mark.parametrize("victim", ["worker", "engine", "master"])
def test_partials_continue_after_a_kill(fleet: Fleet, victim: str) -> None:
    name = f"streamed past the death of {victim}"
    parts = []
    with fleet.client() as client:
        options: Any = {"parameters": {"count": "12", "seconds": "0.08"}, "backoff_initial_s": 0.01}
        for part in client.stream("trial.stream", b"p", request_id=name, **options):
            parts.append(part)
            if len(parts) == 3:
                worker = worker_of(fleet, name)
                if victim == "worker":
                    fleet.workers[worker].kill()
                    fleet.start_worker(worker)
                elif victim == "engine":
                    os.kill(fleet.workers[worker].children()[0], signal.SIGKILL)
                else:
                    fleet.restart_master()
        outcome = client.get(name, wait_s=10).outcome
    assert parts == PARTS
    assert outcome is not None and outcome.partials == PARTS
    assert outcome.result == b"end of p"
    fleet.wait_for_workers()


def test_partials_do_not_repeat_for_a_client_that_attaches_before_the_worker(fleet: Fleet) -> None:
    parameters = {"count": "12", "seconds": "0.05"}
    first = fleet.tasks.Run(Feed(run_frame("trial.stream", ("early", b"p"), parameters=parameters)), timeout=20)
    parts = []
    for frame in first:
        parts += [(p.index, p.data) for p in frame.partials]
        if len(parts) >= 3:
            break
    worker = fleet.workers[worker_of(fleet, "early")]
    worker.signal(signal.SIGSTOP)
    try:
        fleet.restart_master()
        again = Feed(run_frame("trial.stream", ("early", b"p"), received=len(parts), parameters=parameters))
        stream = fleet.tasks.Run(again, timeout=20, wait_for_ready=True)
        accepted = next(stream)  # the client is attached before the worker reconnects
        assert [a.request_id for a in accepted.accepted] == ["early"]
    finally:
        worker.signal(signal.SIGCONT)
    again.close()
    received = collect(stream)
    parts += [(p.index, p.data) for p in received.partials]
    assert parts == list(enumerate(PARTS))
    assert list(received.outcomes[0].partials) == PARTS
    fleet.wait_for_workers()


def test_a_result_in_time_counts_although_the_deadline_passes_while_the_master_is_suspended(
    fleet: Fleet, tmp_path: Path
) -> None:
    gate, deadline = tmp_path / "gate", Timestamp()
    deadline.FromDatetime(datetime.now(UTC) + timedelta(seconds=6))
    (task,) = fleet.submit("trial.gate", str(gate).encode(), deadline=deadline)
    until(lambda: fleet.get(task).state == task_pb2.TASK_STATE_LEASED)
    fleet.master.signal(signal.SIGSTOP)
    try:
        gate.touch()
        time.sleep(deadline.ToNanoseconds() / 1e9 + TIMER_LATE_S + 0.5 - time.time())
    finally:
        fleet.master.signal(signal.SIGCONT)
    assert fleet.outcome(task).result == b"opened"


def test_a_cancel_that_was_answered_survives_a_death_of_the_master(fleet: Fleet) -> None:
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="withdrawn"), timeout=30)
    try:
        ids = fleet.submit("echo", *(b"%d" % n for n in range(12)), queue="withdrawn")
        answer = fleet.tasks.Cancel(task_service_pb2.CancelRequest(task_ids=ids), timeout=20)
        fleet.master.kill()
        assert sorted(answer.cancelled_task_ids) == sorted(ids)
        fleet.start_master()
        assert {fleet.outcome(i, 0.1).state for i in ids} == {task_pb2.OUTCOME_STATE_CANCELLED}
    finally:
        fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue="withdrawn"), timeout=30, wait_for_ready=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "ephemeral"), [(signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGKILL, True)]
)
def test_a_restart_under_load_changes_no_result(fleet: Fleet, signum: int, ephemeral: bool) -> None:
    payloads = [b"%d" % n for n in range(600)]
    results: list[bytes] = []

    def work() -> None:
        with fleet.client() as client:
            options: Any = {"parameters": {"seconds": "0.004"}, "ephemeral": ephemeral}
            results.extend(client.map("trial.nap", payloads, max_in_flight=200, **options))

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(work)
        until(lambda: len(results) > 50)
        pids = {name: worker.pid for name, worker in fleet.workers.items()}
        fleet.master.signal(signum)
        code = fleet.master.process.wait(60)
        fleet.start_master()
        ended.result(60)
    assert results == [p[::-1] for p in payloads]
    assert code == (0 if signum == signal.SIGTERM else -signal.SIGKILL)
    assert {name: worker.pid for name, worker in fleet.workers.items() if worker.alive} == pids
    # However the last master ended, the next one waits for its workers.
    assert fleet.master.events("master ready")[0]["awaited_workers"] == 2
