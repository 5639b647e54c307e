"""The client's door, by raw stubs and by the SDK: submit, run, get, list, count, cancel; one request, one task."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import multigpu
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Fleet, rejected, until
from tests.integration.streams import Feed, collect, run_frame

FLEET = {"handlers": ["trial_handlers"]}

SUCCEEDED, CANCELLED = task_pb2.OUTCOME_STATE_SUCCEEDED, task_pb2.OUTCOME_STATE_CANCELLED


def test_submit_answers_each_input_in_order_and_get_tells_the_end(fleet: Fleet) -> None:
    answer = fleet.submit_raw("echo", b"one", b"x" * (33 << 20), b"three")
    ids = [r.task_id for r in answer.results]
    assert ids[0] and ids[2]
    assert answer.results[1].rejection.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "payload_bytes_max" in answer.results[1].rejection.message
    outcome = fleet.outcome(ids[2])
    assert (outcome.state, outcome.result, outcome.attempts) == (SUCCEEDED, b"three", 1)
    assert outcome.worker_id in fleet.workers
    assert outcome.device_id == "cpu"
    stages = outcome.stages
    times = [
        t.ToNanoseconds() for t in (stages.submit_time, stages.dispatch_time, stages.start_time, stages.finish_time)
    ]
    assert 0 < times[0] <= times[1] <= times[2] <= times[3]


def test_a_task_that_streams_began_when_it_began_and_not_with_its_last_part(fleet: Fleet) -> None:
    (task_id,) = fleet.submit("trial.stream", b"x", parameters={"count": "4", "seconds": "0.1"})
    stages = fleet.outcome(task_id).stages
    assert stages.finish_time.ToNanoseconds() - stages.start_time.ToNanoseconds() >= 3 * 0.1 * 1e9


def test_get_waits_only_as_long_as_asked(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (task_id,) = fleet.submit("trial.gate", str(gate).encode())
    began = time.monotonic()
    assert fleet.get(task_id, 0.1).state != task_pb2.TASK_STATE_SETTLED
    assert 0.1 <= time.monotonic() - began < 10
    gate.touch()
    assert fleet.outcome(task_id).result == b"opened"


def test_a_task_nobody_submitted_is_not_found(fleet: Fleet) -> None:
    with rejected(grpc.StatusCode.NOT_FOUND, "never submitted"):
        fleet.get(1)
    with rejected(grpc.StatusCode.NOT_FOUND):
        fleet.tasks.Get(task_service_pb2.GetRequest(request_id="nobody's"), timeout=30)


def test_run_answers_every_task_and_ends_when_nothing_is_owed(fleet: Fleet) -> None:
    frames = [run_frame("echo", *((f"run-{n}-{i}", b"%d" % i) for i in range(100))) for n in range(3)]
    received = collect(fleet.tasks.Run(iter(frames), timeout=20))
    assert not received.rejected and not received.partials
    assert {o.request_id: o.result for o in received.outcomes} == {
        f"run-{n}-{i}": b"%d" % i for n in range(3) for i in range(100)
    }
    assert len(received.outcomes) == 300
    assert {a.request_id for a in received.accepted} <= {o.request_id for o in received.outcomes}


def test_run_streams_partial_outputs_before_the_outcome(fleet: Fleet) -> None:
    feed = Feed(run_frame("trial.stream", ("partials", b"p"), parameters={"count": "4"}))
    stream = fleet.tasks.Run(feed, timeout=20)
    seen: list[tuple[int, bytes]] = []
    outcome: Any = None
    for frame in stream:
        assert outcome is None, "nothing comes after the outcome"
        seen += [(p.index, p.data) for p in frame.partials]
        outcome = next(iter(frame.outcomes), None)
        if outcome is not None:
            feed.close()
    assert seen == [(n, b"p-%d" % n) for n in range(4)]
    assert (outcome.result, list(outcome.partials)) == (b"end of p", [data for _, data in seen])


def test_run_cancels_by_request_id(fleet: Fleet, tmp_path: Path) -> None:
    feed = Feed(run_frame("trial.gate", ("gated", str(tmp_path / "never").encode())))
    stream = fleet.tasks.Run(feed, timeout=20)
    assert next(stream).accepted[0].request_id == "gated"
    feed.put(task_service_pb2.RunRequest(cancel_request_ids=["gated", "nobody's"]))
    feed.close()
    outcomes = collect(stream).outcomes
    assert [(o.request_id, o.state, o.error.type) for o in outcomes] == [("gated", CANCELLED, "Withdrawn")]


@pytest.mark.parametrize("by", ["Submit", "another client", "the same client"])
def test_a_withdrawal_ends_the_clients_own_task_and_leaves_one_that_it_joined(
    fleet: Fleet, tmp_path: Path, by: str
) -> None:
    name, gate = f"submitted by {by}", tmp_path / "gate"
    frame = run_frame("trial.gate", (name, str(gate).encode()))
    frame.client_id = "ours"
    if by == "Submit":
        fleet.submit("trial.gate", str(gate).encode(), request_ids=[name])
    else:
        first = task_service_pb2.RunRequest.FromString(frame.SerializeToString())
        first.client_id = "ours" if by == "the same client" else "theirs"
        submitter = fleet.tasks.Run(Feed(first), timeout=20)
        assert next(submitter).accepted[0].request_id == name
        if by == "the same client":
            submitter.cancel()
    feed = Feed(frame)
    stream = fleet.tasks.Run(feed, timeout=20)
    assert next(stream).accepted[0].request_id == name
    feed.put(task_service_pb2.RunRequest(cancel_request_ids=[name]))
    feed.close()
    received = collect(stream)
    if by == "the same client":
        assert [(o.state, o.error.type) for o in received.outcomes] == [(CANCELLED, "Withdrawn")]
        return
    assert [(r.request_id, r.code) for r in received.rejected] == [(name, grpc.StatusCode.CANCELLED.value[0])]
    assert "the task goes on" in received.rejected[0].message
    gate.touch()
    request = task_service_pb2.GetRequest(request_id=name, wait=Duration(seconds=20))
    assert fleet.tasks.Get(request, timeout=30).task.outcome.result == b"opened"
    if by == "another client":
        assert next(o.request_id for answer in submitter for o in answer.outcomes) == name
        submitter.cancel()


def test_a_run_that_times_out_leaves_a_submitted_task_that_it_joined(fleet: Fleet, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate").encode()
    (task_id,) = fleet.submit("trial.gate", gate, request_ids=["acknowledged"])
    with fleet.client() as client, pytest.raises(multigpu.CallTimeoutError):
        client.run("trial.gate", gate, request_id="acknowledged", timeout=0.5)
    (tmp_path / "gate").touch()
    assert fleet.outcome(task_id).result == b"opened"


def test_get_without_a_key_says_that_one_is_missing(fleet: Fleet) -> None:
    for request in (task_service_pb2.GetRequest(), task_service_pb2.GetRequest(task_id=0)):
        with rejected(grpc.StatusCode.INVALID_ARGUMENT, "names no task"):
            fleet.tasks.Get(request, timeout=30)


@pytest.mark.parametrize(
    "message", ["EmbedPayload", "InferPayload", "ClassifyPayload", "GeneratePayload", "RerankPayload"]
)
def test_reflection_knows_the_messages_of_payloads(fleet: Fleet, message: str) -> None:
    symbol = f"multigpu.v1.{message}"
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    stub = reflection_pb2_grpc.ServerReflectionStub(fleet.channel)
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=30)
    assert not answer.HasField("error_response"), answer.error_response.error_message
    assert message.encode() in b"".join(answer.file_descriptor_response.file_descriptor_proto)


def test_cancel_reports_cancelled_ended_and_unknown_tasks(fleet: Fleet, tmp_path: Path) -> None:
    (done,) = fleet.submit("echo", b"x")
    fleet.outcome(done)
    never = str(tmp_path / "never").encode()
    running, named = fleet.submit("trial.gate", never, never, request_ids=["", "by-name"])
    until(lambda: fleet.get(running).state == task_pb2.TASK_STATE_LEASED)
    request = task_service_pb2.CancelRequest(
        task_ids=[done, running, 12345], request_ids=["by-name", "nobody's"], reason="no longer wanted"
    )
    answer = fleet.tasks.Cancel(request, timeout=30)
    assert sorted(answer.cancelled_task_ids) == sorted([running, named])
    assert (list(answer.settled_task_ids), list(answer.unknown)) == ([done], ["12345", "nobody's"])
    outcome = fleet.outcome(running)
    assert (outcome.state, outcome.error.message) == (CANCELLED, "no longer wanted")
    # Again: they have ended.
    answer = fleet.tasks.Cancel(task_service_pb2.CancelRequest(task_ids=[running], request_ids=["by-name"]), timeout=30)
    assert not answer.cancelled_task_ids
    assert list(answer.settled_task_ids) == [running, named]


@pytest.mark.parametrize("oldest_first", [False, True])
def test_list_pages_in_order_and_count_agrees(fleet: Fleet, oldest_first: bool) -> None:
    """Of tasks that the core has, and of settled ones that only the journal has."""
    queue = f"listed-{oldest_first}"
    ids = fleet.submit("echo", *(b"%d" % n for n in range(25)), queue=queue)
    for task_id in ids:
        fleet.outcome(task_id)
    waiting = fleet.submit("nobody has this kind", b"", queue=queue, wait_for_worker=True)
    seen: list[int] = []
    token = ""
    while True:
        request = task_service_pb2.ListRequest(
            filter=task_service_pb2.TaskFilter(queue=queue), page_size=10, page_token=token, oldest_first=oldest_first
        )
        page = fleet.tasks.List(request, timeout=30)
        assert all(not t.outcome.result for t in page.tasks)
        seen += [t.task_id for t in page.tasks]
        token = page.next_page_token
        if not token:
            break
    assert seen == sorted([*ids, *waiting], reverse=not oldest_first)

    def counted() -> bool:
        request = task_service_pb2.CountRequest(filter=task_service_pb2.TaskFilter(queue=queue))
        answer = fleet.tasks.Count(request, timeout=30)
        return (answer.queued, answer.leased, answer.succeeded) == (1, 0, 25)

    until(counted)
    none = task_service_pb2.TaskFilter(queue="listed", outcomes=[task_pb2.OUTCOME_STATE_FAILED])
    assert not fleet.tasks.List(task_service_pb2.ListRequest(filter=none), timeout=30).tasks
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "page_size"):
        fleet.tasks.List(task_service_pb2.ListRequest(page_size=1001), timeout=30)
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "page_token"):
        fleet.tasks.List(task_service_pb2.ListRequest(page_token="junk"), timeout=30)


def test_the_spec_of_a_settled_durable_task_is_its_kind_model_and_queue(fleet: Fleet) -> None:
    spec: dict[str, Any] = {"queue": "kept", "priority": 2, "parameters": {"seconds": "0"}}
    (settled,) = fleet.submit("trial.nap", b"abc", **spec)
    assert fleet.outcome(settled).state == SUCCEEDED
    task = until(lambda: t if not (t := fleet.get(settled)).spec.priority else None)
    assert task.spec == task_pb2.TaskSpec(kind="trial.nap", queue="kept")
    assert (task.partition_key, task.payload_bytes) == ("", 0)
    (letter,) = fleet.submit("trial.raise", b"abc", attempts_max=1, **spec)
    assert fleet.outcome(letter).state == task_pb2.OUTCOME_STATE_DEAD_LETTERED
    task = fleet.get(letter)
    assert (task.spec.priority, task.spec.parameters["seconds"], task.payload_bytes) == (2, "0", 3)


def test_partial_outputs_of_a_task_that_ended_before_a_resumption_are_in_its_outcome(fleet: Fleet) -> None:
    (task_id,) = fleet.submit("trial.stream", b"p", request_ids=["resumed"], parameters={"count": "3"})
    assert fleet.outcome(task_id).state == SUCCEEDED
    frame = run_frame("trial.stream", ("resumed", b"p"), received=1, parameters={"count": "3"})
    received = collect(fleet.tasks.Run(iter([frame]), timeout=30))
    assert not received.partials
    assert [list(o.partials) for o in received.outcomes] == [[b"p-0", b"p-1", b"p-2"]]


def test_one_request_id_is_one_task_while_it_runs_and_after(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (first,) = fleet.submit("trial.gate", str(gate).encode(), request_ids=["once"])
    payload = str(gate).encode()
    assert fleet.submit("trial.gate", payload, request_ids=["once"]) == [first]
    assert fleet.submit("trial.gate", payload, payload, request_ids=["once", "once"]) == [first, first]
    gate.touch()
    assert fleet.outcome(first).result == b"opened"
    assert fleet.submit("trial.gate", payload, request_ids=["once"]) == [first]
    # A Run stream that comes later is given the outcome.
    outcomes = collect(fleet.tasks.Run(iter([run_frame("trial.gate", ("once", payload))]), timeout=30)).outcomes
    assert [(o.task_id, o.result) for o in outcomes] == [(first, b"opened")]


def test_one_request_id_from_many_sides_at_once_is_one_task(fleet: Fleet) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: fleet.submit("echo", b"x", request_ids=["contested"])[0], range(64)))
    assert len(set(found)) == 1
    streams = [fleet.tasks.Run(iter([run_frame("echo", ("contested", b"x"))]), timeout=30) for _ in range(8)]
    results = {o.result for s in streams for o in collect(s).outcomes}
    assert len(results) == 1


def test_the_same_request_id_twice_on_one_stream_is_answered_once_or_alike(fleet: Fleet) -> None:
    frame = run_frame("echo", ("twice", b"x"), ("twice", b"x"))
    received = collect(fleet.tasks.Run(iter([frame]), timeout=30))
    assert not received.rejected
    assert {o.request_id for o in received.outcomes} == {"twice"}
    assert len({t.task_id for t in (*received.outcomes, *received.accepted)}) == 1


def test_ephemeral_tasks_are_answered_and_found_but_never_on_disk(fleet: Fleet) -> None:
    brief: dict[str, Any] = {"durability": task_pb2.DURABILITY_EPHEMERAL, "queue": "brief"}
    (task_id,) = fleet.submit("echo", b"brief", **brief)
    assert fleet.outcome(task_id).result == b"brief"
    (named,) = fleet.submit("echo", b"b", request_ids=["e"], **brief)
    assert fleet.submit("echo", b"b", request_ids=["e"], **brief) == [named]
    # Of this queue the journal holds only what comes now.
    (marker,) = fleet.submit("echo", b"durable", queue="brief")
    watch = fleet.tasks.Watch(task_service_pb2.WatchRequest(queue="brief"), timeout=30)
    first = next(o for frame in watch for o in frame.outcomes)
    watch.cancel()
    assert first.task_id == marker
