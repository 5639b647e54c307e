"""Leases that wait in a window: when they are recalled, what becomes of their tasks, what those that run teach."""

from dataclasses import replace
from typing import Any

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.placement.recall import CHECK_S, WORKERS_MAX
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Model, ModelState, Resident, Telemetry, WorkerInfo

from tests.core.stage import FAILED, SPEC, Stage, held_lease, lease_of

LOW, URGENT = (Spec(kind="run", priority=priority) for priority in (5, 1))


@pytest.fixture
def stage() -> Stage:
    return Stage()


def recalls(commands: list[ev.Command]) -> list[int]:
    return [lease_id for c in commands if isinstance(c, ev.Recall) for lease_id in c.lease_ids]


def pass_s(stage: Stage, seconds: float) -> list[int]:
    """Time passes, in small steps; the leases that are recalled."""
    found = []
    for _ in range(round(seconds / 0.01)):
        found += recalls(stage.handle(ev.Tick(), 0.01))
    return found


def give_back(stage: Stage, lease: Lease) -> list[ev.Command]:
    return stage.fail(lease, "Recalled", returned=True)


def stuck(stage: Stage, name: str = "w0", n: int = 2) -> list[Task]:
    """n tasks with one worker of one slot, which says that it runs the first."""
    stage.worker(name, slots=1)
    stage.core.fleet.workers[name].pace.leases_max = n
    tasks = stage.submit(n)
    running = lease_of(tasks[0])
    stage.handle(ev.Heartbeat(running.worker.session, [held_lease(lease_of(t), running=t is tasks[0]) for t in tasks],
                              1 << 30, Telemetry()))  # fmt: skip
    return tasks


def test_explain_says_that_the_limit_of_a_window_was_lowered(stage: Stage) -> None:
    first, *_ = stuck(stage, n=4)
    worker = lease_of(first).worker
    (waiting,) = stage.submit(1)

    def excluded_by() -> list[str]:
        return explain(stage.core, waiting, stage.now).candidates[0].excluded_by

    assert excluded_by() == ["window full (4 of 4 leases)"]
    worker.pace.leases_max = 2
    assert excluded_by() == ["window full (4 leases; the limit was lowered to 2)"]


def test_explain_does_not_advise_a_task_to_wait_that_waits(stage: Stage) -> None:
    stage.worker("w0")
    (waiting,) = stage.submit(1, spec=Spec(kind="other", wait_for_worker=True))
    summary = explain(stage.core, waiting, stage.now).summary
    assert summary.startswith("no worker runs kind 'other'")
    assert summary.endswith("; start a worker that can")


@pytest.mark.parametrize(("window_tasks", "expected"), [(64, 16), (10, 10)])
def test_a_worker_that_runs_tasks_together_gets_enough_for_its_slots_and_one_more(
    stage: Stage, window_tasks: int, expected: int
) -> None:
    capabilities = (Capability(kind="run", concurrency=8), Capability(kind="alone"))
    stage.join(WorkerInfo(worker_id="w0", capabilities=capabilities, slots=1, window_tasks=window_tasks))
    worker = stage.core.fleet.workers["w0"]
    tasks = stage.submit(40)
    assert len(worker.leases) == expected
    assert explain(stage.core, tasks[-1], stage.now).candidates[0].excluded_by == [f"window full ({expected} leases)"]
    stage.report(lease_of(tasks[0]))
    assert len(worker.leases) == expected
    assert worker.leased_shares == sum(lease.share for lease in worker.leases.values())


def test_a_kind_that_runs_alone_fills_the_same_window(stage: Stage) -> None:
    capabilities = (Capability(kind="run", concurrency=8), Capability(kind="alone"))
    stage.join(WorkerInfo(worker_id="w0", capabilities=capabilities, slots=1, window_tasks=64))
    stage.submit(40, Spec(kind="alone"))
    assert len(stage.core.fleet.workers["w0"].leases) == 2


def test_a_waiting_lease_is_recalled_for_a_worker_with_a_free_slot(stage: Stage) -> None:
    long, short = stuck(stage)
    assert pass_s(stage, 0.2) == [], "nobody else is there"
    stage.worker("w1", slots=1)
    lease = lease_of(short)
    assert pass_s(stage, 0.1) == [lease.lease_id]
    assert pass_s(stage, 2.0) == [], "once is enough"
    assert short.lease is lease, "it is its worker's until that returns it: it may just have been begun"
    give_back(stage, lease)
    assert lease_of(short).worker.worker_id == "w1"
    assert (short.attempts, short.ensure_extra().losses) == (1, 0)
    assert lease_of(long).worker.worker_id == "w0"
    assert stage.core.ledger.counters.requeued == 0, "nobody was lost or gave up"


@pytest.mark.parametrize("strategy", ["memory_usage", "compute_load", "round_robin", "least_loaded"])
def test_a_recalled_task_goes_to_another_worker_whatever_the_strategy_prefers(stage: Stage, strategy: str) -> None:
    _, short = stuck(stage)
    stage.worker("w1", slots=1)
    stage.handle(ev.SetStrategy(strategy))
    for name, used in ("w0", 1), ("w1", 700):  # w0 is the better one, by any measure of devices
        worker = stage.core.fleet.workers[name]
        telemetry = Telemetry(memory_total_bytes=1000, memory_used_bytes=used, utilization=used / 1000)
        held = [held_lease(x, running=x.running) for x in worker.leases.values()]
        stage.handle(ev.Heartbeat(worker.session, held, 1 << 30, telemetry))
    (recalled,) = pass_s(stage, 0.1)
    assert recalled == lease_of(short).lease_id
    give_back(stage, lease_of(short))
    assert lease_of(short).worker.worker_id == "w1"


def occupy(stage: Stage, name: str, slots: int) -> list[ev.Command]:
    """The worker says that cancelled calls run on in so many of its slots."""
    worker = stage.core.fleet.workers[name]
    held = [held_lease(x) for x in worker.leases.values()]
    return stage.handle(ev.Heartbeat(worker.session, held, 1 << 30, Telemetry(), occupied_slots=slots))


def test_a_slot_in_which_a_cancelled_call_runs_on_is_not_free(stage: Stage) -> None:
    stage.worker("w0", slots=1)
    (task,) = stage.submit()
    occupy(stage, "w0", 1)
    assert pass_s(stage, 0.2) == [], "nobody else is there"
    stage.worker("w1", slots=1)
    assert pass_s(stage, 0.1) == [lease_of(task).lease_id]
    give_back(stage, lease_of(task))
    assert lease_of(task).worker.worker_id == "w1"
    occupy(stage, "w1", 1)
    assert pass_s(stage, 0.2) == [], "w0 has no use for it either"
    occupy(stage, "w0", 0)
    assert pass_s(stage, 0.1) == [lease_of(task).lease_id]


def test_waiting_leases_are_shared_out_among_free_workers(stage: Stage) -> None:
    stuck(stage, n=41)
    for n in range(1, 4):
        stage.worker(f"w{n}", slots=1)
        stage.core.fleet.workers[f"w{n}"].pace.leases_max = 64
    assert len(pass_s(stage, 0.06)) == 30, "ten for each, and ten stay"


def test_all_workers_of_a_large_fleet_are_checked_in_turn(stage: Stage) -> None:
    """One check takes WORKERS_MAX workers. Of all leases, only the second of the last worker is known not to run."""
    for n in range(2 * WORKERS_MAX):
        stage.worker(f"w{n}", slots=1)
    tasks = stage.submit(2 * 2 * WORKERS_MAX)
    workers = list(stage.core.fleet.workers.values())
    assert all(len(worker.leases) == 2 for worker in workers)
    waiting = [lease_of(task) for task in tasks if lease_of(task).worker is workers[-1]][-1]
    for worker in workers:
        held = [held_lease(lease, running=lease is not waiting) for lease in worker.leases.values()]
        stage.handle(ev.Heartbeat(worker.session, held, 1 << 30, Telemetry()))
    stage.worker("free", slots=1)
    assert pass_s(stage, 0.2) == [waiting.lease_id]


def test_a_lease_returned_without_a_recall_counts_as_a_loss(stage: Stage) -> None:
    _, short = stuck(stage)
    give_back(stage, lease_of(short))
    assert short.ensure_extra().losses == 1


@pytest.mark.parametrize("why", ["paused", "pinned", "runs"])
def test_leases_that_run_or_could_not_move_are_not_recalled(stage: Stage, why: str) -> None:
    _, short = stuck(stage)
    stage.worker("w1", slots=1)
    if why == "paused":
        stage.handle(ev.ConfigureQueue("default", paused=True))
    elif why == "pinned":
        stage.handle(ev.SetStrategy("static_partition"))
    else:
        stage.beat("w0", running=True)
    assert pass_s(stage, 1.0) == []
    assert lease_of(short).worker.worker_id == "w0"


def test_an_urgent_task_gets_the_place_of_one_that_was_sent_ahead(stage: Stage) -> None:
    stage.worker("w0", slots=1)
    first, ahead, *_ = stage.submit(8, LOW)
    stage.beat("w0")
    lease = lease_of(first)
    stage.handle(ev.Heartbeat(1, [held_lease(lease, running=True), held_lease(lease_of(ahead))], 1 << 30, Telemetry()))
    (urgent,) = stage.submit(spec=URGENT)
    assert urgent.lease is None
    assert pass_s(stage, 0.1) == [lease_of(ahead).lease_id]
    give_back(stage, lease_of(ahead))
    assert lease_of(urgent).worker.worker_id == "w0"
    assert ahead.lease is None
    assert ahead.waiting


def test_tasks_that_keep_coming_do_not_put_off_the_recall_for_those_before_them(stage: Stage) -> None:
    """Each is more urgent than all before, so the first of its backlog has always just come."""
    behind = stuck(stage, n=2)[1]  # with priority 3
    recalled = []
    for priority in (2, 1):
        (urgent,) = stage.submit(spec=Spec(kind="run", priority=priority))
        recalled += pass_s(stage, 0.06)
        assert urgent.lease is None
    assert recalled == [lease_of(behind).lease_id]


def test_an_urgent_task_gets_the_place_of_the_youngest_waiting_one(stage: Stage) -> None:
    """Of leases of which none is known to run the oldest probably does: it is recalled last."""
    stage.worker("w0", slots=1)
    stage.core.fleet.workers["w0"].pace.leases_max = 3
    tasks = stage.submit(3, LOW)
    stage.submit(spec=URGENT)
    assert pass_s(stage, 0.1) == [lease_of(tasks[2]).lease_id]


def test_leases_that_are_as_urgent_as_the_waiting_task_stay(stage: Stage) -> None:
    stage.worker("w0", slots=1)
    stage.core.fleet.workers["w0"].pace.leases_max = 4
    stage.submit()
    low, *_ = stage.submit(1, LOW)
    stage.submit(2)
    stage.submit(3, SPEC)
    assert pass_s(stage, 0.1) == [lease_of(low).lease_id]


class CountedLeases(dict[int, Lease]):
    """Worker.leases, which counts how often all leases are read."""

    reads = 0

    def values(self) -> Any:
        self.reads += 1
        return super().values()


@pytest.mark.parametrize("held", [SPEC, LOW])
def test_one_check_reads_the_leases_of_a_silent_worker_once_for_all_backlogs(stage: Stage, held: Spec) -> None:
    """With a large fleet, reading them again for each backlog took the master seconds for each check."""
    others = [f"other{n}" for n in range(20)]
    kinds = tuple(Capability(kind=kind) for kind in ("run", *others))
    stage.join(WorkerInfo(worker_id="w0", capabilities=kinds, slots=1))
    stage.submit(2, held)
    worker = stage.core.fleet.workers["w0"]
    stage.beat("w0", running=True)
    for kind in others:
        stage.submit(spec=replace(SPEC, kind=kind))
    worker.leases = counted = CountedLeases(worker.leases)
    assert pass_s(stage, 2 * CHECK_S) == []  # one check, or two
    assert 0 < counted.reads <= 4


def test_a_window_narrows_while_running_tasks_take_longer_than_earlier_ones(stage: Stage) -> None:
    stage.worker("w0", slots=1)
    worker = stage.core.fleet.workers["w0"]
    for task in stage.submit(40):
        if task.lease is not None:
            stage.report(task.lease, after_s=0.01)
    assert worker.pace.leases_max > 20
    stage.submit(3)
    before_s = worker.leased_s
    pass_s(stage, 0.6)
    assert worker.pace.leases_max == 2
    assert worker.leased_s > before_s + 0.5


@pytest.mark.parametrize(("every_s", "batch"), [(0.005, 16), (0.4, 64)])
def test_a_window_keeps_its_width_while_tasks_run_in_batches(stage: Stage, every_s: float, batch: int) -> None:
    stage.worker("w0", slots=1)
    worker = stage.core.fleet.workers["w0"]
    worker.pace.leases_max = batch
    stage.submit(1000)

    def run_batch() -> None:
        leases = list(worker.leases.values())[:batch]
        pass_s(stage, every_s - 0.005)
        stage.now += 0.005
        ids = [lease.lease_id for lease in leases]
        stage.handle(ev.Reports(1, ids, [b""] * len(ids), "", (), stage.now - every_s, stage.now))

    widths = []
    for _ in range(8):
        run_batch()
        before = worker.pace.leases_max
        pass_s(stage, every_s * 0.9)
        widths.append((before, worker.pace.leases_max))
    assert all(after == before for before, after in widths[2:]), widths


def test_a_worker_that_was_fast_does_not_get_all_while_another_is_idle(stage: Stage) -> None:
    """The speeds are those of the tasks that each happened to have, long ones here and short ones there;
    failures have opened the window.
    """
    for n in range(2):
        stage.worker(f"w{n}", slots=1)
    for n, took_s in (0, 2.0), (1, 0.4):
        other = f"w{1 - n}"
        stage.handle(ev.Cordon(other))
        (task,) = stage.submit()
        lease = lease_of(task)
        stage.now += took_s
        reports = ev.Reports(lease.worker.session, [lease.lease_id], [b""], "", (), stage.now - took_s, stage.now)
        stage.handle(reports)
        for _ in range(300):
            (task,) = stage.submit(spec=Spec(kind="run", attempts_max=1))
            stage.report(lease_of(task), FAILED, after_s=0.001)
        stage.handle(ev.Uncordon(other))
    tasks: list[Task] = []
    for _ in range(4):
        tasks += stage.submit(spec=SPEC)
        for lease_id in pass_s(stage, 0.3):
            (waiting,) = [t for t in tasks if t.lease is not None and t.lease.lease_id == lease_id]
            give_back(stage, lease_of(waiting))
    assert sorted(len(w.leases) for w in stage.core.fleet.workers.values()) == [2, 2]


@pytest.mark.parametrize("loaded", [True, False])
def test_a_lease_that_waits_for_its_model_is_recalled_for_an_idle_worker_that_has_it(loaded: bool) -> None:
    stage = Stage()
    stage.handle(ev.SetStrategy("round_robin"))
    model = Model(name="m", memory_bytes=400, load_s=20.0)
    for name in ("w0", "w1"):
        capabilities = (Capability(kind="run", models=("m",)),)
        stage.join(WorkerInfo(worker_id=name, capabilities=capabilities, models=(model,), model_memory_bytes=1000))
    has_it, loads = stage.submit(2, spec=Spec(kind="run", model="m"))
    first, second = lease_of(has_it), lease_of(loads)
    assert first.worker is not second.worker

    def beat(lease: Lease, state: ModelState) -> None:
        held = [held_lease(x) for x in lease.worker.leases.values()]
        resident = (Resident(model="m", state=state, memory_bytes=400),)
        stage.handle(ev.Heartbeat(lease.worker.session, held, 1 << 30, Telemetry(), resident))

    beat(second, ModelState.LOADING)
    assert pass_s(stage, 0.2) == [], "both load it"
    beat(first, ModelState.READY)
    stage.report(first)
    beat(first, ModelState.READY if loaded else ModelState.UNLOADING)
    assert pass_s(stage, 0.2) == ([second.lease_id] if loaded else [])
    if loaded:
        give_back(stage, second)
        assert lease_of(loads).worker is first.worker
