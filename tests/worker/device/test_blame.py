"""Which tasks are charged for errors of a device: real workers on simulated GPUs."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.gpus import SimulatedGpus
from tests.worker.asking import until
from tests.worker.device.conftest import Begin
from tests.worker.device.reports import DEGRADED, FAILED, HEALTHY, RETURNED, SICK, broke, codes, is_
from tests.worker.scripted_master import SUCCEEDED


async def test_an_application_xid_charges_the_running_task_not_the_device(gpus: SimulatedGpus, begin: Begin) -> None:
    worker, stream = await begin()
    before = worker.engine_pids()
    stream.lease([(1, b"1.0")], kind="health.work_and_raise")
    await stream.running(1)
    gpus.xid(0, 13)
    (word,) = await stream.reported(1)
    assert (word.state, word.error.type, broke(stream, 1)) == (FAILED, "RuntimeError", True)
    await until(lambda: worker.engine_pids() and worker.engine_pids() != before, "another engine")
    stream.lease([(2, b"0.3")], kind="health.work_and_raise")
    stream.lease([(3, b"0.5")], kind="health.work")
    await stream.running(3)
    gpus.xid(0, 31)  # another process's doing: what runs here succeeds
    assert [word.state for word in await stream.reported(2, 3)] == [FAILED, SUCCEEDED]
    assert not broke(stream, 2), "it had ended before the XID"
    assert all(beat.health.state == HEALTHY for beat in stream.heartbeats)


async def test_an_engine_whose_cuda_context_is_lost_is_replaced(begin: Begin) -> None:
    worker, stream = await begin()
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


async def test_an_error_of_the_devices_memory_is_not_charged_to_the_task(gpus: SimulatedGpus, begin: Begin) -> None:
    _, stream = await begin()
    word = await stream.run(1, b"CUDA error: uncorrectable ECC error encountered", kind="health.raise")
    assert (word.state, broke(stream, 1)) == (RETURNED, False)
    await stream.until(lambda: any("ecc_uncorrected" in [r.code for r in b.health.reasons] for b in stream.heartbeats))
    gpus.recovery_action(0, 1)
    await stream.until(lambda: "reset_required" in codes(stream))
    gpus.return_(0, reset=True)
    await stream.until(lambda: is_(stream, HEALTHY))


async def test_a_contained_error_degrades_the_device_and_is_not_charged(gpus: SimulatedGpus, begin: Begin) -> None:
    worker, stream = await begin()
    before = worker.engine_pids()
    stream.lease([(1, b"30")], kind="health.work")
    await stream.running(1)
    gpus.xid(0, 94)
    assert (await stream.reported(1))[0].state == RETURNED
    await stream.until(lambda: is_(stream, DEGRADED))
    assert codes(stream) == ["xid_94"]
    word = await stream.run(2, b"0", kind="health.work")
    assert word.state == SUCCEEDED
    assert worker.engine_pids() != before


@pytest.mark.parametrize("codes_first", [True, False])
async def test_the_ecc_count_of_a_contained_error_is_fine(
    gpus: SimulatedGpus, begin: Begin, *, codes_first: bool
) -> None:
    _, stream = await begin()
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


async def test_an_xid_makes_no_suspects_if_another_process_uses_the_device(gpus: SimulatedGpus, begin: Begin) -> None:
    worker, stream = await begin()

    async def attempt(lease_id: int, *pids: int) -> bool:
        for pid in pids:
            gpus.process(0, pid, 1 << 30)
        listed = {p.pid for p in stream.heartbeats[-1].telemetry.processes}
        await stream.until(lambda: listed | set(pids) <= {p.pid for p in stream.heartbeats[-1].telemetry.processes})
        stream.lease([(lease_id, b"1.0")], kind="health.work_and_raise")
        await stream.running(lease_id)
        gpus.xid(0, 13)
        await stream.reported(lease_id)
        return broke(stream, lease_id)

    assert await attempt(1, *worker.engine_pids()), "only its engine computes there"
    await until(worker.engine_pids, "another engine")
    assert not await attempt(2, os.getpid())


async def test_a_crash_breaks_the_engine_and_a_kill_from_outside_does_not(begin: Begin) -> None:
    worker, stream = await begin()
    assert ((await stream.run(1, b"", kind="health.crash")).state, broke(stream, 1)) == (FAILED, True)
    stream.lease([(2, b"30")], kind="health.work")
    await stream.running(2)
    os.kill(worker.engine_pids()[0], signal.SIGKILL)
    assert ((await stream.reported(2))[0].state, broke(stream, 2)) == (FAILED, False)
    assert is_(stream, HEALTHY)


async def test_a_worker_on_a_mig_instance_ignores_xids_of_other_instances(gpus: SimulatedGpus, begin: Begin) -> None:
    gpus.mig(0, 2)
    device_id = gpus.mig_uuids(0)[1]
    worker, stream = await begin("--device", device_id)
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
    gpus.recovery_action(0, 1)
    await stream.until(lambda: "reset_required" in codes(stream))
    gpus.return_(0, reset=True)
    await stream.until(lambda: is_(stream, DEGRADED), 30)
    assert codes(stream) == ["xid_92"]
