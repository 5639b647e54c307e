"""The journal, silence, pace and limits: rules that the simulator meets too seldom to rely on."""

from multigpu_master.core import events as ev
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.scheduler import STREAMS_MAX, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.core.workers.sessions import PARTIAL_OVERHEAD_BYTES, PARTIALS_BYTES_MAX

from tests.core.stage import SPEC, Stage, lease_of, leased, state_of


def test_a_stream_that_lives_keeps_its_place_however_often_another_comes_back() -> None:
    stage = Stage()
    spec = Spec(kind="run", wait_for_worker=True)
    for stream in range(1, 9):
        stage.handle(ev.StreamOpened(stream))
        (task,) = stage.submitted([Task(spec, "r", b"")], stream).results
        if stream > 1:
            stage.handle(ev.StreamClosed(stream))
    assert isinstance(task, Task)
    assert task.streams[0] == 1


def test_at_most_streams_max_streams_wait_for_one_task() -> None:
    stage = Stage()
    spec = Spec(kind="run", wait_for_worker=True)
    for stream in range(1, STREAMS_MAX + 2):
        stage.handle(ev.StreamOpened(stream))
        (answer,) = stage.submitted([Task(spec, "r", b"")], stream).results
        assert isinstance(answer, Task) is (stream <= STREAMS_MAX)
    assert isinstance(answer, ev.Rejection)
    assert answer.code == 8
    assert answer.retry_delay_s


def test_reports_that_come_together_do_not_widen_the_window() -> None:
    stage = Stage()
    stage.worker(slots=1)
    tasks = stage.submit(200)
    for _ in range(20):
        leased = [t for t in tasks if t.lease is not None]
        for i, task in enumerate(leased[:2]):
            stage.report(lease_of(task), after_s=0.0005 if i else 0.2)
    worker = stage.core.fleet.workers["w"]
    assert 2 <= worker.pace.leases_max <= 6  # ten tasks a second, half a second ahead
    assert worker.pace.unit_s == {}  # nobody said how long they ran


def test_a_window_that_grows_with_a_stale_report_is_used() -> None:
    stage = Stage()
    stage.worker(slots=1)
    tasks = stage.submit(9)
    for i, after_s in enumerate((0.001, 0.001, 0.001)):
        stage.report(lease_of(tasks[i]), after_s=after_s)  # too soon after the start to say anything of its pace
    assert [t.lease is not None for t in tasks[3:]] == [True, True, False, False, False, False]
    stage.handle(ev.Reports(stage.sessions, [1], [b""]), 0.004)  # stale
    assert all(t.lease is not None for t in tasks[3:])


def test_an_idle_worker_is_not_taken_for_a_slow_one() -> None:
    stage = Stage()
    stage.worker(slots=1)
    for _ in range(50):
        (task,) = stage.submit()
        stage.report(lease_of(task), after_s=0.01)
        stage.now += 30.0
        stage.beat()
    assert abs(stage.core.fleet.workers["w"].pace.task_s - 0.01) < 0.002


def test_a_queue_that_is_forgotten_and_comes_back_keeps_its_accounts() -> None:
    stage, task = leased(Spec(kind="run", queue="q"))
    stage.report(lease_of(task))
    stage.core.ledger.prune_queues()
    assert "q" not in stage.core.ledger.queues
    (task,) = stage.submit(spec=Spec(kind="run", queue="q"))
    assert stage.core.ledger.queues["q"].leased == 1
    stage.report(lease_of(task))
    assert stage.core.ledger.queues["q"].leased == stage.core.ledger.queues["q"].queued == 0


def test_partial_outputs_count_and_so_do_empty_ones() -> None:
    """In their task's limit, and with the payloads of all: past that limit their attempt fails, and may be repeated."""
    room = 2 * len(b"payload") + 10 * PARTIAL_OVERHEAD_BYTES
    stage = Stage(Limits(bytes_max=room))
    stage.worker()
    one, two = stage.submit(2)

    def parts(task: Task, first: int, count: int) -> None:
        lease = lease_of(task)
        outputs = [ev.PartialOutput(lease.lease_id, n, b"") for n in range(first, first + count)]
        stage.handle(ev.Partials(lease.worker.session, outputs))

    parts(one, 0, 8)
    parts(two, 0, 3)
    assert two.lease is None
    assert two.extra is not None
    assert two.extra.last_error is not None
    assert (two.extra.last_error.type, len(two.extra.partials)) == ("ResourceExhausted", 2)
    assert two.outcome is None, "it may be tried again"
    assert stage.core.ledger.unsettled_bytes == room
    stage.report(lease_of(one))
    assert stage.core.ledger.unsettled_bytes == len(b"payload") + 2 * PARTIAL_OVERHEAD_BYTES
    stage.handle(ev.Tick(), 10.0)
    parts(two, 2, 8)
    stage.handle(ev.Cancel([two]))
    assert stage.core.ledger.unsettled_bytes == 0


def test_empty_partial_outputs_of_one_task_have_a_limit() -> None:
    stage, task = leased()
    lease = lease_of(task)
    count = PARTIALS_BYTES_MAX // PARTIAL_OVERHEAD_BYTES
    outputs = [ev.PartialOutput(lease.lease_id, n, b"") for n in range(count + 1)]
    stage.handle(ev.Partials(lease.worker.session, outputs[:count]))
    assert task.lease is lease
    stage.handle(ev.Partials(lease.worker.session, outputs[count:]))
    assert state_of(task) is OutcomeState.FAILED


def test_limits_reject_with_a_delay() -> None:
    stage = Stage(Limits(tasks_max=2, bytes_max=100))
    stage.submit(2)
    (rejection,) = stage.submitted([Task(SPEC, "", b"x")]).results
    assert isinstance(rejection, ev.Rejection)
    assert (rejection.code, rejection.retry_delay_s) == (8, 1.0)
    stage = Stage(Limits(bytes_max=10))
    assert len(stage.submit(2)) == 1


def test_a_rejection_names_few_of_many_kinds() -> None:
    stage = Stage()
    kinds = tuple(Capability(kind=f"kind-{n:04}") for n in range(2000))
    stage.handle(ev.Hello(1, WorkerInfo(worker_id="w", capabilities=kinds), ()))
    spec = Spec(kind="other")
    (rejection,) = stage.submitted([Task(spec, "r", b"")]).results
    assert isinstance(rejection, ev.Rejection)
    assert "kind-0019 and 1980 more" in rejection.message
