"""Tenants and tasks of other tenants, which must appear not to exist."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2, worker_service_pb2

from tests.fleet import until
from tests.security.secured import Caller, SecuredFleet, hello, run_request

NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNKNOWN = 1 << 50


@pytest.fixture(scope="module")
def alice(secured: SecuredFleet) -> Caller:
    return secured.as_role("submit", queues=["a", "shared"])


@pytest.fixture(scope="module")
def mallory(secured: SecuredFleet) -> Caller:
    return secured.as_role("submit", queues=["m", "shared"])


@pytest.fixture(scope="module")
def task_id(alice: Caller) -> int:
    """A waiting task of Alice."""
    (result,) = alice.submit("a", b"secret", request_ids=("alice-1",))
    return int(result.task_id)


@pytest.fixture(scope="module")
def settled_id(alice: Caller) -> int:
    """A settled task of Alice, known only to the journal."""
    (result,) = alice.submit("a", b"secret", request_ids=("alice-0",))
    request = task_service_pb2.CancelRequest(task_ids=[result.task_id])
    assert alice.call("TaskService/Cancel", request).cancelled_task_ids == [result.task_id]
    until(
        lambda: alice.call("TaskService/Count", _filter(outcomes=[task_pb2.OUTCOME_STATE_CANCELLED])).cancelled,
        what="the outcome",
    )
    return int(result.task_id)


@pytest.fixture(scope="module")
def dead_id(secured: SecuredFleet, alice: Caller) -> int:
    """A dead letter of Alice."""
    request = run_request("a", "alice-dead", kind="deadly")
    request.batches[0].spec.attempts_max = 1
    (answer,) = alice.call("TaskService/Submit", task_service_pb2.SubmitRequest(batches=request.batches)).results
    session = secured.as_role("worker").open("WorkerService/Session", hello("w", "deadly"))
    while not (batches := session.next().lease_batches):
        pass
    failed = worker_service_pb2.Report(
        lease_id=batches[0].lease_ids[0],
        state=worker_service_pb2.REPORT_STATE_FAILED,
        error=task_pb2.TaskError(type="E", message="m", retryable=True),
    )
    report = worker_service_pb2.ReportBatch(reports=[failed])
    session.send(worker_service_pb2.SessionRequest(report_batches=[report]))
    until(lambda: _letters(alice), what="the dead letter")
    session.close()
    return int(answer.task_id)


def _letters(caller: Caller, queue: str = "") -> Any:
    return caller.call("AdminService/ListDeadLetters", admin_pb.ListDeadLettersRequest(queue=queue)).tasks


def _filter(**fields: Any) -> Any:
    return task_service_pb2.CountRequest(filter=task_service_pb2.TaskFilter(**fields))


def _details(caller: Caller, name: str, request: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        caller.call(name, request)
    assert caught.value.code() is NOT_FOUND
    return str(caught.value.details())


@pytest.mark.parametrize("name", ["TaskService/Get", "AdminService/Explain"])
def test_a_guessed_task_id_is_not_found(
    mallory: Caller, alice: Caller, task_id: int, settled_id: int, name: str
) -> None:
    make = task_service_pb2.GetRequest if "Get" in name else admin_pb.ExplainRequest
    nothing = _details(mallory, name, make(task_id=UNKNOWN))
    for guessed in (task_id, settled_id):
        assert alice.status(name, make(task_id=guessed)) is grpc.StatusCode.OK
        assert _details(mallory, name, make(task_id=guessed)) == nothing.replace(str(UNKNOWN), str(guessed))


def test_a_guessed_request_id_is_not_found(mallory: Caller, alice: Caller, task_id: int, settled_id: int) -> None:
    for request_id in ("alice-1", "alice-0"):
        request = task_service_pb2.GetRequest(request_id=request_id)
        request.wait.FromMilliseconds(1)
        assert alice.status("TaskService/Get", request) is grpc.StatusCode.OK
        assert mallory.status("TaskService/Get", request) is NOT_FOUND


def test_lists_and_counts_hold_own_tasks_only(mallory: Caller, alice: Caller, task_id: int, settled_id: int) -> None:
    mallory.submit("m", b"own")
    for wanted in (task_service_pb2.TaskFilter(), task_service_pb2.TaskFilter(queue="a")):
        request = task_service_pb2.ListRequest(filter=wanted, page_size=1000)
        assert {t.spec.queue for t in alice.call("TaskService/List", request).tasks} >= {"a"}
        seen = {t.spec.queue for t in mallory.call("TaskService/List", request).tasks}
        assert seen == ({"m"} if not wanted.queue else set())
    assert mallory.call("TaskService/Count", _filter()) == task_service_pb2.CountResponse(queued=1)
    assert mallory.call("TaskService/Count", _filter(queue="a")) == task_service_pb2.CountResponse()
    assert {q.queue for q in mallory.call("AdminService/ListQueues").queues} <= {"m", "shared"}
    assert {q.queue for q in alice.call("AdminService/ListQueues").queues} >= {"a"}


def test_another_tenants_task_is_not_cancelled(mallory: Caller, alice: Caller, task_id: int, settled_id: int) -> None:
    request = task_service_pb2.CancelRequest(
        task_ids=[UNKNOWN, task_id, settled_id], request_ids=["alice-1", "nobody's", "alice-0"]
    )
    answer = mallory.call("TaskService/Cancel", request)
    # In the order of the request: another order would show which of them are live.
    assert list(answer.unknown) == [str(UNKNOWN), str(task_id), str(settled_id), "alice-1", "nobody's", "alice-0"]
    assert not answer.cancelled_task_ids and not answer.settled_task_ids
    stream = mallory.open("TaskService/Run", task_service_pb2.RunRequest(cancel_request_ids=["alice-1"]))
    (rejection,) = stream.next().rejected
    stream.close()
    assert rejection.code == NOT_FOUND.value[0]
    state = alice.call("TaskService/Get", task_service_pb2.GetRequest(task_id=task_id)).task.state
    assert state == task_pb2.TASK_STATE_QUEUED


def test_watch_sends_own_outcomes_only(mallory: Caller, alice: Caller, secured: SecuredFleet, settled_id: int) -> None:
    def outcomes(caller: Caller, queue: str) -> set[int]:
        """Up to an outcome that both may see."""
        stream = caller.open("TaskService/Watch", task_service_pb2.WatchRequest(queue=queue))
        seen: set[int] = set()
        while end not in seen:
            seen |= {o.task_id for o in stream.next().outcomes}
        stream.close()
        return seen

    (last,) = mallory.submit("shared", b"x", request_ids=("end",))
    end = int(last.task_id)
    mallory.call("TaskService/Cancel", task_service_pb2.CancelRequest(task_ids=[end]))
    assert settled_id in outcomes(alice, "")
    assert (outcomes(mallory, ""), outcomes(mallory, "shared")) == ({end}, {end})
    assert settled_id in outcomes(secured.admin, "")


def test_submitting_to_another_tenants_queue_is_rejected(mallory: Caller) -> None:
    for queue in ("a", "default", ""):
        (result,) = mallory.submit(queue, b"x")
        assert result.rejection.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
    stream = mallory.open("TaskService/Run", run_request("a", "x1"))
    (rejection,) = stream.next().rejected
    stream.close()
    assert rejection.code == grpc.StatusCode.PERMISSION_DENIED.value[0]


@pytest.mark.parametrize("request_id", ["alice-1", "alice-0"])
def test_joining_another_tenants_task_is_rejected(
    mallory: Caller, alice: Caller, task_id: int, settled_id: int, request_id: str
) -> None:
    """With the same request_id a caller would get its outcome."""
    (result,) = mallory.submit("m", b"x", request_ids=(request_id,))
    assert result.rejection.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    stream = mallory.open("TaskService/Run", run_request("m", request_id, "fresh-" + request_id))
    rejected: list[Any] = []
    accepted: list[Any] = []
    while not (rejected and accepted):
        frame = stream.next()
        rejected += frame.rejected
        accepted += frame.accepted
        assert not frame.outcomes
    stream.close()
    assert [r.request_id for r in rejected] == [request_id]
    assert [a.request_id for a in accepted] == ["fresh-" + request_id]
    spec = task_pb2.TaskSpec(kind="echo", queue="m", durability=task_pb2.DURABILITY_EPHEMERAL)
    batch = task_pb2.TaskBatch(spec=spec, inputs=[task_pb2.TaskInput(request_id=request_id, payload=b"x")])
    ephemeral = mallory.call("TaskService/Submit", task_service_pb2.SubmitRequest(batches=[batch]))
    assert ephemeral.results[0].rejection.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    (same,) = alice.submit("a", b"secret", request_ids=(request_id,))
    assert same.task_id in (task_id, settled_id)


def test_strategies_of_hidden_queues_are_those_of_unknown_queues(mallory: Caller, secured: SecuredFleet) -> None:
    secured.admin.call("AdminService/SetStrategy", admin_pb.SetStrategyRequest(queue="a", strategy="round_robin"))
    try:
        theirs, unknown = (
            mallory.call("AdminService/GetStrategy", admin_pb.GetStrategyRequest(queue=name)) for name in ("a", "none")
        )
        assert theirs == unknown
    finally:
        secured.admin.call("AdminService/SetStrategy", admin_pb.SetStrategyRequest(queue="a"))


def test_dead_letters_of_other_tenants_are_hidden(
    mallory: Caller, alice: Caller, secured: SecuredFleet, dead_id: int
) -> None:
    assert dead_id in {t.task_id for t in _letters(alice)}
    assert dead_id in {t.task_id for t in _letters(alice, "a")}
    assert dead_id in {t.task_id for t in _letters(secured.admin)}
    assert not _letters(mallory) and not _letters(mallory, "a")
    for name, make in (
        ("AdminService/RequeueDeadLetters", admin_pb.RequeueDeadLettersRequest),
        ("AdminService/DeleteDeadLetters", admin_pb.DeleteDeadLettersRequest),
    ):
        assert mallory.status(name, make(task_ids=[dead_id])) is grpc.StatusCode.PERMISSION_DENIED


def test_the_payload_directory_is_not_shared_with_a_tenant(mallory: Caller, secured: SecuredFleet) -> None:
    everywhere = secured.as_role("submit")
    key_files = list((secured.fleet.data_dir / "payloads").glob("KEY*"))
    assert len(key_files) == 1
    key = key_files[0].read_bytes()
    offered = {}
    for name, caller in (("tenant", mallory), ("all", everywhere)):
        stream = caller.open("TaskService/Run", task_service_pb2.RunRequest(payload_key=key))
        if name == "tenant":
            assert stream.end() is grpc.StatusCode.INVALID_ARGUMENT
        offered[name] = {k for k, _ in stream.call.initial_metadata() if "payload" in k}
        stream.close()
    assert not offered["tenant"]
    assert offered["all"]


def test_tenants_of_one_queue_see_each_others_tasks(mallory: Caller, alice: Caller) -> None:
    (result,) = alice.submit("shared", b"x")
    assert mallory.status("TaskService/Get", task_service_pb2.GetRequest(task_id=result.task_id)) is grpc.StatusCode.OK


def test_the_journal_finds_nothing_for_an_empty_set_of_queues(secured: SecuredFleet, tmp_path: Path) -> None:
    """An empty set means no queue, not all."""
    from multigpu_master.journal.protocol import OutcomeFilter
    from multigpu_master.journal.sqlite.journal import SqliteJournal

    journal = SqliteJournal(tmp_path / "data", size_max_bytes=1 << 30)
    journal.open(lambda *_: None)
    try:
        assert journal.count_outcomes(OutcomeFilter(queues=())) == {}
        assert journal.list_outcomes(OutcomeFilter(queues=()), 0, 9) == []
        assert journal.list_dead_letters(queue="", before_task_id=0, limit=9, queues=()) == []
    finally:
        journal.close(5)
