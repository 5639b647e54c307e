"""What administrators did is written down, and nobody else can fill the book."""

import json
import time
from pathlib import Path
from random import Random
from typing import Any

import grpc
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu_master.security import audit
from multigpu_master.security.auth import roles_of
from multigpu_master.security.tokens import ADMIN

from tests.fleet import until
from tests.master.test_journal_full import no_descriptor
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
    log = house.fleet.master.events("a call was rejected")
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


def test_a_call_that_is_cancelled_takes_effect_with_its_line_or_not_at_all(own_house: House) -> None:
    house, random = own_house, Random("cancelled")
    futures = []
    for n in range(150):
        for method, request in (
            ("CreateToken", admin_pb.CreateTokenRequest(name=f"gone-{n}", roles=["ROLE_READ"])),
            ("SetQueueLimits", admin_pb.SetQueueLimitsRequest(queue=f"gone-{n}", limits={"tasks_max": 1})),
        ):
            stub = house.admin.channel.unary_unary(f"/multigpu.v1.AdminService/{method}")
            futures.append(stub.future(request.SerializeToString(), metadata=house.admin.metadata, timeout=20))
        time.sleep(random.uniform(0, 0.004))
        for future in futures[-2:]:
            future.cancel()
    house.create("after-them", "read")

    def told() -> set[tuple[str, str]]:
        lines = [x for x in _lines(house) if x["result"] == "OK"]
        return {(x["method"].rpartition("/")[2], x["request"].get("name") or x["request"].get("queue")) for x in lines}

    def done() -> set[tuple[str, str]]:
        tokens = house.admin.call("AdminService/ListTokens", admin_pb.ListTokensRequest(page_size=1000)).tokens
        queues = house.admin.call("AdminService/ListQueues", admin_pb.ListQueuesRequest(page_size=1000)).queues
        return {("CreateToken", t.name) for t in tokens} | {("SetQueueLimits", q.queue) for q in queues}

    def gone(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
        return {each for each in found if each[1].startswith("gone-")}

    until(lambda: gone(told()) == gone(done()), what="the lines")
    assert {name for name, _ in gone(done())} == {"CreateToken", "SetQueueLimits"}, "some took effect"
    before = gone(done())
    house.fleet.restart_master()
    until(lambda: house.admin.status("AdminService/GetStats") is grpc.StatusCode.OK, what="the next master")
    assert gone(done()) == before, "what the journal knows"


def test_without_its_file_nothing_is_done(own_house: House) -> None:
    house, path = own_house, own_house.fleet.data_dir / "audit.log"
    house.create("before", "read")
    path.rename(path.with_name("moved"))
    path.mkdir()
    request = admin_pb.PauseQueueRequest(queue="unwritten")
    assert house.admin.status("AdminService/PauseQueue", request) is grpc.StatusCode.FAILED_PRECONDITION
    queues = house.admin.call("AdminService/ListQueues", admin_pb.ListQueuesRequest()).queues
    assert not [q for q in queues if q.queue == "unwritten"]
    path.rmdir()
    house.admin.call("AdminService/PauseQueue", request)
    assert [x["request"]["queue"] for x in _lines(house)] == ["unwritten"], "a new file was begun"


def test_it_keeps_its_descriptor(tmp_path: Path) -> None:
    book = audit.Audit(tmp_path)
    book._append(b"first\n")
    with no_descriptor():
        book._append(b"second\n")
    assert book.path.read_bytes() == b"first\nsecond\n"


def test_without_a_descriptor_the_file_grows_beyond_its_limit(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 10)
    book = audit.Audit(tmp_path)
    book._append(b"first\n")
    with no_descriptor():
        book._append(b"second\n")
    book._append(b"third\n")
    assert (tmp_path / "audit.log.1").read_bytes() == b"first\nsecond\n"
    assert book.path.read_bytes() == b"third\n"
