"""Gangs on workers whose memory other models fill."""

from dataclasses import replace

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.model import Task, Worker
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Model, ModelState, Resident, Telemetry, WorkerInfo

from tests.core.stage import Stage, held_lease, lease_of

MODELS = tuple(Model(name=name, memory_bytes=600, load_s=2.0) for name in "abc")  # two do not fit
GANG = Spec(kind="run", model="a", world_size=2, wait_for_worker=True)


def fleet_of(stage: Stage, n: int) -> list[Worker]:
    for name in map(str, range(n)):
        stage.join(WorkerInfo(worker_id=name, capabilities=(Capability(kind="run", models=("a", "b", "c")),), slots=1,
                              models=MODELS, model_memory_bytes=1000, store_address="h:1"))  # fmt: skip
    return list(stage.core.fleet.workers.values())


def beat(stage: Stage, worker: Worker, *loaded: Resident, after_s: float = 0.0) -> None:
    held = [held_lease(lease, running=True) for lease in worker.leases.values()]
    beat = ev.Heartbeat(worker.session, held, 1 << 30, Telemetry(), loaded)
    stage.handle(beat, after_s)


def loaded(name: str, *, pinned: bool = False) -> Resident:
    return Resident(model=name, memory_bytes=600, state=ModelState.READY, pinned=pinned)


def run_others(
    stage: Stage, workers: list[Worker], gang: Task, seconds: int, names: str, *, pinned: bool = False
) -> bool:
    """Each second every worker ends a task, and each model has new tasks. Returns whether the gang began."""
    for _ in range(seconds):
        for worker in workers:
            if worker.leases:
                lease = next(iter(worker.leases.values()))
                beat(stage, worker, loaded(lease.task.spec.model))
                stage.report(lease, after_s=1.0 / len(workers))
            else:
                beat(stage, worker, after_s=1.0 / len(workers))
            if gang.lease is not None:
                return True
        for name in names:
            stage.submit(2, Spec(kind="run", model=name, wait_for_worker=True))
    return False


@pytest.mark.parametrize("names", ["b", "bc"])
def test_a_gang_begins_while_other_models_have_tasks_without_end(names: str) -> None:
    stage = Stage()
    workers = fleet_of(stage, 2)
    stage.submit(4, Spec(kind="run", model="b", wait_for_worker=True))
    (gang,) = stage.submit(1, GANG)
    assert gang.lease is None, "model b has leases, and leaves no room"
    assert run_others(stage, workers, gang, 150, names)
    assert {lease.model for worker in workers for lease in worker.leases.values()} == {"a"}
    assert lease_of(gang).rank == 0


def test_a_gang_begins_on_workers_whose_pinned_models_leave_no_room() -> None:
    """A worker unloads all other models for a rank, and loads pinned ones again afterwards."""
    stage = Stage()
    for worker in fleet_of(stage, 2):
        beat(stage, worker, loaded("b", pinned=True))
    (single,) = stage.submit(1, replace(GANG, world_size=1))
    (gang,) = stage.submit(1, GANG)
    assert (single.lease, lease_of(gang).model) == (None, "a")


def test_no_worker_is_reserved_for_a_gang_that_is_reserved_for_another_model() -> None:
    stage = Stage()
    (worker, other) = fleet_of(stage, 2)
    beat(stage, worker, loaded("b"))
    worker.residency.reserve("c", ())
    stage.core.fleet.models_changed(worker)
    (gang,) = stage.submit(1, GANG)
    assert (gang.lease, worker.leases_limit, other.leases_limit) == (None, None, None)
    worker.residency.end_reservation()
    stage.core.fleet.models_changed(worker)
    beat(stage, worker, loaded("b"))
    assert lease_of(gang).model == "a"


def test_explain_names_no_backlog_that_is_too_small_for_a_gang() -> None:
    """The gang begins with one task, as soon as enough workers are idle."""
    stage = Stage()
    for name in "ab":
        stage.join(WorkerInfo(worker_id=name, device_id=name, capabilities=(Capability(kind="run", models=("m",)),),
                              slots=1, store_address="h:1"))  # fmt: skip
    workers = list(stage.core.fleet.workers.values())
    beat(stage, workers[0], Resident(model="m"))
    beat(stage, workers[1])
    (task,) = stage.submit(1, replace(GANG, model="m", world_size=1))
    (gang,) = stage.submit(1, replace(GANG, model="m"))
    answer = explain(stage.core, gang, stage.now)
    assert [c.excluded_by for c in answer.candidates if c.worker.worker_id == "b"] == [[]]
    stage.report(lease_of(task))
    assert gang.lease is not None


def test_the_bytes_to_unload_follow_a_size_that_another_worker_reports() -> None:
    stage = Stage()
    models = tuple(Model(name=name, files_bytes=10) for name in "ab")
    for name, memory_bytes in (("x", 0), ("y", 90)):
        stage.join(WorkerInfo(worker_id=name, capabilities=(Capability(kind="run", models=("a", "b")),), slots=1,
                              models=models, model_memory_bytes=100))  # fmt: skip
        beat(stage, stage.core.fleet.workers[name], Resident(model="a", memory_bytes=memory_bytes))
        residency = stage.core.fleet.workers["x"].residency
        fresh = residency.excess_bytes("b")
    residency.invalidate()
    assert fresh == residency.excess_bytes("b") == residency.memory_of("a") + residency.memory_of("b") - 100
