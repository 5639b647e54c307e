"""Who is stopped for twice the session timeout, and wakes as if nothing had been.

An agent that was given up for lost is a zombie: its engine went on, its reports come too late. A stopped engine costs
time only. A stopped master finds its workers' words unread when it wakes, and must not take that for silence.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu.v1 import task_pb2
from multigpu.v1.admin_service_pb2 import WORKER_STATE_ACTIVE, WORKER_STATE_LOST

from tests.chaos.faults import Faults
from tests.chaos.processes import ChaosFleet
from tests.chaos.records.history import History, load
from tests.waiting import until

STOPPED_S = 2.0  # the session timeout is 1 s
LONG_S = 1.0  # that a task runs which is to be caught by it


class Stage:
    """A fleet of two, and what its history says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "history"
        self.history = History(self.folder / "chaos.jsonl")
        self.fleet = ChaosFleet(folder / "fleet", self.history, workers=2)
        self.faults = Faults(self.fleet, self.history, self.folder, seed=1, kinds=["pause"])

    def submit(self, count: int) -> list[int]:
        parameters = {"history": str(self.folder), "seconds": str(LONG_S)}
        return self.fleet.submit("chaos.work", *[b"p%d" % i for i in range(count)], parameters=parameters)

    def runs_on(self, task_id: int) -> str:
        """The worker that runs a task now, once its handler has begun."""

        def running() -> str:
            begun = any(r["task_id"] == task_id for r in load(self.folder) if r["what"] == "execution")
            task = self.fleet.get(task_id)
            return task.worker_id if begun and task.state == task_pb2.TASK_STATE_LEASED else ""

        return until(running, what="the task to run")

    def executions(self, task_id: int) -> int:
        return sum(r["what"] == "execution" and r["task_id"] == task_id for r in load(self.folder))

    def until_awake(self) -> None:
        until(self.faults.mended, 20, "the stopped one to go on")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("pauses"))
    with made.fleet:
        yield made
        assert not made.fleet.faults()


def test_an_agent_that_slept_through_its_session_is_fenced(stage: Stage) -> None:
    fleet = stage.fleet
    (task_id,) = stage.submit(1)
    zombie = stage.runs_on(task_id)
    stage.faults.stop(fleet.workers[zombie].pid, "agent", STOPPED_S)
    until(lambda: fleet.worker(zombie).state == WORKER_STATE_LOST, 10, "the master to miss it")
    stage.until_awake()
    # Its engine has finished meanwhile, and it says so.
    until(lambda: fleet.worker(zombie).state == WORKER_STATE_ACTIVE, 20, "the zombie to join again")
    outcome = fleet.outcome(task_id)
    assert outcome.state == task_pb2.OUTCOME_STATE_SUCCEEDED
    assert stage.executions(task_id) == 2
    assert outcome.worker_id not in ("", zombie)
    time.sleep(0.5)  # for a report that should not count
    assert fleet.outcome(task_id) == outcome


def test_a_stopped_engine_costs_time_only(stage: Stage) -> None:
    fleet = stage.fleet
    (task_id,) = stage.submit(1)
    engine = fleet.workers[stage.runs_on(task_id)].children()[0]
    stage.faults.stop(engine, "engine", STOPPED_S)
    stage.until_awake()
    outcome = fleet.outcome(task_id)
    assert (outcome.state, outcome.attempts) == (task_pb2.OUTCOME_STATE_SUCCEEDED, 1)
    assert stage.executions(task_id) == 1


def test_a_master_that_slept_takes_nobody_for_lost(stage: Stage) -> None:
    fleet = stage.fleet
    before = fleet.stats().requeued
    ids = stage.submit(4)
    stage.runs_on(ids[0])
    stage.faults.stop(fleet.master.pid, "master", STOPPED_S)
    stage.until_awake()
    for task_id in ids:
        outcome = fleet.outcome(task_id)
        assert (outcome.state, outcome.attempts) == (task_pb2.OUTCOME_STATE_SUCCEEDED, 1)
    assert fleet.stats().requeued == before
