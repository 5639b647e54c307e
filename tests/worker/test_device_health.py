"""A real worker whose simulated GPU falls sick: its reports, its leases, its recovery."""

import asyncio
import importlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from multigpu.v1 import device_pb2 as device
from multigpu.v1 import worker_service_pb2 as pb
from multigpu_worker.engines.common import self_test

from tests.fakes.gpus import SimulatedGpus

from .conftest import StartWorker, WorkerProcess
from .scripted_master import SUCCEEDED, ScriptedMaster, Stream

HEALTHY, DEGRADED = device.HEALTH_STATE_HEALTHY, device.HEALTH_STATE_DEGRADED
SICK, RECOVERING = device.HEALTH_STATE_SICK, device.HEALTH_STATE_RECOVERING
FAILED, RETURNED = pb.REPORT_STATE_FAILED, pb.REPORT_STATE_RETURNED
HANDLERS = Path(__file__).parent / "handlers"
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", 2)


Begin = Callable[..., Awaitable[tuple[WorkerProcess, Stream]]]
Strike = Callable[[SimulatedGpus], None]


@pytest.fixture
async def begin(gpus: SimulatedGpus, start_worker: StartWorker) -> Begin:
    """Starts a worker on GPU 0, and waits until it reports a healthy device."""

    async def begin(master: ScriptedMaster, *flags: str, **env: str) -> tuple[WorkerProcess, Stream]:
        handlers = ("--device", "cuda:0", "--handlers", "handlers_for_health")
        worker = await start_worker(master.address, *handlers, *flags, pythonpath=HANDLERS, env={**gpus.env(), **env})
        stream = await master.stream()
        await stream.until(lambda: is_(stream, HEALTHY))
        return worker, stream

    return begin


def health(stream: Stream) -> device.DeviceHealth:
    return stream.heartbeats[-1].health


def is_(stream: Stream, state: int) -> bool:
    return bool(stream.heartbeats) and health(stream).state == state


def codes(stream: Stream) -> list[str]:
    return [reason.code for reason in health(stream).reasons]


def broke(stream: Stream, lease_id: int) -> bool:
    return any(r.broke_engine for batch in stream.batches for r in batch.reports if r.lease_id == lease_id)


async def until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


async def runs(stream: Stream, lease_id: int) -> None:
    await stream.until(lambda: any(held.lease_id == lease_id and held.running for held in stream.heartbeats[-1].leases))


async def test_a_sick_device_is_reported_at_once_gives_all_leases_back_and_recovers(
    tmp_path: Path, gpus: SimulatedGpus, begin: Begin
) -> None:
    async with ScriptedMaster(heartbeat_s=30.0) as slow:
        worker, stream = await begin(slow)
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
        assert "xid_95" in codes(stream)
        assert health(stream).HasField("next_check_time")
        assert "nvidia-smi --gpu-reset" in health(stream).reasons[0].message
        await until(lambda: not worker.engine_pids(), "the engine to let go of the device")
        stream.lease([(9, b"0")], kind="health.work")
        assert (await stream.reported(9))[0].state == RETURNED
        gpus.recovery_action(0, 0)
        await stream.until(lambda: is_(stream, HEALTHY))
        stream.lease([(10, b"0")], kind="health.work")
        (word,) = await stream.reported(10)
        assert (word.state, word.result) == (SUCCEEDED, b"%d" % worker.engine_pids()[0])
        assert codes(stream) == []


async def test_log_lines_about_the_device_name_the_worker(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    worker, stream = await begin(master)
    gpus.lose(0)
    await stream.until(lambda: is_(stream, SICK))
    events = ("XID", "the device's health", "no events of the device for now")
    await until(lambda: all(f'"{event}"' in worker.log for event in events), f"log lines {events}")
    lines = [json.loads(line) for line in worker.log.splitlines()]
    assert {line.get("worker_id") for line in lines if line["event"] in events} == {"w0"}


async def test_a_lost_device_has_no_engine_and_its_worker_goes_on(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    worker, stream = await begin(master)
    stream.lease([(1, b"30")], kind="health.work")
    await runs(stream, 1)
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


async def test_an_application_xid_charges_the_running_task_and_not_the_device(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    worker, stream = await begin(master)
    before = worker.engine_pids()
    stream.lease([(1, b"1.0")], kind="health.work_and_raise")
    await runs(stream, 1)
    gpus.xid(0, 13)
    (word,) = await stream.reported(1)
    assert (word.state, word.error.type, broke(stream, 1)) == (FAILED, "RuntimeError", True)
    await until(lambda: worker.engine_pids() and worker.engine_pids() != before, "another engine")
    stream.lease([(2, b"0.3")], kind="health.work_and_raise")
    stream.lease([(3, b"0.5")], kind="health.work")
    await runs(stream, 3)
    gpus.xid(0, 31)  # another process's doing: what runs here succeeds
    assert [word.state for word in await stream.reported(2, 3)] == [FAILED, SUCCEEDED]
    assert not broke(stream, 2), "it had ended before the XID"
    assert all(beat.health.state == HEALTHY for beat in stream.heartbeats)


async def test_an_engine_whose_cuda_context_is_lost_is_replaced(master: ScriptedMaster, begin: Begin) -> None:
    worker, stream = await begin(master)
    before = b"%d" % worker.engine_pids()[0]
    words = "CUDA error: device-side assert triggered"
    stream.lease([(1, words.encode())], kind="health.raise")
    stream.lease([(2, b"0"), (3, b"0")], kind="health.work")
    one, two, three = await stream.reported(1, 2, 3)
    assert (one.state, one.error.message, broke(stream, 1)) == (FAILED, words, True)
    assert [two.state, three.state] == [SUCCEEDED] * 2
    # Results of the old engine, which did not need the context, count.
    await until(lambda: (pids := worker.engine_pids()) and b"%d" % pids[0] != before, "another engine")
    after = b"%d" % worker.engine_pids()[0]
    assert {two.result, three.result} <= {before, after}
    stream.lease([(4, b"CUDA out of memory. Tried to allocate 2 GiB")], kind="health.raise")
    stream.lease([(5, b"0")], kind="health.work")
    four, five = await stream.reported(4, 5)
    assert (four.state, broke(stream, 4)) == (FAILED, False)
    assert five.result == after, "running out of memory does not cost the context"
    assert is_(stream, HEALTHY)


async def test_an_error_of_the_devices_memory_is_not_charged_to_the_task(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    _worker, stream = await begin(master)
    stream.lease([(1, b"CUDA error: uncorrectable ECC error encountered")], kind="health.raise")
    (word,) = await stream.reported(1)
    assert (word.state, broke(stream, 1)) == (RETURNED, False)
    await stream.until(lambda: any("ecc_uncorrected" in [r.code for r in b.health.reasons] for b in stream.heartbeats))
    gpus.return_(0, reset=True)
    await stream.until(lambda: is_(stream, HEALTHY))


def count_no_errors(gpus: SimulatedGpus) -> None:
    """Reset the volatile counters."""
    for kind in gpus.gpu(0).ecc:
        kind[0] = 0


@pytest.mark.parametrize(
    ("strike", "reset"),
    [
        (lambda gpus: gpus.xid(0, 48), lambda gpus: gpus.return_(0, reset=True)),
        (lambda gpus: gpus.ecc(0, uncorrected=1), count_no_errors),
    ],
    ids=["xid", "ecc"],
)
async def test_a_device_that_needs_a_reset_stays_sick_until_one(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin, strike: Strike, reset: Strike
) -> None:
    _worker, stream = await begin(master)
    strike(gpus)
    await stream.until(lambda: is_(stream, SICK))
    fell_sick = len(stream.heartbeats)

    def checks() -> int:
        states = [beat.health.state for beat in stream.heartbeats[fell_sick:]]
        return sum(a == RECOVERING and b == SICK for a, b in itertools.pairwise(states))

    await stream.until(lambda: checks() >= 2 or is_(stream, HEALTHY))
    assert is_(stream, SICK)
    assert "no reset was seen" in health(stream).reasons[0].message
    reset(gpus)
    await stream.until(lambda: is_(stream, HEALTHY))


@pytest.mark.parametrize(
    ("code", "strike", "reset"),
    [
        ("ecc_uncorrected", lambda gpus: gpus.ecc(0, uncorrected=1), count_no_errors),
        ("gpu_is_lost", lambda gpus: gpus.lose(0), lambda gpus: gpus.return_(0)),
        ("reset_required", lambda gpus: gpus.recovery_action(0, 1), lambda gpus: gpus.recovery_action(0, 0)),
    ],
)
async def test_a_new_process_of_the_worker_knows_that_the_device_needs_a_reset(
    gpus: SimulatedGpus, begin: Begin, start_worker: StartWorker, code: str, strike: Strike, reset: Strike
) -> None:
    async with ScriptedMaster() as first:
        worker, stream = await begin(first)
        gpus.xid(0, 48)
        await stream.until(lambda: is_(stream, SICK))
        worker.signal(signal.SIGKILL)
        await worker.wait()
    handlers = ("--device", "cuda:0", "--handlers", "handlers_for_health")
    async with ScriptedMaster() as second:
        worker = await start_worker(second.address, *handlers, pythonpath=HANDLERS, env=gpus.env())
        stream = await second.stream()
        await stream.until(lambda: len(stream.heartbeats) > 3)
        stream.lease([(1, b"0")], kind="health.work")
        assert (await stream.reported(1))[0].state == RETURNED
        assert {beat.health.state for beat in stream.heartbeats} <= {SICK, RECOVERING}
        assert "xid_48" in codes(stream)
        strike(gpus)
        await stream.until(lambda: code in codes(stream))
        worker.signal(signal.SIGKILL)
        await worker.wait()
    reset(gpus)
    async with ScriptedMaster() as third:
        worker = await start_worker(third.address, *handlers, pythonpath=HANDLERS, env=gpus.env())
        stream = await third.stream()
        await stream.until(lambda: is_(stream, HEALTHY))
        worker.signal(signal.SIGKILL)
        await worker.wait()
    async with ScriptedMaster() as fourth:
        await start_worker(fourth.address, *handlers, pythonpath=HANDLERS, env=gpus.env())
        stream = await fourth.stream()
        await stream.until(lambda: bool(stream.heartbeats))
        assert is_(stream, HEALTHY)


async def test_a_contained_error_degrades_the_device_and_is_not_charged(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    worker, stream = await begin(master)
    before = worker.engine_pids()
    stream.lease([(1, b"30")], kind="health.work")
    await runs(stream, 1)
    gpus.xid(0, 94)
    assert (await stream.reported(1))[0].state == RETURNED
    await stream.until(lambda: is_(stream, DEGRADED))
    assert codes(stream) == ["xid_94"]
    stream.lease([(2, b"0")], kind="health.work")
    (word,) = await stream.reported(2)
    assert word.state == SUCCEEDED
    assert worker.engine_pids() != before


@pytest.mark.parametrize("codes_first", [True, False])
async def test_the_ecc_count_of_a_contained_error_does_not_make_the_device_sick(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin, *, codes_first: bool
) -> None:
    _worker, stream = await begin(master)
    strikes: list[Callable[[], None]] = [lambda: gpus.xid(0, 94), lambda: gpus.ecc(0, uncorrected=1)]
    for strike in strikes if codes_first else reversed(strikes):
        strike()
    await stream.until(lambda: is_(stream, DEGRADED) or is_(stream, SICK))
    seen = len(stream.heartbeats)
    await stream.until(lambda: len(stream.heartbeats) > seen + 10)
    assert {beat.health.state for beat in stream.heartbeats} <= {HEALTHY, DEGRADED}
    assert codes(stream) == ["xid_94"]
    gpus.ecc(0, uncorrected=1)
    await stream.until(lambda: is_(stream, SICK))


async def test_an_xid_makes_no_suspects_if_another_process_uses_the_device(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    worker, stream = await begin(master)

    async def attempt(lease_id: int, *pids: int) -> bool:
        for pid in pids:
            gpus.process(0, pid, 1 << 30)
        listed = {p.pid for p in stream.heartbeats[-1].telemetry.processes}
        await stream.until(lambda: listed | set(pids) <= {p.pid for p in stream.heartbeats[-1].telemetry.processes})
        stream.lease([(lease_id, b"1.0")], kind="health.work_and_raise")
        await runs(stream, lease_id)
        gpus.xid(0, 13)
        await stream.reported(lease_id)
        return broke(stream, lease_id)

    assert await attempt(1, *worker.engine_pids()), "only its engine computes there"
    await until(worker.engine_pids, "another engine")
    assert not await attempt(2, os.getpid())


async def test_a_crash_breaks_the_engine_and_a_kill_from_outside_does_not(master: ScriptedMaster, begin: Begin) -> None:
    worker, stream = await begin(master)
    stream.lease([(1, b"")], kind="health.crash")
    assert ((await stream.reported(1))[0].state, broke(stream, 1)) == (FAILED, True)
    stream.lease([(2, b"30")], kind="health.work")
    await runs(stream, 2)
    os.kill(worker.engine_pids()[0], signal.SIGKILL)
    assert ((await stream.reported(2))[0].state, broke(stream, 2)) == (FAILED, False)
    assert is_(stream, HEALTHY)


async def test_a_check_that_the_master_requests(master: ScriptedMaster, begin: Begin) -> None:
    _worker, stream = await begin(master)
    stream.lease([(1, b"1.5"), (2, b"1.5"), (3, b"1.5"), (4, b"1.5"), (5, b"1.5")], kind="health.work")
    await runs(stream, 1)
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


async def test_heat_and_spare_rows_degrade_a_device_that_stays_in_use(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    _worker, stream = await begin(master)
    gpus.throttle(0, 0x40)  # hw_thermal_slowdown
    gpus.remap(0, uncorrectable=1, pending=True, failed=False)
    await stream.until(lambda: set(codes(stream)) == {"thermal_throttle", "row_remap_pending"})
    assert is_(stream, DEGRADED)
    stream.lease([(1, b"0")], kind="health.work")
    assert (await stream.reported(1))[0].state == SUCCEEDED
    gpus.throttle(0, 0x04)  # sw_power_cap: normal under load
    gpus.remap(0, uncorrectable=1, pending=False, failed=False)
    await stream.until(lambda: is_(stream, HEALTHY))
    gpus.ecc(0, uncorrected=1)
    await stream.until(lambda: any("ecc_uncorrected" in [r.code for r in b.health.reasons] for b in stream.heartbeats))


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch: pip install 'multigpu[worker]'")
async def test_a_device_with_wrong_results_is_sick_until_they_are_right(
    tmp_path: Path, master: ScriptedMaster, begin: Begin
) -> None:
    wrong = tmp_path / "wrong"
    _worker, stream = await begin(master, "--canary-interval-s", "0.3", TEST_WRONG_FILE=str(wrong))
    await stream.until(lambda: len(stream.heartbeats) > 15)
    assert {beat.health.state for beat in stream.heartbeats} == {HEALTHY}
    wrong.touch()
    await stream.until(lambda: is_(stream, SICK), 30)
    assert codes(stream) == ["canary_wrong"]
    assert health(stream).unusable
    assert "must be 0xd74d3c83" in health(stream).reasons[0].message
    await stream.until(lambda: any(b.health.state == device.HEALTH_STATE_RECOVERING for b in stream.heartbeats), 30)
    await stream.until(lambda: is_(stream, SICK), 30)
    wrong.unlink()
    await stream.until(lambda: is_(stream, HEALTHY), 60)


async def test_the_device_is_not_blamed_if_a_task_ends_the_engine_during_the_self_test(
    tmp_path: Path, master: ScriptedMaster, begin: Begin
) -> None:
    begun = tmp_path / "begun"
    worker, stream = await begin(master, "--canary-interval-s", "0.3", TEST_SELF_TEST_SLOW_FILE=str(begun))
    await until(begun.exists, "the self-test to run")
    begun.unlink()  # now: the next self-test may run before the report arrives
    timeout = pb.LeaseBatch().spec.run_timeout
    timeout.FromMilliseconds(200)
    stream.lease([(1, b"30")], kind="health.work", run_timeout=timeout)
    assert (await stream.reported(1))[0].error.type == "RunTimeout"
    await until(begun.exists, "the self-test to run in the next engine")
    begun.unlink()
    stream.lease([(2, b"")], kind="health.crash")
    assert (await stream.reported(2))[0].error.type == "EngineDied"
    await until(begun.exists, "the self-test to run in the third engine")
    assert all(beat.health.state == HEALTHY for beat in stream.heartbeats)
    # Only the self-test runs: the device is to blame.
    os.kill(worker.engine_pids()[0], signal.SIGSEGV)
    await stream.until(lambda: is_(stream, SICK))
    assert codes(stream) == ["canary_wrong"]


@pytest.mark.parametrize(
    "how",
    [
        "UNLOADABLE",
        pytest.param("ANYWAY", marks=pytest.mark.skipif(not HAS_TORCH, reason="needs torch")),
    ],
)
async def test_the_device_is_not_blamed_for_too_little_memory_for_the_self_test(
    how: str, master: ScriptedMaster, begin: Begin
) -> None:
    small = ("--canary-interval-s", "0.3", "--engine-memory-bytes", "160MiB")
    # A library may hang if it gets no memory for its threads.
    alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    worker, stream = await begin(master, *small, **{f"TEST_SELF_TEST_{how}": "yes"}, **alone)
    await until(lambda: worker.log.count("no self-test") >= 2, "the self-test to be tried")
    assert all(beat.health.state == HEALTHY for beat in stream.heartbeats)


SELF_TEST = """
import sys
from types import SimpleNamespace
from multigpu_worker.engines.common import self_test
from multigpu_worker.engine.runtime import Runtime
runtime = Runtime.__new__(Runtime)
runtime.settings = SimpleNamespace(device="cuda:0")
runtime._channel = SimpleNamespace(send=print)
runtime._self_test(1, True)
print(self_test.run_in_subprocess("cpu"))
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch: pip install 'multigpu[worker]'")
def test_a_process_without_torch_runs_the_self_test_in_a_subprocess() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SELF_TEST], capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "('self_test', 1, False, 'it raised " in done.stdout, "there is no such device"
    assert "(True, '')" in done.stdout


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch: pip install 'multigpu[worker]'")
@pytest.mark.parametrize("size", [self_test.CPU_SIZE, self_test.GPU_SIZE])
def test_the_answer_of_the_self_test_is_exact(size: int) -> None:
    np = pytest.importorskip("numpy")
    i = np.arange(size)
    a, b = (i[:, None] * 31 + i * 17) % 13 - 6, (i[:, None] * 7 + i * 29) % 11 - 5
    # float64 is exact below 2**53.
    answer = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int32)
    assert zlib.crc32(answer.tobytes()) == self_test.CHECKSUMS[size]
    # Every partial sum, in any order, is exact in float32.
    assert (abs(a).astype(np.float64) @ abs(b).astype(np.float64)).max() < 2**24
    torch = importlib.import_module("torch")
    found = self_test.product(torch, "cpu", size)
    assert self_test.checksum(found) == self_test.CHECKSUMS[size]
    found[size // 2, 1] ^= 1
    assert self_test.checksum(found) != self_test.CHECKSUMS[size]


async def test_a_worker_on_a_mig_instance_ignores_xids_of_other_instances(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    gpus.mig(0, 2)
    device_id = gpus.mig_uuids(0)[1]
    worker, stream = await begin(master, "--device", device_id)
    (engine,) = worker.engine_pids()
    assert f"CUDA_VISIBLE_DEVICES={device_id}".encode() in Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")
    assert stream.hello.device.device_id == device_id
    gpus.xid(0, 119, instance=0)
    gpus.xid(0, 92, instance=1)
    await stream.until(lambda: "xid_92" in codes(stream))
    assert codes(stream) == ["xid_92"]
    # An XID of the whole GPU concerns every instance, and so does a reset.
    gpus.xid(0, 119)
    await stream.until(lambda: "xid_119" in codes(stream))
    gpus.return_(0, reset=True)
    await stream.until(lambda: is_(stream, DEGRADED), 30)
    assert codes(stream) == ["xid_92"]


async def test_a_driver_that_hangs_stops_no_tasks_no_heartbeats_and_no_shutdown(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin
) -> None:
    worker, stream = await begin(master)
    gpus.hang(0)
    try:
        stream.lease([(1, b"0")], kind="health.work")
        assert (await stream.reported(1))[0].state == SUCCEEDED
        await stream.until(lambda: "driver_hung" in codes(stream))
        seen = len(stream.heartbeats)
        await stream.until(lambda: len(stream.heartbeats) > seen + 10)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
    finally:
        gpus.answer_(0)


async def test_a_driver_that_hangs_before_the_worker_starts_is_logged(
    gpus: SimulatedGpus, master: ScriptedMaster, begin: Begin, tmp_path: Path
) -> None:
    gpus.hang(0)
    beginning = asyncio.ensure_future(begin(master))
    log = tmp_path / "worker-0.log"
    await until(lambda: log.exists() and "the driver has not answered" in log.read_text(), "a line in the log")
    gpus.answer_(0)
    _, stream = await beginning
    assert is_(stream, HEALTHY)
