"""A real worker whose simulated GPU falls sick: its reports, its leases, its recovery."""

import importlib.util
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from multigpu.v1 import worker_service_pb2 as pb

from tests.fakes.gpus import SimulatedGpus
from tests.worker.asking import until
from tests.worker.conftest import HANDLERS, Start, WorkerProcess
from tests.worker.device.conftest import ON_GPU_0, Begin
from tests.worker.device.reports import DEGRADED, FAILED, HEALTHY, RECOVERING, RETURNED, SICK, codes, health, is_
from tests.worker.scripted_master import SUCCEEDED, ScriptedMaster, Stream

pytestmark = pytest.mark.slow

Strike = Callable[[SimulatedGpus], None]
HAS_TORCH = importlib.util.find_spec("torch") is not None


async def test_a_sick_device_is_reported_at_once_gives_all_leases_back_and_recovers(
    tmp_path: Path, gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    master.heartbeat_s = 30.0
    worker, stream = await begin()
    running = tmp_path / "running"
    stream.lease([(n, str(running).encode()) for n in range(1, 4)], kind="health.mark")
    await until(running.exists, "a task to run")
    begun_s = time.monotonic()
    gpus.recovery_action(0, 1)
    gpus.xid(0, 95)
    words = await stream.reported(1, 2, 3)
    assert time.monotonic() - begun_s < 20.0, "before the next heartbeat is due"
    assert {word.state for word in words} == {RETURNED}
    told = next(i for i, event in enumerate(stream.events) if event == ("report", 1))
    sick = [i for i, event in enumerate(stream.events) if event == "heartbeat"]
    assert any(0 < i < told for i in sick), "a heartbeat with the reason precedes the reports"
    assert health(stream).unusable
    await until(lambda: "xid_95" in codes(stream), "the reason of the XID")
    assert health(stream).HasField("next_check_time")
    assert "nvidia-smi --gpu-reset" in health(stream).reasons[0].message
    await until(lambda: not worker.engine_pids(), "the engine to let go of the device")
    assert (await stream.run(9, b"0", kind="health.work")).state == RETURNED
    gpus.recovery_action(0, 0)
    await stream.until(lambda: is_(stream, HEALTHY))
    word = await stream.run(10, b"0", kind="health.work")
    assert (word.state, word.result) == (SUCCEEDED, b"%d" % worker.engine_pids()[0])
    assert codes(stream) == []


async def test_a_lost_device_has_no_engine_and_its_worker_goes_on_and_logs(gpus: SimulatedGpus, begin: Begin) -> None:
    worker, stream = await begin()
    stream.lease([(1, b"30")], kind="health.work")
    await stream.running(1)
    gpus.lose(0)
    assert (await stream.reported(1))[0].state == RETURNED
    await stream.until(lambda: "gpu_is_lost" in codes(stream))
    await until(lambda: not worker.engine_pids(), "the end of the engine")
    seen = len(stream.heartbeats)
    await stream.until(lambda: len(stream.heartbeats) > seen + 10)
    assert is_(stream, SICK)
    gpus.return_(0, reset=True)
    await stream.until(lambda: is_(stream, HEALTHY), 30)
    assert len(worker.engine_pids()) == 1
    # Events of the returned device are received again.
    gpus.xid(0, 119)
    await stream.until(lambda: "xid_119" in codes(stream))
    events = ("XID", "the device's health", "no events of the device for now")
    await until(lambda: all(f'"{event}"' in worker.log for event in events), f"log lines {events}")
    lines = [json.loads(line) for line in worker.log.splitlines()]
    assert {line.get("worker_id") for line in lines if line["event"] in events} == {"w0"}


def reload_driver(gpus: SimulatedGpus) -> None:
    """Reset the volatile counters, without a reset of the GPU."""
    for kind in gpus.gpu(0).ecc:
        kind[0] = 0


@pytest.mark.parametrize(
    "strike",
    [lambda gpus: gpus.xid(0, 48), lambda gpus: gpus.xid(0, 95), lambda gpus: gpus.ecc(0, uncorrected=1)],
    ids=["xid_48", "xid_95", "ecc"],
)
async def test_neither_a_right_self_test_nor_a_reload_of_the_driver_is_a_reset(
    tmp_path: Path, gpus: SimulatedGpus, begin: Begin, strike: Strike
) -> None:
    right = {"TEST_WRONG_FILE": str(tmp_path / "never")} if HAS_TORCH else {}
    worker, stream = await begin("--canary-interval-s", "0.3", **right)
    strike(gpus)
    await stream.until(lambda: is_(stream, SICK))

    async def check() -> None:
        checks = worker.log.count('"RECOVERING"')
        await until(lambda: worker.log.count('"RECOVERING"') > checks, "a check")
        seen = len(stream.heartbeats)
        await stream.until(lambda: len(stream.heartbeats) > seen + 1)
        assert {beat.health.state for beat in stream.heartbeats[seen:]} <= {SICK, RECOVERING}
        assert "no reset was seen" in health(stream).reasons[0].message

    await check()
    reload_driver(gpus)
    await check()
    gpus.fail("nvmlDeviceGetMemoryInfo_v2", 0, code=9)  # the driver is not loaded for a while
    await stream.until(lambda: "driver_not_loaded" in codes(stream))
    gpus.mend()
    await check()
    gpus.recovery_action(0, 1)
    await stream.until(lambda: "reset_required" in codes(stream))
    gpus.recovery_action(0, 0)
    await stream.until(lambda: is_(stream, HEALTHY))


async def test_an_unusable_gpu_can_be_reset_while_workers_run(gpus: SimulatedGpus, begin: Begin, start: Start) -> None:
    _, stream = await begin()
    _, neighbour = await start("--device", gpus.uuid(7), env=gpus.env())
    await neighbour.until(lambda: is_(neighbour, HEALTHY))
    assert not gpus.reset(0), "a fit GPU is open"
    gpus.recovery_action(0, 1)
    gpus.xid(0, 95)
    await stream.until(lambda: is_(stream, SICK))
    await until(lambda: gpus.reset(0), "the driver to let the GPU be reset")
    await stream.until(lambda: is_(stream, HEALTHY), 30)
    assert not gpus.reset(0)
    gpus.xid(0, 119)
    await stream.until(lambda: "xid_119" in codes(stream))


@pytest.mark.parametrize(
    ("code", "strike", "reset"),
    [
        ("gpu_is_lost", lambda gpus: gpus.lose(0), lambda gpus: gpus.return_(0)),
        ("reset_required", lambda gpus: gpus.recovery_action(0, 1), lambda gpus: gpus.recovery_action(0, 0)),
    ],
)
async def test_a_new_process_of_the_worker_knows_that_the_device_needs_a_reset(
    gpus: SimulatedGpus, begin: Begin, start: Start, code: str, strike: Strike, reset: Strike
) -> None:
    async def another_process(meanwhile: Strike = lambda _: None) -> tuple[WorkerProcess, Stream]:
        worker.signal(signal.SIGKILL)
        await worker.wait()
        meanwhile(gpus)
        return await start(*ON_GPU_0, pythonpath=HANDLERS, env=gpus.env())

    worker, stream = await begin()
    gpus.xid(0, 48)
    await stream.until(lambda: is_(stream, SICK))
    worker, stream = await another_process()
    await stream.until(lambda: len(stream.heartbeats) > 3)
    assert (await stream.run(1, b"0", kind="health.work")).state == RETURNED
    assert {beat.health.state for beat in stream.heartbeats} <= {SICK, RECOVERING}
    assert "xid_48" in codes(stream)
    strike(gpus)
    await stream.until(lambda: code in codes(stream))
    worker, stream = await another_process(reset)
    await stream.until(lambda: is_(stream, HEALTHY))
    worker, stream = await another_process()
    await stream.until(lambda: bool(stream.heartbeats))
    assert is_(stream, HEALTHY)


async def test_a_check_that_the_master_requests(begin: Begin) -> None:
    _, stream = await begin()
    stream.lease([(1, b"1.5"), (2, b"1.5"), (3, b"1.5"), (4, b"1.5"), (5, b"1.5")], kind="health.work")
    await stream.running(1)
    stream.send(desired=pb.DesiredState(mode=pb.WORKER_MODE_ACTIVE, check=3))
    await stream.until(lambda: is_(stream, SICK))
    assert codes(stream) == ["tasks_fail"]
    assert not health(stream).unusable
    assert health(stream).checks_passed == 0
    await stream.until(lambda: is_(stream, HEALTHY))
    assert health(stream).checks_passed == 3
    words = await stream.reported(1, 2, 3, 4, 5)
    assert words[0].state == SUCCEEDED, "running tasks may finish"
    assert RETURNED in {word.state for word in words}, "waiting tasks go back"
    assert FAILED not in {word.state for word in words}


async def test_heat_and_spare_rows_degrade_a_device_that_stays_in_use(gpus: SimulatedGpus, begin: Begin) -> None:
    _, stream = await begin()
    gpus.throttle(0, 0x40)  # hw_thermal_slowdown
    gpus.remap(0, uncorrectable=1, pending=True, failed=False)
    await stream.until(lambda: set(codes(stream)) == {"thermal_throttle", "row_remap_pending"})
    assert is_(stream, DEGRADED)
    assert (await stream.run(1, b"0", kind="health.work")).state == SUCCEEDED
    gpus.throttle(0, 0x04)  # sw_power_cap: normal under load
    gpus.remap(0, uncorrectable=1, pending=False, failed=False)
    await stream.until(lambda: is_(stream, HEALTHY))
    gpus.ecc(0, uncorrected=1)
    await stream.until(lambda: any("ecc_uncorrected" in [r.code for r in b.health.reasons] for b in stream.heartbeats))


async def test_a_driver_that_hangs_stops_no_task_heartbeat_or_shutdown(gpus: SimulatedGpus, begin: Begin) -> None:
    worker, stream = await begin()
    gpus.hang(0)
    try:
        assert (await stream.run(1, b"0", kind="health.work")).state == SUCCEEDED
        await stream.until(lambda: "driver_hung" in codes(stream))
        seen = len(stream.heartbeats)
        await stream.until(lambda: len(stream.heartbeats) > seen + 10)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
    finally:
        gpus.answer_(0)
