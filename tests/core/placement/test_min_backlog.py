"""When a worker becomes worth the loading of a model for what others have learned."""

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Resident, Telemetry, WorkerInfo

from tests.core.stage import FAILED, Stage, lease_of


def joined(stage: Stage, name: str, zone: str, *, loaded: bool) -> None:
    """A worker that takes one task at a time."""
    info = WorkerInfo(
        worker_id=name, capabilities=(Capability(kind="run", models=("m",)),), labels={"zone": zone}, window_tasks=1
    )
    stage.join(info)
    stage.handle(ev.Heartbeat(stage.sessions, [], 0, Telemetry(), (Resident(model="m"),) if loaded else ()))


def test_a_speed_measured_on_one_worker_may_lower_the_backlog_that_another_needs() -> None:
    stage = Stage()
    joined(stage, "elsewhere", "b", loaded=True)
    (slow,) = stage.submit(spec=Spec(kind="run", model="m", labels=(("zone", "b"),)))
    joined(stage, "loaded", "a", loaded=True)
    joined(stage, "empty", "a", loaded=False)
    first, second = stage.submit(2, spec=Spec(kind="run", model="m", labels=(("zone", "a"),)))
    assert lease_of(first).worker.worker_id == "loaded"
    assert second.lease is None  # as far as is known, that one will be done long before the other has loaded the model
    lease = lease_of(slow)
    stage.now += 60.0
    stage.handle(ev.Reports(lease.worker.session, [lease.lease_id], [b""], start_s=stage.now - 60, finish_s=stage.now))
    assert lease_of(second).worker.worker_id == "empty"


def test_a_task_that_failed_is_no_reason_to_load_its_model_elsewhere() -> None:
    stage = Stage()
    joined(stage, "loaded", "a", loaded=True)
    joined(stage, "empty", "a", loaded=False)
    (task,) = stage.submit(spec=Spec(kind="run", model="m"))
    assert lease_of(task).worker.worker_id == "loaded"
    stage.report(lease_of(task), FAILED)
    stage.handle(ev.Tick(), 5.0)
    assert lease_of(task).worker.worker_id == "loaded"


@pytest.mark.parametrize("empty", [1, 6])
def test_a_model_is_loaded_elsewhere_as_soon_as_enough_tasks_wait_for_it(empty: int) -> None:
    """With few workers that have room each is looked at, with more they are ranked."""
    stage = Stage()
    joined(stage, "loaded", "a", loaded=True)
    for n in range(empty):
        joined(stage, f"empty{n}", "a", loaded=False)
    went: list[str] = []
    while len(went) < 200 and set(went) <= {"loaded"}:
        stage.submit(spec=Spec(kind="run", model="m"))
        went = [task.lease.worker.worker_id for task in stage.core.ledger.tasks.values() if task.lease is not None]
        assert len(stage.core.ledger.tasks) < 500, "nobody ever loads it"
    assert went[0] == "loaded"
    assert len(stage.core.ledger.tasks) > 2, "not for one task"
