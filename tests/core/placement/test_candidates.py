"""Which worker a strategy gets a task for, and how often it is asked."""

import random
from dataclasses import replace

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.model import Cordon, Lease, Shape, Task, Worker
from multigpu_master.core.placement.candidates import Candidates
from multigpu_master.core.placement.dispatch import COMPARED_MAX
from multigpu_master.core.placement.pins import Pins
from multigpu_master.core.placement.resource_classes import Backlog
from multigpu_master.core.spec import Spec
from multigpu_master.core.strategy import FleetView
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.info import Capability, Resident, WorkerInfo
from multigpu_master.core.workers.pace import SteppedAverages
from multigpu_master.strategies.auto import Auto
from multigpu_master.strategies.static_partition import StaticPartition

from tests.compiled import replaces_a_method
from tests.core.stage import SPEC, Stage

EMBED = Shape("embed", "m", (), 0, -1)


def fleet_of(workers: int, resident: int) -> Fleet:
    """So many workers for a model, which some of them have loaded."""
    fleet = Fleet(0.8)
    for i in range(workers):
        capabilities = (Capability(kind="embed", models=("m", "n")),)
        worker = fleet.register(WorkerInfo(worker_id=f"w{i}", capabilities=capabilities, window_tasks=64))
        fleet.open_session(worker, i + 1, 0.0)
        worker.pace.leases_max = 64
        worker.residency.reported = {"m": Resident(model="m")} if i < resident else {}
    return fleet


def asked_by(stage: Stage, *, full: bool = False) -> list[Worker]:
    """The workers for which the strategy auto of this stage is asked from now on. `full`: it excludes all of them."""
    asked = list[Worker]()
    auto = stage.core.ledger.strategies["auto"]

    class Asked(Auto):
        def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
            if full:
                asked.append(worker)
            return "full" if full else None

        def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
            asked.append(worker)
            return auto.score(shape, worker, fleet)

    stage.core.ledger.strategies["auto"] = Asked()
    return asked


def test_one_event_asks_for_each_worker_and_each_lease_not_for_all_workers_again() -> None:
    stage = Stage()
    scored = asked_by(stage)
    for n in range(300):
        stage.worker(f"w{n}")
    scored.clear()
    tasks = stage.submit(1000)
    assert all(task.lease is not None for task in tasks)
    assert len(scored) <= 300 + 1000


def test_the_next_event_asks_only_for_the_workers_that_have_changed() -> None:
    stage = Stage()
    scored = asked_by(stage)
    for n in range(300):
        stage.worker(f"w{n}")
    stage.submit(1)
    scored.clear()
    (task,) = stage.submit(1)
    assert task.lease is not None
    assert len(scored) == 1, "the worker that got the first task"
    stage.core.fleet.estimates_changes += 1
    scored.clear()
    stage.submit(1)
    assert len(scored) == 300, "all scores depend on the averages"


def test_a_heartbeat_asks_for_its_worker_only_whatever_waits() -> None:
    stage = Stage()
    asked = asked_by(stage, full=True)
    for n in range(50):
        stage.worker(f"w{n}")
    for n in range(100):
        stage.submit(1, replace(SPEC, model=f"m{n}"))
    asked.clear()
    stage.beat("w7")
    assert len(asked) == 100
    assert {worker.worker_id for worker in asked} == {"w7"}


def test_an_event_compares_a_limited_number_of_workers_and_the_next_ones_continue() -> None:
    stage = Stage()
    asked = asked_by(stage, full=True)
    for n in range(200):
        stage.worker(f"w{n}")
    shapes = 3 * COMPARED_MAX // 200
    for n in range(shapes):
        stage.submit(1, replace(SPEC, model=f"m{n}"))
    asked.clear()
    stage.worker("another")  # all backlogs are tried again
    assert stage.core.dispatch_unfinished
    assert len(asked) <= COMPARED_MAX + 201
    events = 1
    while stage.core.dispatch_unfinished:
        stage.handle(ev.Tick())
        events += 1
    assert events >= 3
    assert len(asked) == shapes * 201, "each worker once for each shape"


def test_an_average_on_which_all_scores_depend_changes_at_most_once_a_second() -> None:
    averages = SteppedAverages()
    key = "embed", "m"
    assert averages.learn(key, 1.0, 0.0)
    assert not any(averages.learn(key, sample, 0.01 * n) for n, sample in enumerate((3.0, 0.5, 9.0, 4.0)))
    assert averages.values[key] == 1.0
    assert averages.learn(key, 4.0, 1.0)
    assert averages.values[key] > 3.0
    assert not averages.learn(key, 4.2, 9.0), "a small change"


def test_the_workers_that_have_a_model_are_not_counted_again_when_one_of_them_goes_idle_or_is_busy() -> None:
    replaces_a_method()
    fleet = fleet_of(1000, 10)
    assert fleet.resident_workers(EMBED) == 10
    looked, load_s = [], fleet.load_s

    def counting(worker: Worker, shape: Shape) -> float:
        looked.append(worker)
        return load_s(worker, shape)

    fleet.load_s = counting  # type: ignore[method-assign]  # it counts, and asks the real one
    worker = fleet.workers["w3"]
    for n in range(20):
        lease = Lease(n, Task(Spec(kind="embed", model="m"), "", b""), worker, 1, 0.0, 1, 0.0)
        fleet.add_lease(worker, lease, 0.0)
        fleet.remove_lease(lease)
        fleet.forget_models_of_leases(worker)
        assert fleet.resident_workers(EMBED) == 10
    assert len(looked) <= 40, "the worker itself, and nobody else"
    other = fleet.workers["w500"]
    fleet.add_lease(other, Lease(99, Task(Spec(kind="embed", model="m"), "", b""), other, 1, 0.0, 1, 0.0), 0.0)
    assert fleet.resident_workers(EMBED) == 11, "one that loads the model is one that has it"
    fleet.forget_models_of_leases(other)
    assert fleet.resident_workers(EMBED) == 10, "and none if it does not say so when it is done"


@pytest.mark.parametrize("seed", range(20))
def test_the_best_candidate_is_the_best_of_all_workers(seed: int) -> None:
    dice = random.Random(seed)
    fleet, strategy = fleet_of(12, 4), Auto()
    workers = list(fleet.workers.values())
    for worker in workers:
        worker.pace.unit_s["embed", "m"] = dice.uniform(0.01, 1)
        worker.pace.leases_max = dice.choice((0, 64, 64))
        worker.leased_s = dice.uniform(0, 9)
        fleet.score_changed(worker)
    backlog = Backlog(strategy, EMBED, None)
    backlog.size = dice.choice((1, 30, 300))
    candidates = Candidates(fleet, backlog, {})
    while True:
        free = [w for w in workers if not w.full]
        able = [w for w in free if strategy.min_backlog(EMBED, w, fleet) <= backlog.size]
        found = candidates.best()
        if found is None:
            assert not able
            assert backlog.too_few_tasks == bool(free)
            return
        assert strategy.score(EMBED, found, fleet) == min(strategy.score(EMBED, w, fleet) for w in able)
        found.leased_s += dice.uniform(0, 3)
        found.pace.leases_max = dice.choice((0, 64))
        fleet.score_changed(found)
        backlog.size = max(1, backlog.size - 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_pinned_task_goes_to_the_first_of_all_workers_and_a_loss_moves_no_other(seed: int) -> None:
    dice = random.Random(seed)
    fleet, scored = fleet_of(40, 0), list[Worker]()

    class Counting(StaticPartition):
        def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
            scored.append(worker)
            return super().score(shape, worker, fleet)

    strategy, plain, pins = Counting(), StaticPartition(), Pins(fleet)
    shapes = [EMBED._replace(partition=n) for n in range(100)]
    workers = list(fleet.workers.values())
    for turn in range(50):
        worker = dice.choice(workers)
        match dice.randrange(4):
            case 0:
                worker.cordon = None if worker.cordon else Cordon("")
                fleet.eligibility_changed(worker)
            case 1:
                fleet.close_session(worker)
            case 2:
                fleet.open_session(worker, 100 + turn, 0.0)
            case _:
                kind = dice.choice(("embed", "other"))
                capabilities = (Capability(kind=kind, models=("m",)),)
                fleet.register(WorkerInfo(worker_id=worker.worker_id, capabilities=capabilities))
        scored.clear()
        able = [w for w in fleet.eligible(EMBED) if w.accepting]
        for shape in dice.sample(shapes, 40):
            first = min(able, key=lambda w: (plain.score(shape, w, fleet), w.worker_id), default=None)
            assert pins.worker_for(strategy, shape) is first
        if turn > 10:
            assert len(scored) < 40 * 40 / 2, "not every worker for every shape again"
