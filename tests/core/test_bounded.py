"""One event stays short, however many tasks there are."""

import gc
from dataclasses import replace
from random import Random

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.ledger import RUN_GRACE_S
from multigpu_master.core.model import OutcomeState, Shape, Task
from multigpu_master.core.placement import explain as explaining
from multigpu_master.core.spec import Spec
from multigpu_master.core.task_table import BLOCK_BITS, TaskTable
from multigpu_master.core.timers import DUE_MAX, SWEEP_MIN, Expiries, TimeLimit
from multigpu_master.core.workers.fleet import ELIGIBLE_SHAPES_MAX
from multigpu_master.core.workers.sessions import MAKES_ROOM, REQUEUE_S

from tests.core.stage import FAILED, SPEC, Stage, lease_of, leased, state_of

BLOCK = 1 << BLOCK_BITS


def settled_by(commands: list[ev.Command]) -> int:
    return sum(len(c.tasks) for c in commands if isinstance(c, ev.Settled))


def test_deadlines_that_come_together_are_spread_over_events_and_none_is_dispatched_late() -> None:
    stage = Stage()
    spec = Spec(kind="run", wait_for_worker=True, deadline_s=stage.now + 5)
    tasks = stage.submit(3000, spec)
    (later,) = stage.submit(spec=Spec(kind="run", wait_for_worker=True))
    stage.now += 5
    commands = stage.worker()  # a worker comes in the same moment
    events = 0
    while True:
        assert settled_by(commands) <= 2 * DUE_MAX
        assert not [c for c in commands if isinstance(c, ev.Dispatch) and c.leases[0].task in tasks]
        next_s = stage.core.next_timer_s()
        if next_s is None or next_s > stage.now:
            break
        commands = stage.handle(ev.Tick())
        events += 1
    assert events > 3000 // (2 * DUE_MAX) - 1
    assert {state_of(task) for task in tasks} == {OutcomeState.EXPIRED}
    assert later.lease is not None


def task(task_id: int, *, ended: bool = False) -> Task:
    made = Task(Spec(kind="run"), "", b"")
    made.task_id = task_id
    if ended:
        made.outcome = object()  # type: ignore[assignment]  # that there is one is all that is looked at
    return made


def test_instants_of_tasks_that_have_ended_are_swept_a_few_at_a_time_and_the_rest_fires_in_order() -> None:
    rng = Random(7)
    tasks = TaskTable()
    fired: list[tuple[float, int]] = []
    expiries = Expiries(tasks)
    alive: list[tuple[float, int]] = []
    for task_id in range(1, 20 * SWEEP_MIN):
        each = task(task_id)
        tasks.add(each)
        when_s = rng.random()
        expiries.at(when_s, each, TimeLimit.DEADLINE)
        if rng.random() < 0.95:
            tasks.discard(each)
        else:
            alive.append((when_s, task_id))
    assert len(expiries._heap) + len(expiries._old) < 6 * SWEEP_MIN
    now = 0.0
    while (due_s := expiries.next_s()) is not None:
        now = max(now, due_s)
        fired += [(now, task.task_id) for _, task, _ in expiries.due(now)]
    assert [task_id for _, task_id in fired] == [task_id for _, task_id in sorted(alive)]


def table(ids: list[int]) -> TaskTable:
    made = TaskTable()
    for task_id in ids:
        made.add(task(task_id))
    return made


def test_the_table_of_tasks_is_read_newest_first_while_tasks_come_and_go() -> None:
    ids = [*range(1, 3 * BLOCK, 7), 50 * BLOCK + 1]
    tasks = table(ids)
    seen: list[int] = []
    for block in tasks.blocks_before(2 * BLOCK):
        seen += [t.task_id for t in block]
        for other in (BLOCK + 1, 1):
            if (found := tasks.get(other)) is not None:
                tasks.discard(found)
        tasks.add(task(10**9 + len(seen)))
    assert seen == sorted((i for i in ids if i < 2 * BLOCK and i != 1), reverse=True)


def test_ephemeral_outcomes_expire_each_in_its_own_time_whatever_the_order() -> None:
    stage = Stage()
    stage.worker()
    ttls = (300.0, 5.0, 20.0, 1.0)
    made = [stage.submit(spec=Spec(kind="run", durable=False, result_ttl_s=ttl))[0] for ttl in ttls]
    for each in made:
        stage.report(lease_of(each), after_s=0.0)
    kept = []
    for _ in range(4):
        kept.append([each.spec.result_ttl_s for each in made if each.task_id in stage.core.ledger.tasks])
        stage.now += 7.0
        stage.handle(ev.Tick())
    assert kept == [[300.0, 5.0, 20.0, 1.0], [300.0, 20.0], [300.0, 20.0], [300.0]]


@pytest.mark.parametrize(("classes", "tasks"), [(1, 50), (1, 2000), (60, 1)])
def test_explain_visits_some_tasks_and_classes_and_estimates_the_rest(
    monkeypatch: pytest.MonkeyPatch, classes: int, tasks: int
) -> None:
    monkeypatch.setattr(explaining, "VISITED_MAX", 70)
    stage = Stage()
    stage.worker(slots=1)
    held = stage.submit(400)  # more than the worker's window
    waiting = [task for task in held if task.lease is None]
    stage.handle(ev.Cancel(waiting))
    for n in range(classes):
        stage.submit(tasks, key=f"key{n}")
    (last,) = stage.submit(1, key="key0")
    stage.submit(tasks, key="key0")
    explanation = explaining.explain(stage.core, last, stage.now)
    assert explanation.ahead == classes * tasks
    assert explanation.summary.endswith(f"; {explanation.ahead} older or more important task(s) wait in its queue")


def test_a_task_that_ends_in_its_pause_does_not_stay_in_memory_until_the_pause_would_end() -> None:
    stage, task = leased(replace(SPEC, backoff_initial_s=1e6, backoff_max_s=1e6))
    stage.report(lease_of(task), FAILED)
    stage.handle(ev.Cancel([task]))
    stage.handle(ev.SettlesDone([task]))
    stage.worker()  # a new session of the worker, which no longer remembers the lease
    task_id = task.task_id
    del task
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Task) and each.task_id == task_id]


def test_what_is_kept_for_each_shape_of_tasks_is_bounded() -> None:
    stage = Stage()
    stage.worker()
    fleet = stage.core.fleet
    for memory_bytes in range(4 * ELIGIBLE_SHAPES_MAX):
        fleet.resident_workers(Shape("run", "", (), memory_bytes))
    assert len(fleet._eligible) <= ELIGIBLE_SHAPES_MAX + 1
    assert len(fleet._resident) <= ELIGIBLE_SHAPES_MAX + 1


def test_a_task_that_is_returned_without_end_has_one_expiry_for_its_run_timeout() -> None:
    stage, task = leased(replace(SPEC, run_timeout_s=1000.0))
    for _ in range(100):
        stage.fail(lease_of(task), MAKES_ROOM, returned=True)
        stage.handle(ev.Tick(), REQUEUE_S)
    expiries = stage.core.ledger.expiries
    assert len(expiries._heap) + len(expiries._old) == 1
    stage.handle(ev.Tick(), 1000.0 + RUN_GRACE_S - 100 * REQUEUE_S)  # since the first lease
    first = lease_of(task)
    stage.handle(ev.Tick(), 101 * REQUEUE_S)
    assert task.lease is not first, "the last lease has run for too long"
