"""Invalid input is rejected at once with a status and a remedy, without effect on other callers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb

from tests.fleet import Fleet, rejected, until
from tests.integration.streams import Feed, collect, run_frame

FLEET = {
    "workers": 1,
    "handlers": ["trial_handlers"],
    "master_flags": ["--submit-tasks-max", "100", "--payload-bytes-max", "1MiB", "--stream-bytes-max", "4MiB"],
}

INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 3, 4, 8, 9


@pytest.fixture(autouse=True)
def _nothing_is_kept_of_it(fleet: Fleet) -> Iterator[None]:
    """After each test the master works and holds no task."""
    yield
    (task_id,) = fleet.submit("echo", b"still there")
    assert fleet.outcome(task_id).result == b"still there"
    until(lambda: (stats := fleet.stats()).queued == stats.leased == 0)


def forget(fleet: Fleet, name: str) -> None:
    until(lambda: fleet.worker(name).state == admin_pb.WORKER_STATE_LOST)
    fleet.admin.ForgetWorker(admin_pb.ForgetWorkerRequest(worker_id=name), timeout=30)


def rejection(fleet: Fleet, payload: bytes = b"x", **spec: Any) -> Any:
    """The rejection of a task by Submit. Run must give the same."""
    kind = spec.pop("kind", "echo")
    (result,) = fleet.submit_raw(kind, payload, request_ids=["bad"], **spec).results
    assert result.WhichOneof("answer") == "rejection", result
    heard = collect(fleet.tasks.Run(iter([run_frame(kind, ("bad", payload), **spec)]), timeout=30))
    assert not heard.accepted and not heard.outcomes
    assert [(r.request_id, r.code) for r in heard.rejected] == [("bad", result.rejection.code)]
    return result.rejection


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": ""}, "kind is missing"),
        ({"kind": "k" * 129}, "at most 128"),
        ({"kind": "a\0b"}, "control or invisible characters"),
        ({"model": "m" * 257}, "at most 256"),
        ({"queue": "q" * 129}, "at most 128"),
        ({"content_type": "c" * 129}, "content_type has 129 bytes; at most 128"),
        ({"priority": 9}, "priority 9 is out of range; use 1"),
        ({"priority": -1}, "priority -1"),
        ({"attempts_max": 101}, "use 1 to 100"),
        ({"durability": 7}, "durability 7 is unknown"),
        ({"parameters": {str(n): "" for n in range(65)}}, "at most 64"),
        ({"parameters": {"k": "v" * (64 << 10)}}, "put data in the payload"),
        ({"run_timeout": Duration(seconds=-1)}, "run_timeout is -1 s; it must be above zero"),
        ({"queue_timeout": Duration()}, "queue_timeout is 0 s"),
        ({"queue_timeout": Duration(nanos=999_999)}, "queue_timeout is 0.000999999 s; it must be at least 0.001 s"),
        ({"payload": bytes((1 << 20) + 1)}, "payload_bytes_max"),
    ],
)
def test_an_invalid_task_is_rejected(fleet: Fleet, spec: dict[str, Any], words: str) -> None:
    answer = rejection(fleet, **spec)
    assert answer.code == INVALID_ARGUMENT
    assert words in answer.message
    assert not answer.HasField("retry_delay")


def test_a_request_id_is_limited_in_bytes(fleet: Fleet) -> None:
    (taken, rejected) = fleet.submit_raw("echo", b"x", b"x", request_ids=["é" * 64, "é" * 65]).results
    assert taken.task_id
    assert rejected.rejection.code == INVALID_ARGUMENT
    assert "128 bytes" in rejected.rejection.message


def test_a_deadline_in_the_past(fleet: Fleet) -> None:
    answer = rejection(fleet, deadline=Timestamp(seconds=int(time.time()) - 10))
    assert answer.code == DEADLINE_EXCEEDED
    assert "later one" in answer.message


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "no.such.kind"}, "no worker runs kind 'no.such.kind' (the fleet runs echo"),
        ({"kind": "ech"}, "no worker runs kind 'ech', did you mean 'echo'? (the fleet runs"),
        ({"kind": "embed", "model": "no-such-model"}, "no worker has model 'no-such-model'"),
        ({"required_labels": {"site": "moon"}}, "needs the label site=moon"),
        ({"required_device_memory_bytes": 1 << 60}, "bytes of device memory"),
    ],
)
def test_a_task_that_no_worker_can_run_is_rejected(fleet: Fleet, spec: dict[str, Any], words: str) -> None:
    answer = rejection(fleet, **spec)
    assert answer.code == FAILED_PRECONDITION
    assert words in answer.message
    assert "wait_for_worker" in answer.message


def test_wait_for_worker_accepts_a_task_that_no_worker_can_run(fleet: Fleet) -> None:
    (task_id,) = fleet.submit("echo", b"to the moon", required_labels={"site": "moon"}, wait_for_worker=True)
    assert fleet.get(task_id, 0.2).state == task_pb2.TASK_STATE_QUEUED
    explanation = fleet.admin.Explain(admin_pb.ExplainRequest(task_id=task_id), timeout=30)
    assert "site=moon" in explanation.summary
    assert [list(c.excluded_by) for c in explanation.candidates] == [["needs the label site=moon, has none"]]
    fleet.start_worker("moon", "--labels", "site=moon")
    fleet.wait_for_workers("moon")
    try:
        outcome = fleet.outcome(task_id)
        assert (outcome.result, outcome.worker_id) == (b"to the moon", "moon")
    finally:
        fleet.workers.pop("moon").kill()
        forget(fleet, "moon")


def test_too_many_tasks_in_one_submit(fleet: Fleet) -> None:
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "101 tasks in one Submit; at most 100", "send several"):
        fleet.submit_raw("echo", *(b"" for _ in range(101)))


def test_run_needs_request_ids(fleet: Fleet) -> None:
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "needs a request_id"):
        collect(fleet.tasks.Run(iter([run_frame("echo", ("", b"x"))]), timeout=30))


# A SubmitRequest whose kind is not UTF-8: batches { spec { kind: "\xff\xfe" } }
NOT_UTF8 = b"\x0a\x06\x0a\x04\x0a\x02\xff\xfe"
NOT_OURS = b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("data", [NOT_UTF8, NOT_OURS])
@pytest.mark.parametrize("method", ["TaskService/Submit", "TaskService/Run", "WorkerService/Session"])
def test_bytes_that_are_no_message(fleet: Fleet, method: str, data: bytes) -> None:
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "not a multigpu.v1.", "UTF-8"):
        if method.endswith("Submit"):
            fleet.channel.unary_unary(f"/multigpu.v1.{method}")(data, timeout=30)
        elif method.endswith("Session") and data is NOT_UTF8:
            # hello { worker_id: "\xff\xfe" }
            list(fleet.channel.stream_stream(f"/multigpu.v1.{method}")(iter([b"\x0a\x04\x12\x02\xff\xfe"]), timeout=30))
        else:
            list(fleet.channel.stream_stream(f"/multigpu.v1.{method}")(iter([data]), timeout=30))


def test_a_bad_frame_ends_only_its_own_stream(fleet: Fleet) -> None:
    good = fleet.tasks.Run(feed := Feed(run_frame("echo", ("before", b"1"))), timeout=20)
    assert next(good)
    with rejected(grpc.StatusCode.INVALID_ARGUMENT):
        list(fleet.channel.stream_stream("/multigpu.v1.TaskService/Run")(iter([NOT_OURS]), timeout=30))
    feed.put(run_frame("echo", ("after", b"2")))
    feed.close()
    assert "after" in {o.request_id for o in collect(good).outcomes}


def hello(**fields: Any) -> worker_pb.SessionRequest:
    known: dict[str, Any] = {"protocol_version": 2, "slots": 1, "window_tasks": 1, "window_bytes": 1}
    known |= {"worker_id": "stranger", "capabilities": [worker_pb.Capability(kind="stranger.kind")]}
    return worker_pb.SessionRequest(hello=worker_pb.Hello(**known | fields))


@pytest.mark.parametrize(
    ("frame", "code", "words"),
    [
        (hello(protocol_version=3), grpc.StatusCode.FAILED_PRECONDITION, ("protocol 3", "upgrade the master")),
        (hello(protocol_version=1), grpc.StatusCode.FAILED_PRECONDITION, ("protocol 1", "upgrade the worker")),
        (hello(worker_id=""), grpc.StatusCode.INVALID_ARGUMENT, ("worker_id",)),
        (hello(worker_id="w" * 129), grpc.StatusCode.INVALID_ARGUMENT, ("worker_id",)),
        (hello(capabilities=[]), grpc.StatusCode.INVALID_ARGUMENT, ("capabilities",)),
        (worker_pb.SessionRequest(), grpc.StatusCode.FAILED_PRECONDITION, ("must carry hello",)),
    ],
)
def test_an_invalid_hello_is_rejected(
    fleet: Fleet, frame: worker_pb.SessionRequest, code: grpc.StatusCode, words: tuple[str, ...]
) -> None:
    with rejected(code, *words):
        list(fleet.sessions.Session(iter([frame]), timeout=30))
    assert {w.worker_id for w in fleet.list_workers()} == {"w0"}


def test_reports_of_unknown_leases_are_counted(fleet: Fleet) -> None:
    before = fleet.stats().stale_reports
    failed = worker_pb.Report(lease_id=5, state=worker_pb.REPORT_STATE_FAILED)
    reports = worker_pb.ReportBatch(succeeded_lease_ids=[1, 2, 3, 4], results=[b"a", b"b"], reports=[failed])
    feed = Feed(hello(), worker_pb.SessionRequest(report_batches=[reports]))
    session = fleet.sessions.Session(feed, timeout=20)
    assert next(session).HasField("welcome")
    until(lambda: fleet.stats().stale_reports == before + 5)
    feed.close()
    list(session)
    forget(fleet, "stranger")


def test_a_silent_worker_is_lost_and_its_task_runs_elsewhere(fleet: Fleet) -> None:
    feed = Feed(hello(worker_id="silent", capabilities=[worker_pb.Capability(kind="echo")], window_tasks=5))
    session = fleet.sessions.Session(feed, timeout=20)
    assert next(session).HasField("welcome")
    fleet.admin.CordonWorker(admin_pb.CordonWorkerRequest(worker_id="w0"), timeout=30)
    (task_id,) = fleet.submit("echo", b"held")
    until(lambda: fleet.get(task_id).worker_id == "silent")
    fleet.admin.UncordonWorker(admin_pb.UncordonWorkerRequest(worker_id="w0"), timeout=30)
    outcome = fleet.outcome(task_id)
    assert (outcome.worker_id, outcome.result) == ("w0", b"held")
    with rejected(grpc.StatusCode.UNAVAILABLE, "nothing heard"):
        list(session)
    forget(fleet, "silent")


def test_the_report_of_a_lost_lease_is_ignored(fleet: Fleet, tmp_path: Path) -> None:
    """The worker was silent, and its task went to another worker, before it reports success."""
    gate = tmp_path / "gate"
    late = {"worker_id": "late", "capabilities": [worker_pb.Capability(kind="trial.gate")], "window_tasks": 5}
    fleet.admin.CordonWorker(admin_pb.CordonWorkerRequest(worker_id="w0"), timeout=30)
    first = fleet.sessions.Session(Feed(hello(**late)), timeout=20)
    incarnation = next(first).welcome.incarnation
    assert incarnation
    (task_id,) = fleet.submit("trial.gate", str(gate).encode())
    lease = next(b for frame in first for b in frame.lease_batches)
    assert lease.task_ids == [task_id]
    fleet.admin.UncordonWorker(admin_pb.UncordonWorkerRequest(worker_id="w0"), timeout=30)
    with rejected(grpc.StatusCode.UNAVAILABLE, "nothing heard"):
        list(first)
    until(lambda: fleet.get(task_id).worker_id == "w0")

    before = fleet.stats().stale_reports
    (lease_id,) = lease.lease_ids
    held = worker_pb.HeldLease(lease_id=lease_id, task_id=task_id, attempt=1, running=True)
    report = worker_pb.ReportBatch(succeeded_lease_ids=[lease_id], results=[b"too late"])
    feed = Feed(hello(**late, leases=[held], incarnation=incarnation))
    feed.put(worker_pb.SessionRequest(report_batches=[report]))
    second = fleet.sessions.Session(feed, timeout=20)
    frame = next(second)
    assert not frame.welcome.adopted_lease_ids
    assert [r.lease_id for r in frame.revocations] == [lease_id]
    until(lambda: fleet.stats().stale_reports == before + 1)
    assert fleet.get(task_id).state == task_pb2.TASK_STATE_LEASED
    gate.touch()
    outcome = fleet.outcome(task_id)
    assert (outcome.result, outcome.worker_id) == (b"opened", "w0")
    feed.close()
    list(second)
    forget(fleet, "late")


def test_a_stream_that_is_never_read_ends_and_loses_no_outcome(fleet: Fleet) -> None:
    payload = bytes(256 << 10)
    names = [f"unread-{n}" for n in range(120)]  # 30 MiB of outcomes
    succeeded = fleet.stats().succeeded
    stream = fleet.tasks.Run(iter([run_frame("echo", *((n, payload) for n in names))]), timeout=60)
    until(lambda: fleet.stats().succeeded == succeeded + len(names))
    memory = fleet.stats().memory_bytes
    with rejected(grpc.StatusCode.RESOURCE_EXHAUSTED, "unread"):
        list(stream)
    assert memory < 400 << 20
    for name in names[:: len(names) // 10]:
        request = task_service_pb2.GetRequest(request_id=name)
        assert fleet.tasks.Get(request, timeout=30).task.outcome.result == payload
