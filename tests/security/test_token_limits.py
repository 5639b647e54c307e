"""Limits of a token: tasks a second and open calls."""

import time
from pathlib import Path

import grpc
import multigpu
import pytest
from multigpu.v1 import task_service_pb2
from multigpu_master.security.tokens import Tokens

from tests.fleet import until
from tests.security.secured import SecuredFleet, run_request

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_rate_holds_on_average() -> None:
    now = 1000.0
    token, _ = Tokens({}, lambda: now).make("x", ["submit"], tasks_per_s=100)
    taken, rejected = 0, 0
    for step in range(2000):
        delay = token.charge(3, now + step * 0.01)  # three times the rate
        taken += 3 if delay is None else 0
        rejected += delay is not None
        assert delay is None or 0 < delay < 1
    assert 2000 <= taken <= 2000 + 100 + 6  # 20 s; what it may do at once; a batch more
    assert rejected
    # A batch of any size gets through, and is paid for afterwards.
    assert token.charge(10_000, now + 100) is None
    assert token.charge(1, now + 150) == pytest.approx(49.01, abs=0.02)
    assert token.charge(1, now + 200) is None
    free, _ = Tokens({}, lambda: now).make("x", ["submit"])
    assert all(free.charge(10_000, now) is None for _ in range(100))


def test_tasks_beyond_the_rate_are_rejected_with_a_delay(secured: SecuredFleet) -> None:
    caller = secured.as_role("submit", task_rate=5)
    other = secured.as_role("submit")
    answers = [result for _ in range(5) for result in caller.submit("default", b"1", b"2", b"3")]
    rejected = [r.rejection for r in answers if r.HasField("rejection")]
    assert 3 <= len(rejected) <= 9
    assert {r.code for r in rejected} == {EXHAUSTED.value[0]}
    assert all(0 < r.retry_delay.ToNanoseconds() < 5e9 for r in rejected)
    assert all(r.HasField("task_id") for r in other.submit("default", b"1", b"2", b"3"))
    # What it owes for these takes it 20 s, which is longer than a busy host takes to open a stream.
    until(lambda: caller.submit("default", *[b"4"] * 100)[0].HasField("task_id"))
    stream = caller.open("TaskService/Run", run_request("default", "r1"))
    (rejection,) = stream.next().rejected
    stream.close()
    assert rejection.code == EXHAUSTED.value[0]


def test_the_sdk_waits_for_the_retry_delay(secured: SecuredFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    _, token = secured.create("slow", "submit", task_rate=20)
    monkeypatch.setenv("MGPU_TOKEN", token)
    worker = secured.start_worker("slow")
    try:
        begin = time.monotonic()
        with multigpu.Client(secured.fleet.address) as client:
            client.run("echo", b"x", wait_for_worker=True)
            results = list(client.map("echo", [b"%d" % n for n in range(20)], max_in_flight=5, wait_for_worker=True))
            results += list(client.map("echo", [b"%d" % n for n in range(20)], max_in_flight=5, wait_for_worker=True))
        assert results == [b"%d" % n for n in range(20)] * 2
        assert time.monotonic() - begin > 0.5  # 41 tasks, of which 20 may come at once
    finally:
        worker.stop()


def test_open_calls_of_a_token_are_limited(secured: SecuredFleet) -> None:
    token_id, token = secured.create("few", "read", calls_max=2)
    caller = secured.caller(token)
    streams = [caller.open("TaskService/Watch") for _ in range(2)]
    for stream in streams:
        stream.next()
    assert caller.open("TaskService/Watch").end() is EXHAUSTED
    assert caller.status("TaskService/Count") is EXHAUSTED
    assert secured.as_role("read", calls_max=2).status("TaskService/Count") is grpc.StatusCode.OK
    streams[0].close()
    until(lambda: caller.status("TaskService/Count") is grpc.StatusCode.OK, what="the call that ended to be counted")
    streams[1].close()
    assert token_id


def test_the_masters_limit_of_calls_is_the_default(tmp_path: Path) -> None:
    with SecuredFleet(tmp_path, "--token-calls-max", "1") as secured:
        reader = secured.as_role("read")
        stream = reader.open("TaskService/Watch", task_service_pb2.WatchRequest())
        stream.next()
        assert reader.status("TaskService/Count") is EXHAUSTED
        stream.close()
