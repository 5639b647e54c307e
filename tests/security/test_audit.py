"""The audit log: administrative calls, and no others."""

import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu_master.rpc.requests import REQUEST_BYTES_MAX, parse
from multigpu_master.security import audit
from multigpu_master.security.auth import allowed_roles
from multigpu_master.security.tokens import ADMIN

from tests.fleet import until
from tests.security.secured import METHODS, SecuredFleet


def _lines(secured: SecuredFleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (secured.fleet.data_dir / "audit.log").read_text().splitlines()]


def test_a_call_is_audited_before_its_answer(secured: SecuredFleet) -> None:
    token_id, token = secured.create("root", "admin")
    root = secured.caller(token)
    root.call("AdminService/PauseQueue", admin_pb.PauseQueueRequest(queue="night"))
    (line,) = [entry for entry in _lines(secured) if entry["token_id"] == token_id]
    assert (line["method"], line["result"], line["name"]) == ("AdminService/PauseQueue", "OK", "root")
    assert line["request"] == {"queue": "night"}
    assert line["peer"].startswith("ipv4:127.0.0.1:") and line["time"].endswith("+00:00")
    assert (secured.fleet.data_dir / "audit.log").stat().st_mode & 0o777 == 0o600


def test_a_failed_call_is_audited(secured: SecuredFleet) -> None:
    secured.admin.status("AdminService/UncordonWorker", admin_pb.UncordonWorkerRequest(worker_id="nobody"))
    failed = until(
        lambda: [x for x in _lines(secured) if x["method"] == "AdminService/UncordonWorker"], what="the line"
    )
    assert failed[0]["result"] == "NOT_FOUND"


def test_exactly_the_administrative_calls_are_audited(secured: SecuredFleet) -> None:
    for name in METHODS:
        secured.admin.status(name)
    changing = {n for n in METHODS if allowed_roles(n) == {ADMIN} and n != "AdminService/ListTokens"}
    assert {"AdminService/DrainWorker", "AdminService/DeleteDeadLetters", "AdminService/SetStrategy"} <= changing
    until(lambda: {entry["method"] for entry in _lines(secured)} >= changing, what="the lines")
    assert {entry["method"] for entry in _lines(secured)} == changing


def test_rejected_callers_cannot_fill_the_audit_log(secured: SecuredFleet) -> None:
    reader = secured.as_role("read")
    before = len(_lines(secured))
    for _ in range(50):
        secured.caller().status("AdminService/PauseQueue")
        reader.status("AdminService/PauseQueue")
    assert len(_lines(secured)) == before
    log = secured.fleet.master.events("a call was rejected")
    assert 1 <= len(log) < 20


def test_a_large_request_is_cut(secured: SecuredFleet) -> None:
    request = admin_pb.DeleteDeadLettersRequest(task_ids=range(1, 10_000))
    secured.admin.call("AdminService/DeleteDeadLetters", request)
    assert len((secured.fleet.data_dir / "audit.log").read_text().splitlines()[-1]) < 10_000


def test_a_large_request_is_cut_before_it_becomes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = json.dumps

    def note(fields: Any, **options: Any) -> str:
        sizes.append(len(text := str(real(fields, **options))))
        return text

    monkeypatch.setattr(json, "dumps", note)
    for request in (
        admin_pb.DeleteDeadLettersRequest(task_ids=range(1, 1_000_000)),
        admin_pb.DrainWorkerRequest(worker_id="w" * 1_000_000),
    ):
        logged = audit._request(type(request).FromString, request.SerializeToString())
        assert (len(logged), logged[-1]) == (audit.REQUEST_CHARS_MAX + 1, "…")
    assert max(sizes) < 50_000


def test_a_request_out_of_jsons_range_is_audited(secured: SecuredFleet) -> None:
    request = admin_pb.DrainWorkerRequest(worker_id="nobody")
    request.timeout.nanos = 1_500_000_000  # more than a second of them
    assert secured.admin.status("AdminService/DrainWorker", request) is grpc.StatusCode.NOT_FOUND
    lines = until(lambda: [x for x in _lines(secured) if "1500000000" in str(x["request"])], what="the line")
    assert lines[0]["method"] == "AdminService/DrainWorker"


def test_files_are_rotated(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 100)
    log = audit.Audit(tmp_path)
    for n in range(40):
        log._append(log._open(), b"%-19d\n" % n)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["audit.log", *(f"audit.log.{n}" for n in range(1, 5))]
    kept = b"".join((tmp_path / f"audit.log{end}").read_bytes() for end in (".4", ".3", ".2", ".1", ""))
    assert [int(line) for line in kept.split()] == list(range(15, 40))


def test_a_line_that_was_cut_off_by_a_full_disk_is_an_error_and_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = audit.Audit(tmp_path), os.write
    log._append(log._open(), b"first\n")
    with monkeypatch.context() as full:
        full.setattr(audit.os, "write", lambda descriptor, data: write(descriptor, data[:3]))  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="No space"):
            log._append(log._open(), b"second\n")
    log._append(log._open(), b"third\n")
    assert log.path.read_bytes() == b"first\nsec\nthird\n"


def test_lines_of_concurrent_calls_do_not_mix(tmp_path: Path) -> None:
    log, threads, lines = audit.Audit(tmp_path), 4, 200
    line = b"x" * 5000 + b"\n"  # of more than one page: while it is written, a part of it can be read
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda _: log._append(log._open(), line), range(lines)):
            pass
    assert log.path.read_bytes() == line * lines


def test_a_cancelled_call_is_audited_or_has_no_effect(own_secured: SecuredFleet) -> None:
    secured, random = own_secured, Random("cancelled")
    futures = []
    for n in range(150):
        for method, request in (
            ("CreateToken", admin_pb.CreateTokenRequest(name=f"gone-{n}", roles=["ROLE_READ"])),
            ("SetQueueLimits", admin_pb.SetQueueLimitsRequest(queue=f"gone-{n}", limits={"tasks_max": 1})),
        ):
            stub = secured.admin.channel.unary_unary(f"/multigpu.v1.AdminService/{method}")
            futures.append(stub.future(request.SerializeToString(), metadata=secured.admin.metadata, timeout=20))
        time.sleep(random.uniform(0, 0.004))
        for future in futures[-2:]:
            future.cancel()
    secured.create("after-them", "read")

    def logged() -> set[tuple[str, str]]:
        lines = [x for x in _lines(secured) if x["result"] == "OK"]
        return {(x["method"].rpartition("/")[2], x["request"].get("name") or x["request"].get("queue")) for x in lines}

    def done() -> set[tuple[str, str]]:
        tokens = secured.admin.call("AdminService/ListTokens", admin_pb.ListTokensRequest(page_size=1000)).tokens
        queues = secured.admin.call("AdminService/ListQueues", admin_pb.ListQueuesRequest(page_size=1000)).queues
        return {("CreateToken", t.name) for t in tokens} | {("SetQueueLimits", q.queue) for q in queues}

    def gone(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
        return {each for each in found if each[1].startswith("gone-")}

    until(lambda: gone(logged()) == gone(done()), what="the lines")
    assert {name for name, _ in gone(done())} == {"CreateToken", "SetQueueLimits"}, "some took effect"
    before = gone(done())
    secured.fleet.restart_master()
    until(lambda: secured.admin.probe() is grpc.StatusCode.OK, what="the next master")
    assert gone(done()) == before, "what the journal knows"


def test_without_the_audit_file_calls_have_no_effect(own_secured: SecuredFleet) -> None:
    secured, path = own_secured, own_secured.fleet.data_dir / "audit.log"
    secured.create("before", "read")
    path.rename(path.with_name("moved"))
    path.mkdir()
    request = admin_pb.PauseQueueRequest(queue="unwritten")
    assert secured.admin.status("AdminService/PauseQueue", request) is grpc.StatusCode.FAILED_PRECONDITION
    queues = secured.admin.call("AdminService/ListQueues", admin_pb.ListQueuesRequest()).queues
    assert not [q for q in queues if q.queue == "unwritten"]
    path.rmdir()
    secured.admin.call("AdminService/PauseQueue", request)
    assert [x["request"]["queue"] for x in _lines(secured)] == ["unwritten"], "a new file was begun"


def test_the_name_of_the_file_is_synced_before_any_call_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a first line that was cut off by a full disk."""
    log, write, synced = audit.Audit(tmp_path), os.write, list[Path]()
    monkeypatch.setattr(audit, "sync", synced.append)
    with monkeypatch.context() as full:
        full.setattr(audit.os, "write", lambda descriptor, data: write(descriptor, data[:3]))  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="No space"):
            log._append(log._open(), b"first\n")
    for count in (1, 1):
        log._append(log._open(), b"next\n")
        assert synced == [tmp_path] * count
    log.path.unlink()
    log._append(log._open(), b"of another file\n")
    assert synced == [tmp_path] * 2


def test_a_request_that_is_too_large_is_not_parsed_for_the_audit_log() -> None:
    request = admin_pb.DeleteDeadLettersRequest(task_ids=range(1 << 40, (1 << 40) + 500_000)).SerializeToString()
    assert len(request) > REQUEST_BYTES_MAX
    parser = functools.partial(parse, admin_pb.DeleteDeadLettersRequest)
    assert audit._request(parser, request) == "not a request"
    assert audit._request(parser, request[:0]) == {}
