"""What administrators did is written down, and nobody else can fill the book."""

import json
from pathlib import Path
from typing import Any

import grpc
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu_master.security import audit
from multigpu_master.security.gate import roles_of
from multigpu_master.security.tokens import ADMIN

from tests.fleet import until
from tests.security.house import METHODS, House


def _lines(house: House) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (house.fleet.data_dir / "audit.log").read_text().splitlines()]


def test_what_an_administrator_did_is_written_before_the_answer(house: House) -> None:
    token_id, token = house.create("root", "admin")
    root = house.caller(token)
    root.call("AdminService/PauseQueue", admin_pb.PauseQueueRequest(queue="night"))
    (line,) = [entry for entry in _lines(house) if entry["method"] == "AdminService/PauseQueue"]
    assert (line["result"], line["token_id"], line["name"]) == ("OK", token_id, "root")
    assert line["request"] == {"queue": "night"}
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert line["time"].endswith("+00:00")
    assert (house.fleet.data_dir / "audit.log").stat().st_mode & 0o777 == 0o600


def test_what_failed_is_written_too(house: House) -> None:
    house.admin.status("AdminService/UncordonWorker", admin_pb.UncordonWorkerRequest(worker_id="nobody"))
    failed = until(lambda: [x for x in _lines(house) if x["method"] == "AdminService/UncordonWorker"], what="the line")
    assert failed[0]["result"] == "NOT_FOUND"


def test_every_call_that_changes_the_fleet_is_written_and_no_other(house: House) -> None:
    for name in METHODS:
        house.admin.status(name)
    changing = {n for n in METHODS if roles_of(n) == {ADMIN} and n != "AdminService/ListTokens"}
    assert {"AdminService/DrainWorker", "AdminService/DeleteDeadLetters", "AdminService/SetStrategy"} <= changing
    until(lambda: {entry["method"] for entry in _lines(house)} >= changing, what="the lines")
    assert {entry["method"] for entry in _lines(house)} == changing


def test_who_is_not_let_in_can_not_fill_the_book(house: House) -> None:
    before = len(_lines(house))
    reader = house.as_role("read")
    for _ in range(50):
        house.caller().status("AdminService/PauseQueue")
        reader.status("AdminService/PauseQueue")
    assert len(_lines(house)) == before + 1  # the reader's token
    log = house.fleet.master.events("a call was refused")
    assert 1 <= len(log) < 20


def test_a_great_request_is_cut(house: House) -> None:
    request = admin_pb.DeleteDeadLettersRequest(task_ids=range(1, 10_000))
    house.admin.call("AdminService/DeleteDeadLetters", request)
    assert len((house.fleet.data_dir / "audit.log").read_text().splitlines()[-1]) < 10_000


def test_a_request_that_json_can_not_tell_is_served_and_written(house: House) -> None:
    request = admin_pb.DrainWorkerRequest(worker_id="nobody")
    request.timeout.nanos = 1_500_000_000  # more than a second of them
    assert house.admin.status("AdminService/DrainWorker", request) is grpc.StatusCode.NOT_FOUND
    lines = until(lambda: [x for x in _lines(house) if "1500000000" in str(x["request"])], what="the line")
    assert lines[0]["method"] == "AdminService/DrainWorker"


def test_old_files_make_room(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 100)
    book = audit.Audit(tmp_path)
    for n in range(40):
        book._append(b"%-19d\n" % n)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["audit.log", *(f"audit.log.{n}" for n in range(1, 5))]
    kept = b"".join((tmp_path / f"audit.log{end}").read_bytes() for end in (".4", ".3", ".2", ".1", ""))
    assert [int(line) for line in kept.split()] == list(range(15, 40))
