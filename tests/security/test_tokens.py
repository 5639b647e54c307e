"""Ways in by a token: none, a wrong one, one of another role, one that was good."""

import json
import os
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_service_pb2

from tests.fleet import rejected, until
from tests.security.house import METHODS, Caller, House, hello, metadata

UNAUTHENTICATED, PERMISSION_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
READS = {
    "TaskService/Watch", "TaskService/Get", "TaskService/List", "TaskService/Count", "AdminService/ListWorkers",
    "AdminService/WatchWorkers", "AdminService/GetStrategy", "AdminService/ListQueues", "AdminService/ListDeadLetters",
    "AdminService/GetStats", "AdminService/Explain", "AdminService/ListModels",
}  # fmt: skip
SUBMITS = {"TaskService/Submit", "TaskService/Run", "TaskService/Cancel"}
WORKS = {"WorkerService/Session"}
# What each role may call, written down a second time. A call that is added is an administrator's until it is here.
MAY = {
    "read": READS,
    "submit": READS | SUBMITS,
    "worker": WORKS,
    "admin": set(METHODS) - WORKS,
}


@pytest.mark.parametrize("name", METHODS)
def test_without_a_token_nothing_answers(house: House, name: str) -> None:
    assert house.caller().status(name) is UNAUTHENTICATED


@pytest.mark.parametrize("role", MAY)
def test_each_role_may_call_what_the_table_says_and_no_more(house: House, role: str) -> None:
    caller = house.as_role(role)
    let_in = {name for name in METHODS if caller.status(name) not in (UNAUTHENTICATED, PERMISSION_DENIED)}
    assert let_in == MAY[role]


def test_a_wrong_token_is_as_good_as_none(house: House) -> None:
    token_id, token = house.create("good", "admin")
    wrong = [
        "", "x", "mgpu_", token[:-1], token + "0", token.upper(), f"mgpu_{token_id}_{'0' * 64}",
        f"mgpu_{'0' * 12}_{token[-64:]}", "x" * 8000,
    ]  # fmt: skip
    codes = {house.caller(text).status("AdminService/GetStats") for text in wrong}
    assert codes == {UNAUTHENTICATED}
    assert house.caller(token).status("AdminService/GetStats") is grpc.StatusCode.OK


def test_two_tokens_or_another_scheme_are_as_good_as_none(house: House) -> None:
    caller = house.caller()
    both = (*metadata(house.admin_token), *metadata("x"))
    for shown in (
        both,
        both[::-1],
        (("authorization", f"Basic {house.admin_token}"),),
        (("token", house.admin_token),),
    ):
        caller.metadata = shown
        assert caller.status("AdminService/GetStats") is UNAUTHENTICATED


def test_an_oversize_header_is_rejected_and_the_master_goes_on(house: House) -> None:
    code = house.caller("x" * (1 << 20)).status("AdminService/GetStats")
    assert code is not grpc.StatusCode.OK
    assert house.admin.status("AdminService/GetStats") is grpc.StatusCode.OK


def _open_calls(house: House, token_id: str) -> int:
    answer = house.admin.call("AdminService/ListTokens")
    return next((int(t.calls) for t in answer.tokens if t.token_id == token_id), 0)


def test_a_revoked_token_ends_its_streams_at_once(house: House) -> None:
    submit_id, submit = house.create("a", "submit")
    worker_id, worker = house.create("b", "worker")
    _, other = house.create("c", "read")
    streams = [
        house.caller(submit).open("TaskService/Run"),
        house.caller(submit).open("TaskService/Watch"),
        house.caller(submit).open("AdminService/WatchWorkers"),
        house.caller(worker).open("WorkerService/Session", hello("doomed")),
    ]
    spared = house.caller(other).open("TaskService/Watch")
    spared.next()
    until(lambda: _open_calls(house, submit_id) == 3 and _open_calls(house, worker_id) == 1, what="the streams")
    begin = time.monotonic()
    house.revoke(submit_id)
    house.revoke(worker_id)
    assert [stream.end() for stream in streams] == [UNAUTHENTICATED] * 4
    assert time.monotonic() - begin < 10  # at once; but hosts are busy
    assert house.caller(submit).status("AdminService/GetStats") is UNAUTHENTICATED
    assert spared.call.is_active()
    spared.close()
    with rejected(grpc.StatusCode.NOT_FOUND, "tokens list"):
        house.revoke(submit_id)


def test_a_waiting_call_ends_with_its_token(house: House) -> None:
    token_id, token = house.create("waits", "submit")
    caller = house.caller(token)
    (result,) = caller.submit("default", b"x")
    request = task_service_pb2.GetRequest(task_id=result.task_id)
    request.wait.FromSeconds(60)
    future = caller.channel.unary_unary(
        "/multigpu.v1.TaskService/Get", request_serializer=task_service_pb2.GetRequest.SerializeToString
    ).future(request, metadata=caller.metadata)
    until(lambda: _open_calls(house, token_id) == 1, what="the call")
    house.revoke(token_id)
    assert future.exception(timeout=30).code() is UNAUTHENTICATED


def test_an_expired_token_ends_its_streams(house: House) -> None:
    token_id, token = house.create("short", "read", ttl_s=1.5)
    stream = house.caller(token).open("TaskService/Watch")
    stream.next()
    assert stream.end() is UNAUTHENTICATED
    assert house.caller(token).status("TaskService/Count") is UNAUTHENTICATED
    assert _open_calls(house, token_id) == 0
    assert token_id not in {t.token_id for t in house.admin.call("AdminService/ListTokens").tokens}


def test_the_last_token_of_an_administrator_is_not_revoked(own_house: House) -> None:
    """It was, without a word, and nobody could make another until the master was restarted."""
    house = own_house
    last = house.admin_token.split("_")[1]
    expiring, _ = house.create("short", "admin", ttl_s=0.1)
    until(
        lambda: expiring not in {t.token_id for t in house.admin.call("AdminService/ListTokens").tokens}, what="its end"
    )
    with rejected(grpc.StatusCode.FAILED_PRECONDITION, "tokens create", "--role admin"):
        house.revoke(last)
    assert house.admin.status("AdminService/ListTokens") is grpc.StatusCode.OK
    _, other = house.create("another", "admin")
    house.revoke(last)
    assert house.caller(other).status("AdminService/ListTokens") is grpc.StatusCode.OK


def test_a_rejected_call_is_logged_with_the_token_that_was_revoked(own_house: House) -> None:
    token_id, token = own_house.create("gone", "read")
    own_house.revoke(token_id)
    assert own_house.caller(token).status("AdminService/GetStats") is UNAUTHENTICATED
    (told,) = until(lambda: own_house.fleet.master.events("a call was rejected"), what="the line")
    assert told["token_id"] == token_id
    assert token not in own_house.fleet.master.log()


def test_an_administrator_may_revoke_the_own_token(house: House) -> None:
    token_id, token = house.create("leaving", "admin")
    caller = house.caller(token)
    assert (
        caller.call("AdminService/RevokeToken", admin_pb.RevokeTokenRequest(token_id=token_id)).token.name == "leaving"
    )
    assert caller.status("AdminService/GetStats") is UNAUTHENTICATED


@pytest.mark.parametrize(
    "wanted",
    [
        {"roles": []},
        {"roles": [99]},
        {"roles": [admin_pb.ROLE_WORKER, admin_pb.ROLE_READ]},
        {"roles": [admin_pb.ROLE_ADMIN], "queues": ["a"]},
        {"roles": [admin_pb.ROLE_WORKER], "queues": ["a"]},
        {"roles": [admin_pb.ROLE_READ], "worker_ids": ["a"]},
        {"roles": [admin_pb.ROLE_READ], "queues": [""]},
        {"roles": [admin_pb.ROLE_READ], "queues": [str(n) for n in range(101)]},
        {"roles": [admin_pb.ROLE_READ], "task_rate": -1},
        {"roles": [admin_pb.ROLE_READ], "task_rate": float("nan")},
        {"roles": [admin_pb.ROLE_READ], "name": ""},
        {"roles": [admin_pb.ROLE_READ], "name": "a\nb"},
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(house: House, wanted: dict[str, Any]) -> None:
    with rejected(grpc.StatusCode.INVALID_ARGUMENT):
        house.admin.call("AdminService/CreateToken", admin_pb.CreateTokenRequest(**({"name": "x"} | wanted)))


def test_health_answers_everybody_and_reflection_those_with_a_token(house: House) -> None:
    channel = house.caller().channel
    assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    with rejected(UNAUTHENTICATED):
        next(stub.ServerReflectionInfo(iter([ask]), timeout=30))
    answer = next(stub.ServerReflectionInfo(iter([ask]), timeout=30, metadata=metadata(house.admin_token)))
    assert "multigpu.v1.TaskService" in {s.name for s in answer.list_services_response.service}
    raw = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with rejected(grpc.StatusCode.INVALID_ARGUMENT):
        next(raw(iter([b"\xff\xff"]), timeout=30, metadata=metadata(house.admin_token)))
    assert not house.fleet.faults()


def test_tokens_outlive_the_master_and_their_secrets_are_nowhere(own_house: House) -> None:
    house = own_house
    kept_id, kept = house.create("kept", "submit", queues=["q"], task_rate=5, calls_max=7)
    gone_id, gone = house.create("gone", "submit")
    _, short = house.create("short", "read", ttl_s=0.5)
    house.caller(kept).submit("q", b"x")
    house.caller(kept + "0").status("AdminService/GetStats")
    house.revoke(gone_id)
    time.sleep(0.6)
    house.fleet.restart_master()
    assert house.caller(kept).status("AdminService/GetStats") is grpc.StatusCode.OK
    assert house.caller(gone).status("AdminService/GetStats") is UNAUTHENTICATED
    assert house.caller(short).status("AdminService/GetStats") is UNAUTHENTICATED
    assert house.admin.status("AdminService/GetStats") is grpc.StatusCode.OK
    (token,) = [t for t in house.admin.call("AdminService/ListTokens").tokens if t.name == "kept"]
    assert (token.token_id, list(token.queues), token.task_rate, token.calls_max) == (kept_id, ["q"], 5, 7)
    house.fleet.master.stop()
    secrets = [t.rpartition("_")[2].encode() for t in (kept, gone, short, house.admin_token)]
    files = [p for p in house.fleet.folder.rglob("*") if p.is_file() and p.name != "admin.token"]
    assert any(p.name == "audit.log" for p in files)
    assert [p.name for p in files if any(s in p.read_bytes() for s in secrets)] == []


def test_the_first_token_is_its_owners_alone_and_is_made_again_when_lost(own_house: House) -> None:
    house = own_house
    path: Path = house.fleet.data_dir / "admin.token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_uid == os.geteuid()
    for spoiled in (None, house.create("weak", "read")[1]):
        if spoiled is None:
            path.unlink()
        else:
            path.write_text(spoiled)
        before = house.admin_token
        house.fleet.restart_master()
        house.admin_token = path.read_text().strip()
        house.admin = house.caller(house.admin_token)
        assert house.admin.status("AdminService/GetStats") is grpc.StatusCode.OK
        assert house.caller(before).status("AdminService/GetStats") is UNAUTHENTICATED
    assert len([t for t in house.admin.call("AdminService/ListTokens").tokens if t.name == "bootstrap"]) == 1


def test_a_damaged_token_keeps_the_master_from_starting(own_house: House) -> None:
    import sqlite3

    house = own_house
    house.fleet.master.stop()
    with sqlite3.connect(house.fleet.data_dir / "journal.sqlite3") as journal:
        changed = journal.execute("UPDATE setting SET value = ? WHERE key LIKE 'token/%'", (b'{"name": "x"}',)).rowcount
    journal.close()
    assert changed == 1
    master = house.fleet.start_master(wait=False)
    assert master.process.wait(60) == 3
    assert "damaged" in master.log()


def test_a_master_without_tokens_makes_none(tmp_path: Path) -> None:
    from tests.fleet import Fleet

    with Fleet(tmp_path, workers=0) as fleet:
        caller = Caller(fleet.channel)
        request = admin_pb.CreateTokenRequest(name="x", roles=[admin_pb.ROLE_ADMIN])
        with rejected(grpc.StatusCode.FAILED_PRECONDITION, "--require-tokens"):
            caller.call("AdminService/CreateToken", request)
        assert not (fleet.data_dir / "admin.token").exists()
        # The book of the administrators is kept here, too.
        path = fleet.data_dir / "audit.log"
        until(lambda: path.exists() and path.read_text(), what="the line")
        (line,) = path.read_text().splitlines()
        assert json.loads(line)["result"] == "FAILED_PRECONDITION"
