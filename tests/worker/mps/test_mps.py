"""MPS with real workers on simulated GPUs and the simulated control daemon: see tests/fakes/mps_control/README.md."""

import asyncio
import json
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from multigpu.v1 import device_pb2
from multigpu.v1 import worker_service_pb2 as pb

from tests.fakes.mps_host import MpsHost
from tests.worker.scripted_master import SUCCEEDED

PATIENT = ("--mps-terminate-timeout-s", "60")
SOON = ("--cancel-grace-s", "0.2", "--drain-timeout-s", "0.2")
FAILED = pb.REPORT_STATE_FAILED
RETURNED = pb.REPORT_STATE_RETURNED


@pytest.mark.slow
async def test_an_engine_is_a_client_with_its_limits(host: MpsHost) -> None:
    limits = ("--mps-active-thread-percentage", "25", "--mps-pinned-device-mem-limit-bytes", "2GiB")
    worker = await host.worker(0, *limits)
    worker.stream.lease([(1, b"0")], kind="m.work")
    worker.stream.lease([(2, b"")], kind="m.environment")
    work, environment = await worker.stream.reported(1, 2)
    assert work.result == b'"%d"' % worker.engine_pid()
    assert {
        "CUDA_MPS_PIPE_DIRECTORY": str(host.pipe_dir(0)),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M",
        "CUDA_VISIBLE_DEVICES": host.device_id(0),
    }.items() <= json.loads(environment.result).items()
    await worker.stream.until(lambda: worker.stream.heartbeats and worker.stream.heartbeats[-1].mps.clients == 1)
    mps = worker.stream.heartbeats[-1].mps
    assert (mps.state, mps.clients_max) == (device_pb2.MPS_STATE_RUNNING, 48)
    assert await worker.stop() == 0
    counts = host.counts(0)  # the daemon outlives its workers
    assert (counts["violations"], counts["servers"]) == ([], 1)


@pytest.mark.slow
async def test_every_engine_is_detached_before_it_is_ended(host: MpsHost) -> None:
    worker = await host.worker(0, *SOON, *PATIENT, "--engine-memory-bytes", "320MiB")
    host.control(0, "fake terminate_s 0.3")
    stream = worker.stream
    timeout = Duration(nanos=300_000_000)
    for number, kind in enumerate(("m.stuck", "m.children"), 1):
        assert (await stream.run(number, kind=kind, run_timeout=timeout)).error.type == "RunTimeout"
    stream.lease([(3, b"")], kind="m.stuck")
    await stream.running(3)
    heartbeats = len(stream.heartbeats)
    stream.revoke(3)
    assert (await stream.run(4, kind="m.work")).state == SUCCEEDED
    assert len(stream.heartbeats) > heartbeats, "no heartbeat while the engine was ended"
    assert (await stream.run(5, kind="m.hoard")).error.type == "OutOfMemory"
    assert (await stream.run(6, kind="m.crash")).error.type == "EngineDied"
    stream.lease([(7, b"")], kind="m.stuck")
    await stream.running(7)
    counts = host.counts(0)
    assert (counts["violations"], counts["faults"], counts["forced"]) == ([], 0, 0)
    assert counts["terminated"] == 5  # stuck, one with its child, cancelled, hoarder
    engine_pid = worker.engine_pid()
    assert engine_pid
    assert await worker.stop() == 0
    counts = host.counts(0)
    assert (counts["violations"], counts["terminated"]) == ([], 6)
    assert not Path(f"/proc/{engine_pid}").exists()


@pytest.mark.slow
async def test_a_fault_ends_the_engines_of_its_gpu_and_is_charged_to_its_client(host: MpsHost) -> None:
    guilty, neighbour, elsewhere = await asyncio.gather(*(host.worker(gpu, *PATIENT) for gpu in (0, 0, 1)))
    engines = {}
    for worker in (guilty, neighbour, elsewhere):
        await worker.stream.run(1, b"", kind="m.work")
        engines[worker] = worker.engine_pid()
    for other in (neighbour, elsewhere):
        other.stream.lease([(2, b"2")], kind="m.work")
        await other.stream.running(2)
    guilty.stream.lease([(2, b""), (3, b"")], kind="m.fault")
    for word in await guilty.stream.reported(2, 3):
        assert (word.state, word.error.retryable) == (FAILED, True)
        assert "illegal memory access" in word.error.message
    broke = [report for batch in guilty.stream.batches for report in batch.reports]
    assert all(report.broke_engine for report in broke)
    # The other worker of the GPU lost its engine too; its task runs again, as the same attempt.
    for other in (neighbour, elsewhere):
        assert (await other.stream.reported(2))[0].state == SUCCEEDED
    assert elsewhere.engine_pid() == engines[elsewhere]
    assert guilty.engine_pid() != engines[guilty]
    assert neighbour.engine_pid() != engines[neighbour]
    assert any(beat.mps.state == device_pb2.MPS_STATE_FAULT for beat in neighbour.stream.heartbeats)
    assert any(str(engines[guilty]) in beat.mps.message for beat in neighbour.stream.heartbeats)
    faulty, sound = host.counts(0), host.counts(1)
    assert (faulty["violations"], faulty["faults"], faulty["forced"]) == ([], 2, 0)
    assert (sound["violations"], sound["faults"], sound["servers"]) == ([], 0, 1)


@pytest.mark.slow
async def test_a_server_that_stays_in_fault_is_shut_down(host: MpsHost) -> None:
    worker = await host.worker(0, *PATIENT)
    await worker.stream.run(1, b"", kind="m.work")
    host.control(0, "fake stick")
    host.control(0, "fake mute")
    worker.stream.lease([(2, b"")], kind="m.fault")
    worker.stream.lease([(3, b"")], kind="m.work")
    # The log names no client: the only one on the GPU is to blame.
    fault, work = await worker.stream.reported(2, 3)
    assert (fault.state, work.state) == (FAILED, SUCCEEDED)
    counts = host.counts(0)
    assert (counts["violations"], counts["servers"], counts["forced"]) == ([], 2, 1)


@pytest.mark.slow
async def test_a_server_that_does_not_detach_an_engine_is_shut_down_before_the_kill(host: MpsHost) -> None:
    worker = await host.worker(0, "--mps-terminate-timeout-s", "1")
    host.control(0, "fake reject")
    timeout = Duration(nanos=200_000_000)
    worker.stream.lease([(1, b"")], kind="m.stuck", run_timeout=timeout)
    worker.stream.lease([(2, b"")], kind="m.work")
    stuck, work = await worker.stream.reported(1, 2)
    assert (stuck.error.type, work.state) == ("RunTimeout", SUCCEEDED)
    counts = host.counts(0)
    assert (counts["violations"], counts["forced"]) == ([], 1)
    assert "MPS does not let go of the engine" in worker.log


@pytest.mark.slow
@pytest.mark.parametrize("knob", ["reword", "reword_lists"])
async def test_an_answer_in_an_unknown_format_ends_no_other_engine(host: MpsHost, knob: str) -> None:
    worker, neighbour = await asyncio.gather(*(host.worker(0, *PATIENT) for _ in range(2)))
    for each in (worker, neighbour):
        await each.stream.run(1, b"", kind="m.work")
    neighbour_pid = neighbour.engine_pid()
    host.control(0, f"fake {knob}")
    timeout = Duration(nanos=200_000_000)
    for lease_id in (2, 4):
        worker.stream.lease([(lease_id, b"")], kind="m.stuck", run_timeout=timeout)
        worker.stream.lease([(lease_id + 1, b"")], kind="m.work")
        stuck, work = await worker.stream.reported(lease_id, lease_id + 1)
        assert (stuck.error.type, work.state) == ("RunTimeout", SUCCEEDED)
    word = await neighbour.stream.run(2, b"", kind="m.work")
    assert (word.state, neighbour.engine_pid()) == (SUCCEEDED, neighbour_pid)
    counts = host.counts(0)
    assert (counts["servers"], counts["forced"], counts["faults"]) == (1, 0, 0)
    if knob == "reword":
        assert (counts["terminated"], counts["violations"]) == (2, []), "a client was terminated repeatedly"
    assert worker.log.count("in a format that this worker doesn't know") == 1
    assert "MPS does not let go of the engine" not in worker.log


@pytest.mark.slow
async def test_an_engine_is_started_again_when_its_daemon_is_back(host: MpsHost) -> None:
    worker = await host.worker(0, *PATIENT)
    stream = worker.stream
    await stream.run(1, b"", kind="m.work")
    engine_pid = worker.engine_pid()
    host.control(0, "quit")
    stream.lease([(2, b"")], kind="m.work")
    await stream.until(lambda: stream.heartbeats[-1].mps.state == device_pb2.MPS_STATE_FAULT)
    host.start_daemon(0)
    assert (await stream.reported(2))[0].state == SUCCEEDED
    assert worker.engine_pid() != engine_pid
    await stream.until(lambda: stream.heartbeats[-1].mps.state == device_pb2.MPS_STATE_RUNNING)
    assert host.counts(0)["violations"] == []


async def test_a_worker_that_needs_mps_does_not_start_without_its_daemon(host: MpsHost) -> None:
    host.control(0, "quit")
    rejected, without = await host.launch(0), await host.worker(0, "--mps", "auto")
    assert await asyncio.wait_for(rejected.process.wait(), 120) == 3
    assert f"systemctl start mgpu-mps@{host.device_id(0)}" in rejected.log
    await without.stream.until(lambda: without.stream.heartbeats)
    assert without.stream.heartbeats[-1].mps.state == device_pb2.MPS_STATE_OFF
    assert not (host.pipe_dir(0) / "control").exists(), "a worker has started the daemon"


async def test_mps_is_off_or_an_error_where_it_is_not_possible(host: MpsHost) -> None:
    host.gpus.mig(0, 2)
    part = ("--device", host.gpus.mig_uuids(0)[1])
    rejected, without = await host.launch(0, *part), await host.worker(0, "--mps", "auto", *part)
    assert await asyncio.wait_for(rejected.process.wait(), 120) == 3
    assert "MIG is on" in rejected.log
    stream = without.stream
    await stream.until(lambda: stream.heartbeats)
    assert stream.heartbeats[-1].mps.state == device_pb2.MPS_STATE_OFF
    assert "MIG is on" in stream.heartbeats[-1].mps.message
    word = await stream.run(1, b"", kind="m.environment")
    assert b"CUDA_MPS" not in word.result
    host.gpus.mig(0, None)
    host.gpus.gpu(0).compute_mode = 2
    prohibited = await host.launch(0)
    assert await asyncio.wait_for(prohibited.process.wait(), 120) == 3
    assert "compute mode is PROHIBITED" in prohibited.log
