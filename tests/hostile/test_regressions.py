"""Inputs that once crashed something."""

import asyncio
import json
import marshal
import math
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu._transport.names import MODELS_MAX
from multigpu._transport.payload_sharing import Sharing
from multigpu._transport.payloads import read_file
from multigpu.cli.failures import Failure
from multigpu.cli.tasks.submit import parse
from multigpu.config.config import ConfigError, MasterConfig, load
from multigpu.outcome import Outcome, OutcomeState
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import device_pb2, model_pb2, task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb
from multigpu_master import settings
from multigpu_master.core import events as ev
from multigpu_master.core.model import Worker
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.workers.fleet import LOST_WORKERS_MAX, LOST_WORKERS_TOKEN_MAX, Fleet
from multigpu_master.core.workers.info import WorkerInfo
from multigpu_master.core.workers.pace import MODEL_KEYS_MAX
from multigpu_master.errors import InvalidMessageError, JournalError
from multigpu_master.journal.sqlite.reads import JournalReads
from multigpu_master.rpc import queries
from multigpu_master.rpc.worker_service import PROTOCOL_VERSION
from multigpu_master.strategies.registry import load_strategies
from multigpu_master.wire import devices as wire_devices
from multigpu_master.wire import leases as wire_leases
from multigpu_master.wire import models as wire_models
from multigpu_master.wire import specs as wire_specs
from multigpu_master.wire import tasks as wire_tasks
from multigpu_master.wire import times as wire_times
from multigpu_master.wire import validation as wire_validation
from multigpu_master.wire import workers as wire_workers
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.blobs import BlobMemory

from tests.hostile.targets.files import OUTCOME, SAVED_WORKER, TASK
from tests.hostile.targets.inputs import pack
from tests.hostile.targets.master import LocalMaster
from tests.hostile.targets.worker import LocalAgent, Wire

TOO_LARGE = 2**64 - 1  # for SQLite's INTEGER


def feed_engine_message(*message: Any) -> None:
    """Feeds an engine's message to its agent."""
    body = marshal.dumps(message) + b"mgpu"
    Wire().feed(struct.pack("<III", frames._check(len(body), 0), len(body), 0) + body)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalMaster]:
    local = LocalMaster()
    yield local
    local.serves()
    local.close()


def hello(**fields: Any) -> worker_pb.SessionRequest:
    known: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "worker_id": "a", "slots": 1}
    known["capabilities"] = [worker_pb.Capability(kind="echo")]
    return worker_pb.SessionRequest(hello=worker_pb.Hello(**known | fields))


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("TaskService/Get", task_service_pb2.GetRequest(task_id=TOO_LARGE)),
        ("TaskService/Cancel", task_service_pb2.CancelRequest(task_ids=[1, TOO_LARGE])),
        ("AdminService/Explain", admin_pb.ExplainRequest(task_id=TOO_LARGE)),
        ("AdminService/RequeueDeadLetters", admin_pb.RequeueDeadLettersRequest(task_ids=[TOO_LARGE, 1])),
        ("AdminService/DeleteDeadLetters", admin_pb.DeleteDeadLettersRequest(task_ids=[1, TOO_LARGE])),
    ],
)
def test_an_id_beyond_the_journals_range_is_unknown(local: LocalMaster, method: str, request_: Any) -> None:
    local.send(method, request_.SerializeToString())


def test_a_drain_without_end_can_be_listed(local: LocalMaster) -> None:
    local.send("WorkerService/Session", pack([hello().SerializeToString()]))
    request = admin_pb.DrainWorkerRequest(worker_id="a", timeout=Duration(seconds=2**63 - 1))
    local.send("AdminService/DrainWorker", request.SerializeToString())
    local.send("AdminService/ListWorkers", b"")
    local.send("WorkerService/Session", pack([hello().SerializeToString()]))


@pytest.mark.parametrize("seconds", [2**63 - 1, -(2**63), 2**62, -1, 0, 253_402_300_799])
@pytest.mark.parametrize("nanos", [0, 999_999_999, 2**31 - 1, -(2**31)])
def test_every_time_can_be_converted_back(seconds: int, nanos: int) -> None:
    """An outcome with a finish_time in the year 292,277,026,596 was never journaled."""
    parsed = wire_times.seconds_of(Timestamp(seconds=seconds, nanos=nanos))
    shown = wire_times.timestamp(parsed)
    assert shown.ToDatetime().year <= 9999
    assert math.isclose(shown.seconds + shown.nanos / 1e9, parsed, abs_tol=1e-3)


def test_a_long_text_of_a_heartbeat_is_cut() -> None:
    status = device_pb2.MpsStatus(message="x" * 5000, clients=3)
    parsed = wire_workers.heartbeat(worker_pb.Heartbeat(mps=status), 1)
    shown = wire_workers.worker_message(Worker(WorkerInfo(worker_id="w"), session=1, engine=parsed.engine)).mps
    assert (len(shown.message), shown.clients) == (wire_devices.TEXT_CHARS_MAX, 3)


def test_a_held_lease_is_limited() -> None:
    """The next attempt did not fit into the message's int32."""
    held = worker_pb.HeldLease(attempt=2**31 - 1, checkpoint=bytes(wire_leases.CHECKPOINT_BYTES_MAX + 1))
    held.progress.fraction = math.nan
    parsed = wire_leases.held_lease(held)
    assert (parsed.attempt, parsed.fraction, parsed.checkpoint) == (wire_validation.ATTEMPTS_MAX, 0.0, b"")


def test_a_large_hello_is_rejected() -> None:
    held = [worker_pb.HeldLease(checkpoint=bytes(1 << 20))] * 2  # not part of its description
    wire_workers.check_hello_size(hello(leases=held).hello)
    with pytest.raises(InvalidMessageError, match="at most 131072"):
        wire_workers.check_hello_size(hello(labels={"l": "x" * (1 << 20)}).hello)
    found = [model_pb2.ModelResidency(model=f"m{n}" * 999) for n in range(2000)]
    beat = worker_pb.Heartbeat(models=found)
    assert len(wire_models.residents(beat)) == MODELS_MAX


def test_a_worker_forgotten_while_its_cordon_is_written(local: LocalMaster) -> None:
    local.send("WorkerService/Session", pack([hello(worker_id="b").SerializeToString()]))
    cordon = admin_pb.CordonWorkerRequest(worker_id="b").SerializeToString()
    forget = admin_pb.ForgetWorkerRequest(worker_id="b").SerializeToString()

    async def both() -> Any:
        calls = [("AdminService/CordonWorker", cordon), ("AdminService/ForgetWorker", forget)]
        return await asyncio.gather(*(local._call(*call) for call in calls))

    assert [code.name for code, _ in local.loop.run_until_complete(both())] == ["OK", "OK"]


def test_a_lease_granted_twice_ends_the_session_and_not_the_worker() -> None:
    local_agent = LocalAgent()
    welcome = worker_pb.SessionResponse(welcome=worker_pb.Welcome()).SerializeToString()
    spec = task_pb2.TaskSpec(kind="sleep")
    lease = worker_pb.LeaseBatch(spec=spec, lease_ids=[1], task_ids=[1], attempts=[1], payloads=[b""], units=[1])
    grant = worker_pb.SessionResponse(lease_batches=[lease, lease]).SerializeToString()
    local_agent.session(pack([welcome, grant]))
    local_agent.close()


@pytest.mark.parametrize("seconds", [2**62, -1])
def test_the_heartbeat_interval_is_limited(seconds: int) -> None:
    local_agent = LocalAgent()
    welcome = worker_pb.Welcome(heartbeat_interval=Duration(seconds=seconds))
    local_agent.session(pack([worker_pb.SessionResponse(welcome=welcome).SerializeToString()]))
    local_agent.close()


FRAME = b"".join(frames.encode(("done", 1), [], BlobMemory.create().up))


@pytest.mark.parametrize("at", range(len(FRAME)))
def test_a_stray_write_to_the_engines_socket_is_detected(at: int) -> None:
    """The agent stopped reading, and the engine's leases waited forever."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(FRAME[:at] + b"a line printed to the wrong descriptor\n" + FRAME[at:] + FRAME)
        with pytest.raises(frames.FrameError):
            frames.Decoder(BlobMemory.create().up).feed(ours)


def test_an_invalid_report_keeps_every_lease_with_its_batch() -> None:
    feed_engine_message("reports", 1, 0, 0, [(1, b"r", ""), (99, b"r", "")], [], [], [], [], False, 0, {})


@pytest.mark.parametrize("text", [[], 7, None, b"CUDA error"])
def test_an_engine_error_that_is_no_text(text: Any) -> None:
    feed_engine_message("reports", 1, 0, 0, [], [(1, "RuntimeError", text, True, "")], [], [], [], False, 0, {})


@pytest.mark.parametrize("words", [(), (1,), (1, True), (1, "yes", ""), (1, True, []), ([], True, "")])
def test_an_invalid_self_test_result(words: Any) -> None:
    local_agent = LocalAgent()
    with pytest.raises(frames.FrameError):
        local_agent.agent.pool.default.apply_frame(("self_test", *words), [])
    local_agent.close()


DAMAGED = {0: (2**62, -1), 1: (b"r",), 2: ("text", b"\xff"), 3: (None, "1:0:-5"), 5: (-1,), 6: (math.inf, "x")}


@pytest.mark.parametrize(("at", "value"), [(at, value) for at, values in DAMAGED.items() for value in values])
def test_a_damaged_task_row_is_rejected(tmp_path: Path, at: int, value: object) -> None:
    row = [*TASK[:at], value, *TASK[at + 1 :]]
    with pytest.raises(JournalError):
        record = JournalReads(tmp_path)._task(row, {})
        wire_tasks.restored_task(record, wire_specs.SpecReader().restore(record.spec))


@pytest.mark.parametrize(("at", "value"), [(0, "x"), (1, -1), (3, 6), (3, "x"), (7, 1e308), (8, "x"), (9, "x")])
def test_a_damaged_outcome_row_is_rejected(tmp_path: Path, at: int, value: object) -> None:
    with pytest.raises(JournalError):
        JournalReads(tmp_path)._outcome([*OUTCOME[:at], value, *OUTCOME[at + 1 :]])


def test_a_damaged_outcome_is_reported_as_lost(tmp_path: Path) -> None:
    stored = JournalReads(tmp_path)._outcome([*OUTCOME[:10], b"\xff\xff"])
    parsed = queries.stored_task(stored, whole=True).outcome
    assert (parsed.task_id, parsed.error.type) == (7, "ResultLost")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", b"\xff"), ("strategy", "text"), ("queue/a", b"[]"), ("queue/a", b'{"paused": true}'),
        ("queue/a", json.dumps({"paused": 1.5, "strategy": "", "tasks_max": -1, "bytes_max": 0}).encode()),
        ("worker/a", SAVED_WORKER.replace(b'"worker_id": "a"', b'"worker_id": 7')),
        ("worker/a", SAVED_WORKER.replace(b'"slots": 1', b'"slots": 0')),
        ("worker/a", SAVED_WORKER.replace(b'"worker_id": "a"', b'"worker_id": "b"')),
        ("worker/a", SAVED_WORKER.replace(b'"pinned_models": []', b'"pinned_models": "abc"')),
        ("worker/a", b"[" * 100_000), ("queue/", b'{"paused": false, "strategy": "", "tasks_max": 0, "bytes_max": 0}'),
        ("worker/a", SAVED_WORKER.replace(b'"connected": false', b'"connected": 9')),
    ],
)  # fmt: skip
def test_a_damaged_setting_is_rejected_with_the_remedy(key: str, value: Any) -> None:
    core = Core(load_strategies(), Limits(), 1, lambda: 0.5)
    with pytest.raises(JournalError, match="salvage`, which removes that setting"):
        settings.restore(lambda event: core.handle(event, 1.6e9), core.ledger.strategies, {key: value})


@pytest.mark.parametrize(("offset", "size_bytes"), [(0, 2**62), (2**63, 1), (2**64 - 1, 2**64 - 1), (3, 1)])
def test_a_reference_past_the_end_of_a_segment(tmp_path: Path, offset: int, size_bytes: int) -> None:
    (tmp_path / "segment").write_bytes(b"abc")
    with pytest.raises(OSError, match="the segment ends before"):
        read_file(tmp_path / "segment", offset, size_bytes)


def test_a_reference_outside_the_shared_directory() -> None:
    at = task_pb2.PayloadReference(segment="../../etc/passwd", size=1)
    with pytest.raises(OSError, match="does not share"):
        Sharing().take(at)


def test_a_number_of_four_hundred_digits_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[master]\nsession_timeout_s = {'9' * 400}\n")
    with pytest.raises(ConfigError, match="session_timeout_s"):
        load(MasterConfig, file=path, env={})


def test_deeply_nested_json_is_rejected() -> None:
    with pytest.raises(Failure, match="not JSON"):
        parse(b"[" * 100_000)


def test_an_outcome_of_a_newer_master_is_no_crash() -> None:
    outcome = Outcome(task_pb2.Outcome(state=99))  # type: ignore[arg-type]  # which is what the wire may bring
    assert outcome.state is OutcomeState.UNSPECIFIED
    assert outcome.to_error() is not None


def test_paces_of_models_are_limited() -> None:
    fleet = Fleet(0.8)
    worker = fleet.register(WorkerInfo(worker_id="w"))
    for n in range(MODEL_KEYS_MAX + 1000):
        fleet.record_run(worker, ("kind", f"model-{n}"), 1, 1, 0.1 + n, 0.0)
    tables = [worker.pace.unit_s, fleet._unit_s.values, fleet._unit_s._exact, fleet._units.values, fleet._units._exact]
    tables += [fleet._unit_s._changed_s, fleet._units._changed_s]
    assert [len(table) for table in tables] == [MODEL_KEYS_MAX] * 7
    assert ("kind", f"model-{MODEL_KEYS_MAX + 999}") in worker.pace.unit_s


def test_the_oldest_lost_worker_is_forgotten_by_the_journal_too() -> None:
    core = Core(load_strategies(), Limits(), 1, lambda: 0.5)
    gone = []
    for n in range(LOST_WORKERS_MAX + 5):
        commands = core.handle(ev.Hello(n + 1, WorkerInfo(worker_id=f"w{n}"), []), 100.0 + n)
        gone += [c.worker.worker_id for c in commands if isinstance(c, ev.WorkerChanged) and c.gone and c.save]
        core.handle(ev.SessionClosed(n + 1), 100.0 + n)
    assert gone == ["w0", "w1", "w2", "w3", "w4"]


def test_a_token_that_invents_workers_pushes_out_its_own_only() -> None:
    core = Core(load_strategies(), Limits(), 1, lambda: 0.5)
    for n in range(1, LOST_WORKERS_MAX + 100):
        token_id = "real" if n < 4 else "inventor"
        core.handle(ev.Hello(n, WorkerInfo(worker_id=f"{token_id}{n}"), [], token_id=token_id), 100.0 + n)
        core.handle(ev.SessionClosed(n), 100.0 + n)
    assert {"real1", "real2", "real3"} <= core.fleet.workers.keys()
    assert len(core.fleet.workers) == LOST_WORKERS_TOKEN_MAX + 3


def test_a_cordoned_worker_is_not_forgotten_to_make_room() -> None:
    core = Core(load_strategies(), Limits(), 1, lambda: 0.5)
    core.handle(ev.Hello(1, WorkerInfo(worker_id="cordoned"), []), 100.0)
    core.handle(ev.Cordon("cordoned", "broken"), 100.0)
    core.handle(ev.SessionClosed(1), 100.0)
    for n in range(LOST_WORKERS_MAX + 5):
        core.handle(ev.Hello(n + 2, WorkerInfo(worker_id=f"w{n}"), []), 101.0 + n)
        core.handle(ev.SessionClosed(n + 2), 101.0 + n)
    assert core.fleet.workers["cordoned"].cordon
    assert len(core.fleet.workers) == LOST_WORKERS_MAX + 1


def test_a_restart_forgets_no_worker_that_was_connected() -> None:
    """Beyond the limit of lost workers, those with the first names were forgotten, with their quarantine and pins."""
    core = Core(load_strategies(), Limits(), 1, lambda: 0.5)
    names = [f"a{n}" for n in range(50)]
    for name in names:
        core.handle(ev.RegisterWorker(WorkerInfo(worker_id=name), None, True, True, 1, ("m",)), 10.0)
    for n in range(LOST_WORKERS_MAX):
        core.handle(ev.RegisterWorker(WorkerInfo(worker_id=f"z{n}")), 10.0)
    for n, name in enumerate(("new1", "new2", *names)):
        core.handle(ev.Hello(n + 1, WorkerInfo(worker_id=name), []), 11.0)
    workers = [core.fleet.workers[name] for name in names]
    assert all(w.quarantined and w.residency.operator_pins for w in workers)
    assert len(core.fleet.workers) == LOST_WORKERS_MAX + 50, "of the others, one for each new worker"


@pytest.mark.parametrize("name", ["x" * 129, "a\0b"])
@pytest.mark.parametrize("method", ["PauseQueue", "SetQueueLimits", "SetStrategy"])
def test_rules_for_an_invalid_queue_name_are_rejected(local: LocalMaster, method: str, name: str) -> None:
    before = len(local.master.driver.core.ledger.queues)
    request = getattr(admin_pb, f"{method}Request")(queue=name)
    if method == "SetStrategy":
        request.strategy = "auto"
    code, _ = local.loop.run_until_complete(local._call(f"AdminService/{method}", request.SerializeToString()))
    assert code.name == "INVALID_ARGUMENT"
    assert len(local.master.driver.core.ledger.queues) == before


@pytest.mark.parametrize("name", ["x" * (1 << 20), "\N{CJK UNIFIED IDEOGRAPH-6A21}" * 1900, "%" * 1900])
def test_a_long_status_is_cut(local: LocalMaster, name: str) -> None:
    """Its trailer was too large for the client, which reported RESOURCE_EXHAUSTED instead of NOT_FOUND."""
    request = task_service_pb2.GetRequest(request_id=name).SerializeToString()
    code, details = local.loop.run_until_complete(local._call("TaskService/Get", request, to_its_end=True))
    assert code.name == "NOT_FOUND"
    assert len(details) < 4000
    assert details.endswith("the master has forgotten it since")


def test_a_request_without_payloads_is_small(local: LocalMaster) -> None:
    """A filter with 55 MiB of states held the event loop for seconds."""
    request = task_service_pb2.ListRequest()
    request.filter.outcomes.extend([task_pb2.OUTCOME_STATE_FAILED] * (3 << 20))
    code, details = local.loop.run_until_complete(local._call("TaskService/List", request.SerializeToString()))
    assert code.name == "INVALID_ARGUMENT"
    assert "at most 2097152 are allowed" in details


@pytest.mark.parametrize("message", ["hello", "heartbeat"])
def test_a_worker_lists_no_more_leases_than_it_can_hold(local: LocalMaster, message: str) -> None:
    """A heartbeat of 8 MiB of empty leases held the event loop for 38 s."""
    first = hello(window_tasks=2**32 - 1)
    beat = worker_pb.SessionRequest(heartbeat=worker_pb.Heartbeat())
    listing = first.hello if message == "hello" else beat.heartbeat
    listing.leases.extend([worker_pb.HeldLease()] * 50_000)
    data = pack([first.SerializeToString(), beat.SerializeToString()])
    code, details = local.loop.run_until_complete(local._call("WorkerService/Session", data))
    assert code.name == "INVALID_ARGUMENT"
    assert "50000 leases in one frame" in details
