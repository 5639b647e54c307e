"""What waits costs nothing while it waits, in however many queues and kinds: an event tries few backlogs."""

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.admission import QUEUE_SHAPES_MAX, RESOURCE_EXHAUSTED
from multigpu_master.core.model import Queue, Task, Worker, shape_of
from multigpu_master.core.placement.dispatch import BLOCKS_MAX
from multigpu_master.core.placement.resource_classes import SEARCHED_MAX, Backlog, FirstTaskHeap, ResourceClass
from multigpu_master.core.spec import Spec
from multigpu_master.core.timers import DUE_MAX
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo

from tests.compiled import replaces_a_method
from tests.core.stage import Stage, lease_of

CLASSES = 300


def count_tries(stage: Stage) -> list[Backlog]:
    """Fills a list with the backlogs that are tried."""
    replaces_a_method()
    tried: list[Backlog] = []
    dispatcher = stage.core._dispatcher
    choose = dispatcher._choose

    def counting(backlog: Backlog, now: float) -> Worker | None:
        tried.append(backlog)
        return choose(backlog, now)

    dispatcher._choose = counting  # type: ignore[method-assign]
    return tried


class Crowded(Stage):
    """Two workers with full windows, and CLASSES resource classes that wait for them."""

    def __init__(self, kinds: int, queues: int, strategy: str = "auto") -> None:
        super().__init__()
        self.handle(ev.SetStrategy(strategy))
        capabilities = tuple(Capability(kind=f"kind{n}") for n in range(kinds))
        for name in "ab":
            self.join(WorkerInfo(worker_id=name, capabilities=capabilities))
        specs = [
            Spec(kind=f"kind{n % kinds}", queue=f"queue{n % queues}", wait_for_worker=True) for n in range(CLASSES)
        ]
        self.tasks: list[Task] = [task for spec in specs for task in self.submit(2, spec)]
        self.tried = count_tries(self)


@pytest.mark.parametrize("strategy", ["auto", "static_partition"])
@pytest.mark.parametrize(("kinds", "queues"), [(1, CLASSES), (CLASSES, 1), (CLASSES, CLASSES), (1, 1)])
def test_an_event_tries_no_more_backlogs_than_find_room(kinds: int, queues: int, strategy: str) -> None:
    stage = Crowded(kinds, queues, strategy)
    for name in "ab":
        stage.beat(name, running=True)
    assert not stage.tried, "a heartbeat of a full worker opens no window"
    granted_all = tried_all = 0
    for _ in range(20):
        task = next(t for t in stage.tasks if t.lease is not None)
        stage.tried.clear()
        commands = stage.report(lease_of(task))
        granted = sum(len(c.leases) for c in commands if isinstance(c, ev.Dispatch))
        granted_all += granted
        tried_all += len(stage.tried)
    assert granted_all >= 10
    assert tried_all <= granted_all + 20, "those that find room, and seldom one that does not any more"


def test_tasks_of_many_queues_that_wait_for_the_same_memory_are_tried_as_one() -> None:
    stage = Stage()
    info = WorkerInfo(worker_id="w", capabilities=(Capability(kind="run"),), memory_total_bytes=100, slots=8)
    stage.join(info)
    stage.handle(ev.Heartbeat(1, [], 0, Telemetry(memory_total_bytes=100, memory_used_bytes=0)))
    running = stage.submit(3, Spec(kind="run", memory_bytes=30))
    for n in range(CLASSES):
        stage.submit(1, Spec(kind="run", queue=f"queue{n}", memory_bytes=80))
    assert len(stage.core.ledger.classes.backlogs) == 1
    tried = count_tries(stage)
    stage.report(lease_of(running[0]))
    assert len(tried) == 1


def test_an_event_tries_a_limited_number_of_backlogs_and_the_next_one_goes_on_at_once() -> None:
    stage = Stage()
    stage.worker()
    for n in range(BLOCKS_MAX + 10):
        spec = Spec(kind="other", queue=f"queue{n // 100}", memory_bytes=n + 1, wait_for_worker=True)
        stage.submit(1, spec)
    tried = count_tries(stage)
    stage.handle(ev.SetStrategy("round_robin"))
    assert len(tried) == BLOCKS_MAX
    assert stage.core.next_timer_s() == stage.now
    stage.handle(ev.Tick())
    assert len(tried) == BLOCKS_MAX + 10
    assert stage.core.next_timer_s() != stage.now


def test_a_queue_with_another_strategy_leaves_the_backlog_of_the_old_one() -> None:
    stage = Stage()
    stage.handle(ev.SetStrategy("static_partition"))
    stage.worker("a", slots=1)
    stage.worker("b", slots=1)
    pins = stage.core.ledger.strategies["static_partition"]

    def pin_of(key: str) -> Worker | None:
        shape = stage.core.ledger.class_of(Task(Spec(kind="run"), "", b"", key)).shape
        return stage.core.pins.worker_for(pins, shape)

    pinned = next(key for key in map(str, range(100)) if pin_of(key) is stage.core.fleet.workers["a"])
    stage.submit(5, key=pinned)  # more than a's window
    moved = stage.submit(3, Spec(kind="run", queue="moved"), key=pinned)
    assert not any(task.lease for task in moved)
    stage.handle(ev.SetStrategy("least_loaded", queue="moved"))
    assert [task.lease is not None for task in moved] == [True, True, False], "as many as b has room for"


def test_tasks_of_too_many_different_shapes_are_rejected() -> None:
    stage = Stage()
    for n in range(QUEUE_SHAPES_MAX):
        assert stage.submit(1, Spec(kind="run", memory_bytes=n, wait_for_worker=True))
    one_more = Spec(kind="run", memory_bytes=QUEUE_SHAPES_MAX, wait_for_worker=True)
    (rejection,) = stage.submitted([Task(one_more, "", b"")]).results
    assert isinstance(rejection, ev.Rejection)
    assert rejection.code == RESOURCE_EXHAUSTED
    assert stage.submit(1, Spec(kind="run", memory_bytes=7, wait_for_worker=True))
    assert stage.submit(1, Spec(kind="run", queue="other", memory_bytes=QUEUE_SHAPES_MAX + 1, wait_for_worker=True))
    stage.handle(ev.Cancel([task for task in stage.core.ledger.tasks.values() if task.spec.memory_bytes == 9]))
    assert stage.submit(1, one_more)


def test_waiting_tasks_are_dispatched_by_age_whatever_their_queue_and_kind() -> None:
    stage = Crowded(7, 11)
    went = [task for task in stage.tasks if task.lease is not None]
    while len(went) < len(stage.tasks):
        running = next(t for t in went if t.lease is not None)
        stage.report(lease_of(running), after_s=1.0)
        went += [task for task in stage.tasks if task.lease is not None and task not in went]
    assert went == stage.tasks


def test_paused_queues_delay_no_others_and_are_not_tried() -> None:
    stage = Crowded(1, CLASSES)
    first = next(task for task in stage.tasks if task.lease is None)
    for task in stage.tasks[:200]:
        stage.handle(ev.ConfigureQueue(task.spec.queue, paused=True))
    for _ in range(3):
        stage.tried.clear()
        stage.report(lease_of(next(t for t in stage.tasks if t.lease is not None)), after_s=1.0)
        assert len(stage.tried) <= 20
    assert not stage.core.ledger.classes.blocked, "nor does an event look at them"
    assert first.lease is None
    stage.handle(ev.ConfigureQueue(first.spec.queue, paused=False))
    stage.report(lease_of(next(t for t in stage.tasks if t.lease is not None)), after_s=1.0)
    assert first.lease is not None


@pytest.mark.parametrize("strategy", ["auto", "static_partition"])
def test_a_class_that_ends_before_it_is_tried_leaves_its_turn_to_the_next(strategy: str) -> None:
    """More deadlines pass than one event handles: the first class is still to be tried when the rest of it expires."""
    stage = Stage()
    stage.handle(ev.SetStrategy(strategy))
    stage.worker(slots=1)
    held = stage.submit(2)
    late = Spec(kind="run", queue="late", wait_for_worker=True, deadline_s=stage.now + 1.0)
    stage.submit(2 * DUE_MAX + 50, late)
    (task,) = stage.submit(1, Spec(kind="run", queue="other", wait_for_worker=True))
    assert task.lease is None
    stage.report(lease_of(held[0]), after_s=2.0)
    stage.handle(ev.Tick(), after_s=0.01)
    assert task.lease is not None


def test_the_tasks_of_a_lost_worker_go_back_in_order_however_many_they_are() -> None:
    stage = Stage()
    count = 3 * SEARCHED_MAX
    stage.worker("a", slots=count)
    tasks = stage.submit(count)
    stage.handle(ev.SessionClosed(stage.sessions))
    stage.worker("b", slots=1)
    order: list[Task] = []
    while len(order) < count:
        held = sorted((t for t in tasks if t.lease is not None), key=lambda t: lease_of(t).lease_id)
        order += held
        for task in held:
            stage.report(lease_of(task))
    assert [t.task_id for t in order] == [t.task_id for t in tasks]


def test_a_change_of_one_queue_regroups_only_its_tasks() -> None:
    stage = Stage()
    stage.handle(ev.ConfigureQueue("q7", paused=True))
    for n in range(100):
        stage.submit(spec=Spec(kind="run", queue=f"q{n}", wait_for_worker=True))
    classes = stage.core.ledger.classes

    def grouped(strategy: str) -> int:
        return classes.queued(stage.core.ledger.strategies[strategy], shape_of(Spec(kind="run")))

    assert grouped("auto") == 99
    stage.handle(ev.ConfigureQueue("q8", paused=True))
    stage.handle(ev.ConfigureQueue("q9", tasks_max=3))
    assert grouped("auto") == 98
    stage.handle(ev.ConfigureQueue("q7", paused=False))
    stage.handle(ev.SetStrategy("round_robin", "q9"))
    assert (grouped("auto"), grouped("round_robin")) == (98, 1)
    stage.handle(ev.SetStrategy("round_robin"))
    assert (grouped("auto"), grouped("round_robin")) == (0, 99)


@pytest.mark.parametrize("strategy", ["auto", "static_partition"])
def test_cancelled_tasks_leave_the_memory_of_their_class(strategy: str) -> None:
    stage = Stage()
    stage.handle(ev.SetStrategy(strategy))
    tasks = stage.submit(5000)
    stage.handle(ev.Cancel([*tasks[1:], tasks[1]]))
    resource_class = stage.core.ledger.class_of(tasks[0])
    assert len(resource_class.tasks) < 200
    assert resource_class.head() is tasks[0]
    stage.handle(ev.Cancel(tasks[:1]))
    classes = stage.core.ledger.classes
    assert not classes.by_key
    assert not classes.backlogs
    assert not classes.blocked


def test_an_item_that_moves_forward_again_and_again_leaves_no_trace_in_the_order() -> None:
    order = FirstTaskHeap[ResourceClass]()
    classes = [ResourceClass(Queue("q"), 3, shape_of(Spec(kind=f"kind{n}"))) for n in range(2)]
    for task_id in range(1000, 0, -1):
        resource_class = classes[task_id % 2]
        resource_class.position = (3, task_id)
        order.update(resource_class)
        assert order.first() is resource_class
    assert len(order._heap) < 200


def test_an_item_that_moved_to_another_order_is_not_found_in_the_first() -> None:
    orders = [FirstTaskHeap[ResourceClass]() for _ in range(2)]
    item = ResourceClass(Queue("q"), 3, shape_of(Spec(kind="run")))
    item.position = (3, 7)
    orders[0].update(item)
    orders[0].remove(item)
    orders[1].update(item)
    assert orders[0].first() is None
    assert orders[1].first() is item
