"""The real worker after a broken stream, a killed peer or SIGTERM: no report is lost or repeated."""

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from multigpu.v1 import worker_service_pb2 as pb

from tests.worker.asking import until
from tests.worker.conftest import Start, StartWorker
from tests.worker.scripted_master import ScriptedMaster, Stream


async def test_work_goes_on_while_the_stream_is_down(master: ScriptedMaster, start: Start) -> None:
    _, stream = await start()
    stream.lease([(1, b"0.4"), (2, b"0.01")], kind="sleep")
    await stream.running(1)
    await master.stop()
    await asyncio.sleep(0.8)  # both end meanwhile
    await master.start()
    stream = await master.stream()
    assert {held.lease_id for held in stream.hello.leases} == {1, 2}
    reports = await stream.reported(1, 2)
    assert [report.result for report in reports] == [b"0.4", b"0.01"]


async def test_reports_that_the_stream_lost_are_sent_again(master: ScriptedMaster, start: Start) -> None:
    _, stream = await start()
    stream.lease([(n, b"x%d" % n) for n in range(1, 101)], kind="echo")
    await stream.reported(*range(1, 101))
    # As if all of them had arrived, but only the odd ones had been written down.
    master.adopt = lambda hello: [lease.lease_id for lease in hello.leases if lease.lease_id % 2 == 0]
    stream.break_off()
    stream = await master.stream()
    assert {held.lease_id for held in stream.hello.leases} >= set(range(1, 101))
    reports = await stream.reported(*range(2, 101, 2))
    assert all(report.result == b"x%d" % report.lease_id for report in reports)
    await asyncio.sleep(0.2)
    assert all(lease_id % 2 == 0 for lease_id in stream.reports)


async def test_leases_not_taken_back_are_dropped(master: ScriptedMaster, start: Start) -> None:
    _, stream = await start("--cancel-grace-s", "0.2")
    stream.lease([(1, b"600"), (2, b"600"), (3, b"x")], kind="sleep")
    await stream.running(1)
    master.adopt = lambda hello: [3]
    stream.break_off()
    stream = await master.stream()
    assert {held.lease_id for held in stream.hello.leases} == {1, 2, 3}
    await stream.reported(3)
    assert set(stream.reports) == {3}
    await stream.until(lambda: not stream.heartbeats[-1].leases)


async def test_partials_from_the_beginning_after_a_reconnect(master: ScriptedMaster, stream: Stream) -> None:
    stream.lease([(1, b"")], kind="t.endless")
    await stream.until(lambda: len(stream.partials) > 20)
    stream.break_off()
    stream = await master.stream()
    await stream.until(lambda: len(stream.partials) > 50)
    assert [p.index for p in stream.partials] == list(range(len(stream.partials)))
    assert [p.data for p in stream.partials] == [b"%d" % p.index for p in stream.partials]
    stream.revoke(1)
    await stream.until(lambda: not stream.heartbeats[-1].leases)


async def test_an_attempt_with_earlier_outputs_ends_with_its_stream(master: ScriptedMaster, stream: Stream) -> None:
    stream.lease([(1, b"")], attempt=2, extra=pb.LeaseExtra(partials_received=10), kind="t.endless")
    await stream.until(lambda: len(stream.partials) > 20)
    assert [p.index for p in stream.partials][:3] == [10, 11, 12]
    stream.break_off()
    stream = await master.stream()
    assert not stream.hello.leases


async def test_too_many_partials_end_the_attempt_with_its_stream(master: ScriptedMaster, stream: Stream) -> None:
    stream.lease([(1, b"20")], kind="t.big_parts")
    stream.lease([(2, b"600"), (3, b"x")], kind="sleep")
    await stream.reported(1)  # connected all the time: fine
    assert len(stream.partials) == 20
    stream.break_off()
    stream = await master.stream()
    assert {held.lease_id for held in stream.hello.leases} == {2, 3}


async def test_checkpoints_in_hello(master: ScriptedMaster, stream: Stream) -> None:
    await stream.run(1, b"it", kind="t.checkpoint_then_raise")
    stream.break_off()
    stream = await master.stream()
    assert [held.checkpoint for held in stream.hello.leases] == [b"kept it"]


async def test_however_a_stream_ends_another_begins(master: ScriptedMaster, start_worker: StartWorker) -> None:
    final = {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED}
    codes = [code for code in grpc.StatusCode if code not in final]
    await start_worker(master.address)
    for code in codes:
        stream = await master.stream()
        stream.break_off(code)
    for code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT):
        stream = await master.stream()
        master.reject = (code, "not now")
        stream.break_off()
        await asyncio.sleep(0.3)
        master.reject = None
    stream = await master.stream()
    await stream.run(1, b"x", kind="echo")


async def test_another_protocol_version_ends_the_worker(master: ScriptedMaster, start_worker: StartWorker) -> None:
    master.reject = grpc.StatusCode.FAILED_PRECONDITION, "it speaks version 1, the master 2: upgrade the worker"
    worker = await start_worker(master.address)
    assert await worker.wait() == 4
    assert "upgrade the worker" in worker.log


async def test_waits_for_a_master(start_worker: StartWorker) -> None:
    master = ScriptedMaster()
    await master.start()
    await master.stop()
    worker = await start_worker(master.address)
    await asyncio.sleep(1.5)
    await master.start()
    began_s = time.monotonic()
    stream = await master.stream()
    assert time.monotonic() - began_s < 15  # the longest delay is 2 s, and a machine may be busy
    await stream.run(1, b"x", kind="echo")
    assert worker.process.returncode is None
    await master.stop()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_drain_finishes_held_leases(start: Start, signum: signal.Signals) -> None:
    worker, stream = await start()
    stream.lease([(1, b"0.5"), (2, b"0.1")], kind="sleep")
    await stream.running(1)
    worker.signal(signum)
    await stream.until(lambda: stream.heartbeats[-1].draining)
    assert await worker.wait() == 0
    assert [stream.reports[n].result for n in (1, 2)] == [b"0.5", b"0.1"]


async def test_drain_returns_leases_that_take_too_long(start: Start) -> None:
    worker, stream = await start("--drain-timeout-s", "0.3")
    stream.lease([(1, b"600"), (2, b"600")], kind="sleep")
    await stream.running(1)
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    assert [stream.reports[n].state for n in (1, 2)] == [pb.REPORT_STATE_RETURNED] * 2


async def test_second_signal_stops_at_once(start: Start) -> None:
    worker, stream = await start()
    stream.lease([(1, b"600")], kind="sleep")
    await stream.running(1)
    worker.signal(signal.SIGTERM)
    await stream.until(lambda: stream.heartbeats[-1].draining)
    began_s = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    assert time.monotonic() - began_s < 15  # and not 30
    assert stream.reports[1].state == pb.REPORT_STATE_RETURNED


async def test_drain_without_a_master_ends(start_worker: StartWorker) -> None:
    worker = await start_worker("127.0.0.1:1")
    await until(lambda: "engine ready" in worker.log, "the log line")
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0


async def test_the_agent_never_imports_torch_and_its_engine_dies_with_it(start_handlers: Start) -> None:
    worker, stream = await start_handlers()
    await stream.run(1, b"x", kind="echo")
    (engine,) = worker.engine_pids()
    assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()
    maps = Path(f"/proc/{engine}/maps").read_text()
    assert "libtorch" not in maps  # it only echoed
    assert "grpc" not in maps
    stream.lease([(2, b"")], kind="t.spin")
    await stream.running(2)
    worker.signal(signal.SIGKILL)
    await worker.wait()
    status = Path(f"/proc/{engine}/status")
    await until(lambda: not status.exists() or "State:\tZ" in status.read_text(), "the end of the engine")


@pytest.mark.slow
async def test_results_pile_up_no_further_than_the_limit(master: ScriptedMaster, start_handlers: Start) -> None:
    """While the stream is down the engine has to wait once 64 MiB of results wait, and goes on after that."""
    worker, stream = await start_handlers("--engine-memory-bytes", "2GiB")
    stream.lease([(n, b"1048576") for n in range(1, 401)], kind="t.big")
    await stream.until(lambda: len(stream.reports) > 10)
    await master.stop()
    before = len(stream.reports)
    await asyncio.sleep(1.5)
    resident = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 300 << 20
    await master.start()
    again = await master.stream()
    await again.until(lambda: len(set(stream.reports) | set(again.reports)) == 400, timeout_s=60)
    assert before < 400


@pytest.mark.parametrize("setting", ["token-file", "artifacts-dir", "stats-file", "tls-ca"])
async def test_an_unusable_file_is_rejected(master: ScriptedMaster, start_worker: StartWorker, setting: str) -> None:
    worker = await start_worker(master.address, f"--{setting}", "/proc/nonexistent/file")
    assert await worker.wait() == 2
    assert "/proc/nonexistent" in worker.log
    assert "Traceback" not in worker.log


async def test_the_same_reason_is_not_logged_every_second(master: ScriptedMaster, start_worker: StartWorker) -> None:
    master.reject = grpc.StatusCode.UNAUTHENTICATED, "no such token"
    worker = await start_worker(master.address)
    await until(lambda: "no such token" in worker.log, "the log line")
    before = master.rejections
    await until(lambda: master.rejections >= before + 5, "five more rejections")
    assert worker.log.count("no such token") == 3
    master.reject = grpc.StatusCode.UNAUTHENTICATED, "the token has ended"
    await until(lambda: "the token has ended" in worker.log, "the log line")


LARGE = """
import os, time
from multigpu.handlers import handler

@handler("my.large")
def large(value: bytes) -> bytes:
    folder = value.decode()
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
    open(f"{folder}/run-{time.monotonic_ns()}", "x").close()
    return bytes(8 << 20)
"""


async def test_an_engine_that_begins_while_too_much_is_unsent_waits_too(
    master: ScriptedMaster, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    worker, stream = await start("--handlers", "large", pythonpath=tmp_path)
    stream.lease([(n, str(tmp_path).encode()) for n in range(1, 41)], kind="my.large")
    await stream.running(1)
    await master.stop()
    (tmp_path / "go").touch()

    async def runs(more_than: int) -> int:
        """How many results were made, once their number stays the same."""
        before = -1
        while (made := len(list(tmp_path.glob("run-*")))) <= more_than or made != before:
            before = made
            await asyncio.sleep(1.0)
        return made

    async with asyncio.timeout(120):
        first = await runs(0)
        (pid,) = worker.engine_pids()
        os.kill(pid, signal.SIGKILL)
        assert first <= await runs(first) < 40
