"""What a ranking asks of a strategy, and how often: the cost of a dispatch must not follow the size of the fleet."""

import random

import pytest
from multigpu_master.core.model import Cordon, Lease, Shape, Spec, Task, Worker
from multigpu_master.core.placement.placement import Placement
from multigpu_master.core.placement.ranking import Ranking
from multigpu_master.core.strategy import FleetView
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.info import Capability, Resident, WorkerInfo
from multigpu_master.strategies.auto import Auto
from multigpu_master.strategies.static_partition import StaticPartition

EMBED = Shape("embed", "m", (), 0, -1)


class Counting(Auto):
    """auto, with an eye on how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def min_backlog(self, shape: Shape, worker: Worker, fleet: FleetView) -> int:
        self.asked += 1
        return super().min_backlog(shape, worker, fleet)


def fleet_of(workers: int, resident: int) -> Fleet:
    """So many workers for a model, which some of them have loaded."""
    fleet = Fleet(0.8)
    for i in range(workers):
        capabilities = (Capability(kind="embed", models=("m", "n")),)
        worker = fleet.register(WorkerInfo(worker_id=f"w{i}", capabilities=capabilities, window_tasks=64))
        fleet.open_session(worker, i + 1, 0.0)
        worker.pace.allowed = 64
        worker.residency.reported = {"m": Resident(model="m")} if i < resident else {}
    return fleet


def test_workers_not_worth_a_loading_are_not_looked_at_for_every_task() -> None:
    fleet, strategy = fleet_of(1000, 2), Counting()
    ranking = Ranking(fleet, strategy, EMBED)
    full = [fleet.workers["w0"], fleet.workers["w1"]]
    for worker in full:
        worker.pace.allowed = 0
        fleet.touch(worker)
    assert ranking.best(10) is None
    assert ranking.has_room()
    strategy.asked = 0
    for n in range(200):
        worker = full[n % 2]
        worker.pace.allowed = 64
        fleet.touch(worker)
        assert ranking.best(10 + n % 5) is worker
        worker.pace.allowed = 0
        fleet.touch(worker)
        assert ranking.best(10 + n % 5) is None
    assert strategy.asked <= 400, "some for each task, whatever the size of the fleet"


def test_the_workers_that_have_a_model_are_not_counted_again_when_one_of_them_goes_idle_or_is_busy() -> None:
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
        fleet.grant(worker, lease, 0.0)
        del worker.leases[n]
        fleet.release(lease)
        fleet.idle(worker)
        assert fleet.resident_workers(EMBED) == 10
    assert len(looked) <= 40, "the worker itself, and nobody else"
    other = fleet.workers["w500"]
    fleet.grant(other, Lease(99, Task(Spec(kind="embed", model="m"), "", b""), other, 1, 0.0, 1, 0.0), 0.0)
    assert fleet.resident_workers(EMBED) == 11, "one that loads the model is one that has it"
    fleet.idle(other)
    assert fleet.resident_workers(EMBED) == 10, "and none if it does not say so when it is done"


def test_workers_kept_aside_come_back_when_no_worker_has_the_model() -> None:
    fleet = fleet_of(10, 0)
    ranking = Ranking(fleet, Counting(), EMBED)
    loader = fleet.workers["w0"]
    lease = Lease(1, Task(Spec(kind="embed", model="m"), "", b""), loader, 1, 0.0, 1, 0.0)
    fleet.grant(loader, lease, 0.0)
    loader.pace.allowed = 0  # it is full, and the only one that has the model, or will
    fleet.touch(loader)
    assert ranking.best(1) is None, "not worth a loading for the others"
    assert ranking.has_room()
    del loader.leases[1]
    fleet.release(lease)
    fleet.idle(loader)  # and does not have it
    fleet.touch(loader)
    assert ranking.best(1) is not None


@pytest.mark.parametrize("seed", range(20))
def test_the_ranking_equals_a_scan_of_all_workers(seed: int) -> None:
    dice = random.Random(seed)
    fleet, strategy = fleet_of(12, 0), Auto()
    ranking = Ranking(fleet, strategy, EMBED)
    workers = list(fleet.workers.values())
    for _ in range(300):
        worker = dice.choice(workers)
        match dice.randrange(5):
            case 0:
                worker.pace.allowed = dice.choice((0, 64))
            case 1:
                worker.backlog_s = dice.uniform(0, 9)
            case 2:
                worker.residency.reported = dice.choice(({}, {"m": Resident(model="m")}))
                fleet.members_changed(worker)
            case 3:
                worker.pace.unit_s["embed", "m"] = dice.uniform(0.01, 1)
            case _:
                fleet.learned(worker, ("embed", "m"), 1, 1, dice.uniform(0.01, 1))
        fleet.touch(worker)
        queued = dice.choice((1, 3, 10, 50, 300, 3000))
        able = [w for w in workers if not w.full and strategy.min_backlog(EMBED, w, fleet) <= queued]
        found = ranking.best(queued)
        if found is None:
            assert not able
            assert ranking.has_room() == any(not w.full for w in workers)
        else:
            least = min(strategy.score(EMBED, w, fleet) for w in able)
            assert found in able
            assert strategy.score(EMBED, found, fleet) == least


@pytest.mark.parametrize("seed", range(5))
def test_a_pinned_task_goes_to_the_first_of_all_workers_and_a_loss_moves_no_other(seed: int) -> None:
    dice = random.Random(seed)
    fleet, scored = fleet_of(40, 0), list[Worker]()

    class Counting(StaticPartition):
        def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
            scored.append(worker)
            return super().score(shape, worker, fleet)

    strategy, plain, placement = Counting(), StaticPartition(), Placement(fleet)
    shapes = [EMBED._replace(partition=n) for n in range(100)]
    workers = list(fleet.workers.values())
    for turn in range(50):
        worker = dice.choice(workers)
        match dice.randrange(4):
            case 0:
                worker.cordon = None if worker.cordon else Cordon("")
                fleet.members_changed(worker)
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
            assert placement.pin(strategy, shape) is first
        if turn > 10:
            assert len(scored) < 40 * 40 / 2, "not every worker for every shape again"
