"""The journal, silence, pace and limits: rules that the simulator meets too seldom to rely on."""

from dataclasses import replace

from multigpu_master.core import events as ev
from multigpu_master.core.model import OutcomeState, Task, TaskError
from multigpu_master.core.scheduler import STREAMS_MAX, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo
from multigpu_master.core.workers.sessions import OUTCOME_BYTES_MAX, PARTIAL_OVERHEAD_BYTES, PARTIALS_BYTES_MAX

from tests.core.stage import SPEC, Stage, error_of, held_lease, lease_of, leased, state_of


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
    assert abs(stage.core.fleet.workers["w"].pace.rate - 100) < 20


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
    assert (two.extra.last_error, len(two.extra.partials)) == (None, 2), "there is no room for the error's text"
    assert two.extra.ended_attempts[-1].reason.startswith("ResourceExhausted")
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


def test_errors_and_checkpoints_count_with_the_payloads() -> None:
    """They did not: a model that failed on a million tasks could take all memory with its tracebacks."""
    room = 1000
    stage = Stage(Limits(bytes_max=room))
    stage.worker()
    (task,) = stage.submit()
    lease = lease_of(task)

    def save(checkpoint: bytes) -> None:
        held = replace(held_lease(lease, running=True), checkpoint=checkpoint)
        stage.handle(ev.Heartbeat(lease.worker.session, [held], 1 << 30, Telemetry()))

    save(bytes(500))
    assert stage.core.ledger.unsettled_bytes == len(b"payload") + 500
    save(bytes(5000))
    assert task.extra is not None
    assert task.extra.checkpoint == bytes(500), "there is no room for the larger one"
    failure = ev.Failure(lease.lease_id, TaskError("ValueError", "no good", traceback="x" * 5000))
    stage.handle(ev.Reports(lease.worker.session, failures=[failure]))
    assert task.extra.last_error is None
    stage.handle(ev.Cancel([task]))
    assert stage.core.ledger.unsettled_bytes == 0
    assert stage.core.ledger.uncommitted_bytes
    stage.handle(ev.SettlesDone([task]))
    assert stage.core.ledger.uncommitted_bytes == 0


def test_an_outcome_that_would_not_fit_into_a_message_is_a_failure() -> None:
    """A result of the allowed size, with partial outputs, succeeded, and no stream could carry it ever after."""
    stage = Stage()
    stage.worker()
    large, small = stage.submit(2)
    outputs = [ev.PartialOutput(lease_of(large).lease_id, n, bytes(1 << 20)) for n in range(15)]
    stage.handle(ev.Partials(stage.sessions, outputs))
    results = [bytes(OUTCOME_BYTES_MAX - (14 << 20)), b"small"]
    stage.handle(ev.Reports(stage.sessions, [lease_of(large).lease_id, lease_of(small).lease_id], results))
    assert (state_of(large), state_of(small)) == (OutcomeState.FAILED, OutcomeState.SUCCEEDED)
    assert error_of(large) == "ResultTooLarge"


def test_stale_leases_teach_nothing_of_the_time_that_tasks_take() -> None:
    """The time of a whole batch was divided by the few of its leases that still counted."""
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    ids = [lease_of(task).lease_id, 7]
    stage.handle(ev.Reports(stage.sessions, ids, [b"", b""], start_s=stage.now, finish_s=stage.now + 2.0), 3.0)
    assert state_of(task) is OutcomeState.SUCCEEDED
    assert stage.core.fleet.workers["w"].pace.unit_s == {}
