"""Daemons that stop, die and return: what is announced, kept, taken back and charged."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import QUICK, Fleet, until
from tests.integration.restart.test_restart import worker_of
from tests.integration.streams import Feed

FLEET = {"handlers": ["trial_handlers"]}
SERVING = health_pb2.HealthCheckResponse.SERVING


def test_sigterm_ends_the_daemons_with_0_in_bounded_time(tmp_path: Path) -> None:
    with Fleet(tmp_path, workers=1, handlers=["trial_handlers"]) as fleet:
        streams = [fleet.tasks.Run(Feed(), timeout=60), fleet.tasks.Watch(task_service_pb2.WatchRequest(), timeout=60)]
        next(streams[1])
        fleet.submit("trial.hang", b"")
        until(lambda: fleet.worker("w0").leases == 1)
        began = time.monotonic()
        assert fleet.master.stop(30) == 0
        assert time.monotonic() - began < 15  # the calls would go on for 60
        fleet.start_master()
        fleet.wait_for_workers()
        began = time.monotonic()
        # Two seconds to drain (--drain-timeout-s), for a task that never ends.
        assert fleet.workers["w0"].stop(30) == 0
        assert time.monotonic() - began < 20
        assert not fleet.faults()


def test_a_second_process_with_a_workers_id_is_rejected_until_the_first_is_gone(fleet: Fleet, tmp_path: Path) -> None:
    """The first one and the task that it runs are not affected. Both logs say why."""
    gate = tmp_path / "gate"
    (task_id,) = fleet.submit("trial.gate", str(gate).encode())
    worker = until(lambda: fleet.get(task_id).worker_id)
    first = fleet.workers[worker]
    second = fleet.start_worker(worker)
    try:
        until(lambda: "another process has a session as worker" in second.log(), 60)
        assert any(event["worker_id"] == worker for event in fleet.master.events("worker rejected"))
        gate.touch()
        outcome = fleet.outcome(task_id)
        assert (outcome.result, outcome.attempts, outcome.worker_id) == (b"opened", 1, worker)
        assert first.alive
    finally:
        first.kill()
    until(lambda: second.events("session begins"), 30)
    fleet.wait_for_workers()


def test_a_master_that_stops_says_so_first(fleet: Fleet) -> None:
    watch = fleet.health.Watch(health_pb2.HealthCheckRequest(service="master"), timeout=20)
    assert next(watch).status == SERVING
    fleet.master.signal(signal.SIGTERM)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()
    assert fleet.master.process.wait(60) == 0
    fleet.start_master()
    # The awaited workers are reported until they reconnect.
    assert fleet.check_health("worker/w0") in (health_pb2.HealthCheckResponse.NOT_SERVING, SERVING)
    fleet.wait_for_workers()
    until(lambda: fleet.check_health("worker/w0") == SERVING)


def test_rules_and_cordons_survive_a_death_of_the_master(fleet: Fleet) -> None:
    admin = fleet.admin
    admin.CordonWorker(admin_pb.CordonWorkerRequest(worker_id="w0", reason="a look inside"), timeout=30)
    admin.SetStrategy(admin_pb.SetStrategyRequest(strategy="round_robin"), timeout=30)
    admin.SetStrategy(admin_pb.SetStrategyRequest(strategy="utilization", queue="own"), timeout=30)
    admin.PauseQueue(admin_pb.PauseQueueRequest(queue="paused"), timeout=30)
    limits = admin_pb.QueueLimits(tasks_max=3, bytes_max=1000)
    admin.SetQueueLimits(admin_pb.SetQueueLimitsRequest(queue="limited", limits=limits), timeout=30)
    try:
        fleet.restart_master()
        fleet.wait_for_workers()
        assert fleet.worker("w0").cordoned
        assert not fleet.worker("w1").cordoned
        assert admin.GetStrategy(admin_pb.GetStrategyRequest(), timeout=30).strategy == "round_robin"
        own = admin.GetStrategy(admin_pb.GetStrategyRequest(queue="own"), timeout=30)
        assert (own.strategy, own.inherited) == ("compute_load", False)
        queues = {q.queue: q for q in admin.ListQueues(admin_pb.ListQueuesRequest(), timeout=30).queues}
        assert queues["paused"].paused
        assert queues["limited"].limits == limits
        # The settings are not only reported but applied.
        ids = fleet.submit("echo", *(b"x" for _ in range(20)))
        assert {fleet.outcome(i).worker_id for i in ids} == {"w1"}
        (held,) = fleet.submit("echo", b"x", queue="paused")
        assert fleet.get(held, 0.3).state == task_pb2.TASK_STATE_QUEUED
    finally:
        admin.UncordonWorker(admin_pb.UncordonWorkerRequest(worker_id="w0"), timeout=30)
        admin.SetStrategy(admin_pb.SetStrategyRequest(strategy="auto"), timeout=30)
        admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue="paused"), timeout=30)
    assert fleet.outcome(held).result == b"x"


def test_a_killed_worker_is_lost_at_once_and_not_only_when_it_has_been_silent(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    patient = ["--session-timeout-s", "60"]
    with Fleet(tmp_path / "fleet", handlers=["trial_handlers"], master_flags=patient) as fleet:
        (task_id,) = fleet.submit("trial.gate", str(gate).encode(), request_ids=["moves"])
        first = worker_of(fleet, "moves")
        fleet.workers[first].kill()
        (other,) = {"w0", "w1"} - {first}
        until(lambda: fleet.get(task_id).worker_id == other)
        assert fleet.worker(first).state == admin_pb.WORKER_STATE_LOST
        gate.touch()
        assert fleet.outcome(task_id).worker_id == other


@pytest.mark.slow
def test_a_task_that_kills_its_workers_becomes_a_dead_letter_and_the_innocent_succeed(fleet: Fleet) -> None:
    spec: dict[str, Any] = {"backoff_initial": Duration(nanos=20_000_000)}
    (killer,) = fleet.submit("trial.kill_worker", b"", **spec)
    innocent = fleet.submit("trial.nap", *(b"%d" % n for n in range(100)), parameters={"seconds": "0.02"}, **spec)

    def mend() -> None:
        for name, worker in list(fleet.workers.items()):
            if not worker.alive:
                fleet.start_worker(name)

    def ended() -> bool:
        mend()
        return bool(fleet.get(killer).state == task_pb2.TASK_STATE_SETTLED)

    until(ended, 60)
    outcome = fleet.outcome(killer)
    assert (outcome.state, outcome.error.type) == (task_pb2.OUTCOME_STATE_DEAD_LETTERED, "WorkerLost")
    assert outcome.attempts == 3
    mend()
    assert all(fleet.outcome(i).state == task_pb2.OUTCOME_STATE_SUCCEEDED for i in innocent)
    fleet.wait_for_workers()


def test_a_stopping_worker_finishes_or_returns_leases_and_none_is_charged(fleet: Fleet) -> None:
    before = {w.worker_id: w.succeeded for w in fleet.list_workers()}
    ids = fleet.submit("trial.nap", *(b"%d" % n for n in range(60)), parameters={"seconds": "0.05"})
    until(lambda: all(w.leases and w.succeeded > before[w.worker_id] for w in fleet.list_workers()))
    assert fleet.workers["w0"].stop(60) == 0
    outcomes = [fleet.outcome(i) for i in ids]
    assert [o.result for o in outcomes] == [(b"%d" % n)[::-1] for n in range(60)]
    assert {o.attempts for o in outcomes} == {1}
    assert {o.worker_id for o in outcomes} == {"w0", "w1"}
    fleet.start_worker("w0")
    fleet.wait_for_workers()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet that loses who is silent for a second."""
    with Fleet(tmp_path_factory.mktemp("quick"), handlers=["trial_handlers"], master_flags=QUICK) as running:
        yield running
        assert not running.faults()


def test_a_master_that_was_paused_blames_no_worker(quick: Fleet) -> None:
    """After a pause (a suspended host, a debugger) the master reads pending heartbeats before it checks for silence."""
    fleet = quick
    requeued = fleet.stats().requeued
    ids = fleet.submit("trial.nap", *(b"%d" % n for n in range(60)), parameters={"seconds": "0.1"})
    until(lambda: all(w.leases for w in fleet.list_workers()))
    fleet.master.signal(signal.SIGSTOP)
    time.sleep(2.2)  # the session timeout is 1 s
    fleet.master.signal(signal.SIGCONT)
    outcomes = [fleet.outcome(i) for i in ids]
    assert {(o.state, o.attempts) for o in outcomes} == {(task_pb2.OUTCOME_STATE_SUCCEEDED, 1)}
    assert fleet.stats().requeued == requeued


@pytest.mark.slow
def test_a_worker_that_was_away_for_a_while_is_taken_back(quick: Fleet, tmp_path: Path) -> None:
    """It was given up for lost and its task moved; when it comes back its word about that task no longer counts."""
    fleet = quick
    gate = tmp_path / "gate"
    (task_id,) = fleet.submit("trial.gate", str(gate).encode(), request_ids=["away"])
    first = worker_of(fleet, "away")
    (other,) = {"w0", "w1"} - {first}
    fleet.workers[first].signal(signal.SIGSTOP)
    until(lambda: fleet.get(task_id).worker_id == other)
    gate.touch()  # both engines go on, and both finish
    outcome = fleet.outcome(task_id)
    assert (outcome.worker_id, outcome.result) == (other, b"opened")
    fleet.workers[first].signal(signal.SIGCONT)
    until(lambda: fleet.worker(first).state == admin_pb.WORKER_STATE_ACTIVE)
    assert fleet.get(task_id).outcome == outcome
    ids = fleet.submit("echo", *(b"x" for _ in range(40)))
    assert {fleet.outcome(i).state for i in ids} == {task_pb2.OUTCOME_STATE_SUCCEEDED}
