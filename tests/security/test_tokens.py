"""Tokens: missing, invalid, of another role, revoked, expired."""

import json
import os
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from multigpu.config.config import MasterConfig
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_service_pb2
from multigpu_master.errors import ExhaustedError, JournalError
from multigpu_master.journal.sqlite.reads import JournalReads
from multigpu_master.security import tokens as product_tokens
from multigpu_master.security.setup import ADMIN_TOKEN_FILE, load_auth
from multigpu_master.security.tokens import Tokens

from tests.fleet import rejected, until
from tests.security.secured import METHODS, Caller, SecuredFleet, hello, metadata

UNAUTHENTICATED, PERMISSION_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
READS = {
    "TaskService/Watch", "TaskService/Get", "TaskService/List", "TaskService/Count", "AdminService/ListWorkers",
    "AdminService/WatchWorkers", "AdminService/GetStrategy", "AdminService/ListQueues", "AdminService/ListDeadLetters",
    "AdminService/GetStats", "AdminService/GetHistory", "AdminService/GetUsage", "AdminService/Explain",
    "AdminService/ListModels",
}  # fmt: skip
SUBMITS = {"TaskService/Submit", "TaskService/Run", "TaskService/Cancel"}
WORKS = {"WorkerService/Session"}
# The methods of each role, independent of the product's table. A new method is for administrators until added here.
MAY = {"read": READS, "submit": READS | SUBMITS, "worker": WORKS, "admin": set(METHODS) - WORKS}


@pytest.mark.parametrize("name", METHODS)
def test_no_answer_without_a_token(secured: SecuredFleet, name: str) -> None:
    assert secured.caller().status(name) is UNAUTHENTICATED


@pytest.mark.parametrize("role", MAY)
def test_each_role_may_call_exactly_its_methods(secured: SecuredFleet, role: str) -> None:
    caller = secured.as_role(role)
    let_in = {name for name in METHODS if caller.status(name) not in (UNAUTHENTICATED, PERMISSION_DENIED)}
    assert let_in == MAY[role]


def test_an_invalid_token_is_rejected(secured: SecuredFleet) -> None:
    token_id, token = secured.create("good", "admin")
    wrong = [
        "", "x", "mgpu_", token[:-1], token + "0", token.upper(), f"mgpu_{token_id}_{'0' * 64}",
        f"mgpu_{'0' * 12}_{token[-64:]}", "x" * 8000,
    ]  # fmt: skip
    codes = {secured.caller(text).probe() for text in wrong}
    assert codes == {UNAUTHENTICATED}
    assert secured.caller(token).probe() is grpc.StatusCode.OK


def test_two_tokens_or_another_scheme_are_rejected(secured: SecuredFleet) -> None:
    caller = secured.caller()
    both = (*metadata(secured.admin_token), *metadata("x"))
    for shown in (
        both,
        both[::-1],
        (("authorization", f"Basic {secured.admin_token}"),),
        (("token", secured.admin_token),),
    ):
        caller.metadata = shown
        assert caller.probe() is UNAUTHENTICATED


def test_an_oversize_header_is_rejected(secured: SecuredFleet) -> None:
    code = secured.caller("x" * (1 << 20)).probe()
    assert code is not grpc.StatusCode.OK
    assert secured.admin.probe() is grpc.StatusCode.OK


def _open_calls(secured: SecuredFleet, token_id: str) -> int:
    answer = secured.admin.call("AdminService/ListTokens")
    return next((int(t.calls) for t in answer.tokens if t.token_id == token_id), 0)


def test_revoking_a_token_ends_its_streams(secured: SecuredFleet) -> None:
    submit_id, submit = secured.create("a", "submit")
    worker_id, worker = secured.create("b", "worker")
    _, other = secured.create("c", "read")
    streams = [
        secured.caller(submit).open("TaskService/Run"),
        secured.caller(submit).open("TaskService/Watch"),
        secured.caller(submit).open("AdminService/WatchWorkers"),
        secured.caller(worker).open("WorkerService/Session", hello("doomed")),
    ]
    spared = secured.caller(other).open("TaskService/Watch")
    spared.next()
    until(lambda: _open_calls(secured, submit_id) == 3 and _open_calls(secured, worker_id) == 1, what="the streams")
    begin = time.monotonic()
    secured.revoke(submit_id)
    secured.revoke(worker_id)
    assert [stream.end() for stream in streams] == [UNAUTHENTICATED] * 4
    assert time.monotonic() - begin < 10  # the host may be busy
    assert secured.caller(submit).probe() is UNAUTHENTICATED
    assert spared.call.is_active()
    spared.close()
    with rejected(grpc.StatusCode.NOT_FOUND, "tokens list"):
        secured.revoke(submit_id)


def test_revoking_a_token_ends_a_waiting_call(secured: SecuredFleet) -> None:
    token_id, token = secured.create("waits", "submit")
    caller = secured.caller(token)
    (result,) = caller.submit("default", b"x")
    request = task_service_pb2.GetRequest(task_id=result.task_id)
    request.wait.FromSeconds(60)
    future = caller.stub("TaskService/Get").future(request, metadata=caller.metadata)
    until(lambda: _open_calls(secured, token_id) == 1, what="the call")
    secured.revoke(token_id)
    assert future.exception(timeout=30).code() is UNAUTHENTICATED


def test_an_expired_token_ends_its_streams(secured: SecuredFleet) -> None:
    token_id, token = secured.create("short", "read", ttl_s=1.5)
    stream = secured.caller(token).open("TaskService/Watch")
    stream.next()
    assert stream.end() is UNAUTHENTICATED
    assert secured.caller(token).status("TaskService/Count") is UNAUTHENTICATED
    assert _open_calls(secured, token_id) == 0
    assert token_id not in {t.token_id for t in secured.tokens()}


def test_an_expired_token_is_unknown() -> None:
    now = 0.0
    tokens = Tokens({}, lambda: now)
    token, text = tokens.make("x", ["read"], ttl_s=5)
    tokens.add(token)
    assert tokens.find(text) is token
    now = 5.0
    assert tokens.find(text) is None


def test_a_rejected_caller_is_told_when_the_rate_permits_another_task() -> None:
    """For rates below one task a second it was told up to twice the time."""
    tokens = Tokens({}, lambda: 1000.0)
    token, _ = tokens.make("x", ["submit"], tasks_per_s=0.01)
    assert token.charge(1, 1000.0) is None
    delay_s = token.charge(1, 1000.0)
    assert delay_s is not None
    assert delay_s == pytest.approx(100.0)
    assert token.charge(1, 1000.0 + delay_s - 2.0) is not None
    assert token.charge(1, 1000.0 + delay_s) is None


@pytest.mark.parametrize("revoked", [False, True])
async def test_the_first_token_is_made_again_though_there_are_as_many_as_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, revoked: bool
) -> None:
    monkeypatch.setattr(product_tokens, "TOKENS_MAX", 1 if revoked else 2)
    saved: dict[str, bytes | None] = {}

    async def save(settings: dict[str, bytes | None]) -> None:
        saved.update(settings)

    config = MasterConfig(data_dir=tmp_path, require_tokens=True)
    auth = await load_auth(config, {}, lambda: 1000.0, save)
    assert auth is not None
    assert auth.tokens is not None
    other, _ = auth.tokens.make("other", ["submit"])
    saved |= other.setting()
    (tmp_path / ADMIN_TOKEN_FILE).unlink()
    if revoked:
        saved = dict(other.setting())
    auth = await load_auth(config, {key: value for key, value in saved.items() if value}, lambda: 1000.0, save)
    assert auth is not None
    assert auth.tokens is not None
    assert auth.tokens.find((tmp_path / ADMIN_TOKEN_FILE).read_text().strip()) is not None


def test_the_name_of_the_first_token_is_the_masters(secured: SecuredFleet) -> None:
    request = admin_pb.CreateTokenRequest(name="bootstrap", roles=[admin_pb.ROLE_SUBMIT])
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "'bootstrap' is the name of the token that the master makes"):
        secured.admin.call("AdminService/CreateToken", request)


def test_expired_tokens_leave_room_for_new_ones(secured: SecuredFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """CreateToken deletes them, also from the journal."""
    now_s = 1000.0
    monkeypatch.setattr(product_tokens, "TOKENS_MAX", 2)
    tokens = Tokens({}, lambda: now_s)
    for ttl_s in (None, 30.0):
        tokens.add(tokens.make("t", ["submit"], ttl_s=ttl_s)[0])
    with pytest.raises(ExhaustedError, match="2 tokens already"):
        tokens.check_count()
    now_s += 60
    assert list(tokens.remove_expired().values()) == [None]
    tokens.check_count()
    brief = admin_pb.CreateTokenRequest(name="brief", roles=[admin_pb.ROLE_SUBMIT])
    brief.ttl.nanos = 1_000_000
    made = secured.admin.call("AdminService/CreateToken", brief).token
    time.sleep(0.1)
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "at least one role"):  # also by a call that makes none
        secured.admin.call("AdminService/CreateToken", admin_pb.CreateTokenRequest(name="next"))
    journal = JournalReads(secured.fleet.data_dir)
    until(lambda: not any(made.token_id in key for key in journal.settings()))
    journal.close_readers()


def test_the_last_administrators_token_is_not_revoked(own_secured: SecuredFleet) -> None:
    secured = own_secured
    last = secured.admin_token.split("_")[1]
    expiring, _ = secured.create("short", "admin", ttl_s=0.1)
    until(lambda: expiring not in {t.token_id for t in secured.tokens()}, what="its end")
    with rejected(grpc.StatusCode.FAILED_PRECONDITION, "tokens create", "--role admin"):
        secured.revoke(last)
    assert secured.admin.status("AdminService/ListTokens") is grpc.StatusCode.OK
    _, other = secured.create("another", "admin")
    secured.revoke(last)
    assert secured.caller(other).status("AdminService/ListTokens") is grpc.StatusCode.OK


def test_a_rejected_call_is_logged_with_its_token_id(own_secured: SecuredFleet) -> None:
    token_id, token = own_secured.create("gone", "read")
    own_secured.revoke(token_id)
    assert own_secured.caller(token).probe() is UNAUTHENTICATED
    (entry,) = until(lambda: own_secured.fleet.master.events("a call was rejected"), what="the line")
    assert entry["token_id"] == token_id
    assert token not in own_secured.fleet.master.log()


def test_an_administrator_can_revoke_its_own_token(secured: SecuredFleet) -> None:
    token_id, token = secured.create("leaving", "admin")
    caller = secured.caller(token)
    assert (
        caller.call("AdminService/RevokeToken", admin_pb.RevokeTokenRequest(token_id=token_id)).token.name == "leaving"
    )
    assert caller.probe() is UNAUTHENTICATED


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
def test_an_invalid_token_request_is_rejected(secured: SecuredFleet, wanted: dict[str, Any]) -> None:
    with rejected(grpc.StatusCode.INVALID_ARGUMENT):
        secured.admin.call("AdminService/CreateToken", admin_pb.CreateTokenRequest(**({"name": "x"} | wanted)))


def test_health_needs_no_token_and_reflection_does(secured: SecuredFleet) -> None:
    channel = secured.caller().channel
    assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    with rejected(UNAUTHENTICATED):
        next(stub.ServerReflectionInfo(iter([ask]), timeout=30))
    answer = next(stub.ServerReflectionInfo(iter([ask]), timeout=30, metadata=metadata(secured.admin_token)))
    assert "multigpu.v1.TaskService" in {s.name for s in answer.list_services_response.service}
    raw = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with rejected(grpc.StatusCode.INVALID_ARGUMENT):
        next(raw(iter([b"\xff\xff"]), timeout=30, metadata=metadata(secured.admin_token)))
    assert not secured.fleet.faults()


def test_tokens_survive_a_restart_and_secrets_are_not_stored(own_secured: SecuredFleet) -> None:
    secured = own_secured
    kept_id, kept = secured.create("kept", "submit", queues=["q"], task_rate=5, calls_max=7)
    gone_id, gone = secured.create("gone", "submit")
    _, short = secured.create("short", "read", ttl_s=0.5)
    secured.caller(kept).submit("q", b"x")
    secured.caller(kept + "0").probe()
    secured.revoke(gone_id)
    time.sleep(0.6)
    secured.fleet.restart_master()
    assert secured.caller(kept).probe() is grpc.StatusCode.OK
    assert secured.caller(gone).probe() is UNAUTHENTICATED
    assert secured.caller(short).probe() is UNAUTHENTICATED
    assert secured.admin.probe() is grpc.StatusCode.OK
    (token,) = [t for t in secured.tokens() if t.name == "kept"]
    assert (token.token_id, list(token.queues), token.task_rate, token.calls_max) == (kept_id, ["q"], 5, 7)
    secured.fleet.master.stop()
    secrets = [t.rpartition("_")[2].encode() for t in (kept, gone, short, secured.admin_token)]
    files = [p for p in secured.fleet.folder.rglob("*") if p.is_file() and p.name != "admin.token"]
    assert any(p.name == "audit.log" for p in files)
    assert [p.name for p in files if any(s in p.read_bytes() for s in secrets)] == []


def test_the_first_token_is_private_and_created_again_if_lost(own_secured: SecuredFleet) -> None:
    secured = own_secured
    path: Path = secured.fleet.data_dir / "admin.token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_uid == os.geteuid()
    for spoiled in (None, secured.create("weak", "read")[1]):
        if spoiled is None:
            path.unlink()
        else:
            path.write_text(spoiled)
        before = secured.admin_token
        secured.fleet.restart_master()
        secured.admin_token = path.read_text().strip()
        secured.admin = secured.caller(secured.admin_token)
        assert secured.admin.probe() is grpc.StatusCode.OK
        assert secured.caller(before).probe() is UNAUTHENTICATED
    assert len([t for t in secured.tokens() if t.name == "bootstrap"]) == 1


def test_a_damaged_token_prevents_the_start(own_secured: SecuredFleet) -> None:
    import sqlite3

    secured = own_secured
    secured.fleet.master.stop()
    with sqlite3.connect(secured.fleet.data_dir / "journal.sqlite3") as journal:
        changed = journal.execute("UPDATE setting SET value = ? WHERE key LIKE 'token/%'", (b'{"name": "x"}',)).rowcount
    journal.close()
    assert changed == 1
    master = secured.fleet.start_master(wait=False)
    assert master.process.wait(60) == 3
    assert "damaged" in master.log()


@pytest.mark.parametrize(
    "damage",
    [{"queues": [1]}, {"expire_s": "tomorrow"}, {"create_s": None}, {"tasks_per_s": float("nan")}, {"roles": 1}],
)
def test_a_damaged_field_of_a_token_is_found_at_the_start(damage: dict[str, Any]) -> None:
    token, _ = Tokens({}, time.time).make("t", ["submit"])
    ((key, value),) = token.setting().items()
    assert value is not None
    Tokens({key: value}, time.time)
    with pytest.raises(JournalError, match=f"setting '{key}' is damaged"):
        Tokens({key: json.dumps(json.loads(value) | damage).encode()}, time.time)


def test_a_master_without_tokens_creates_none(tmp_path: Path) -> None:
    from tests.fleet import Fleet

    with Fleet(tmp_path, workers=0) as fleet:
        caller = Caller(fleet.channel)
        request = admin_pb.CreateTokenRequest(name="x", roles=[admin_pb.ROLE_ADMIN])
        with rejected(grpc.StatusCode.FAILED_PRECONDITION, "--require-tokens"):
            caller.call("AdminService/CreateToken", request)
        assert not (fleet.data_dir / "admin.token").exists()
        # The audit log is written also without tokens.
        path = fleet.data_dir / "audit.log"
        until(lambda: path.exists() and path.read_text(), what="the line")
        (line,) = path.read_text().splitlines()
        assert json.loads(line)["result"] == "FAILED_PRECONDITION"
