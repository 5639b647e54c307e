"""A worker whose engine cannot start: its health, its leases, and how it recovers."""

import os
import signal
from pathlib import Path

import pytest
from multigpu.v1 import device_pb2 as device
from multigpu.v1 import worker_service_pb2 as pb

from tests.worker.conftest import Start, StartWorker, WorkerProcess
from tests.worker.scripted_master import SUCCEEDED, ScriptedMaster, Stream
from tests.worker.toy_models import Shop

RETURNED, FAILED = pb.REPORT_STATE_RETURNED, pb.REPORT_STATE_FAILED
HANDLERS = """
import os, time
from multigpu.handlers import handler

HERE = os.path.dirname(__file__)
if os.path.exists(HERE + "/broken"):
    1/0
if os.path.exists(HERE + "/slow"):
    time.sleep(2)
while os.path.exists(HERE + "/hangs"):
    time.sleep(0.5)

@handler("mm.work")
def work(value: bytes) -> bytes:
    time.sleep(float(value))
    return b"%d" % os.getpid()
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mm.py"
    path.write_text(HANDLERS)
    return path


async def begin(start: Start, module: Path) -> tuple[WorkerProcess, Stream]:
    worker, stream = await start("--handlers", "mm", pythonpath=module.parent)
    await stream.until(lambda: state(stream) == device.HEALTH_STATE_HEALTHY)
    return worker, stream


def state(stream: Stream) -> int:
    return stream.heartbeats[-1].health.state if stream.heartbeats else 0


def reasons(stream: Stream) -> dict[str, str]:
    return {reason.code: reason.message for reason in stream.heartbeats[-1].health.reasons}


async def test_a_worker_whose_engine_cannot_start_gives_its_leases_back(start: Start, module: Path) -> None:
    worker, stream = await begin(start, module)
    (module.parent / "broken").touch()
    stream.lease([(n, b"0") for n in range(2, 6)], kind="mm.work")
    await stream.reported(2, 3, 4, 5)
    stream.lease([(n, b"3600") for n in range(10, 15)], kind="mm.work")
    await stream.until(lambda: any(held.running for held in stream.heartbeats[-1].leases))
    os.kill(worker.engine_pids()[0], signal.SIGKILL)
    words = await stream.reported(11, 12, 13, 14)
    assert {word.state for word in words} == {RETURNED}
    await stream.until(lambda: "engine_fails" in reasons(stream))
    assert state(stream) == device.HEALTH_STATE_SICK
    assert stream.heartbeats[-1].health.unusable, "the circuit breaker must not hold this back"
    assert "ZeroDivisionError" in reasons(stream)["engine_fails"]
    stream.lease([(20, b"0")], kind="mm.work")  # it crossed the worker's word
    assert (await stream.reported(20))[0].state == RETURNED
    await stream.until(lambda: not stream.heartbeats[-1].leases)
    (module.parent / "broken").unlink()
    await stream.until(lambda: state(stream) == device.HEALTH_STATE_HEALTHY)
    word = await stream.run(30, b"0", kind="mm.work")
    assert (word.state, word.result) == (SUCCEEDED, b"%d" % worker.engine_pids()[0])


async def test_a_kill_while_the_engine_starts_does_not_make_the_device_sick(start: Start, module: Path) -> None:
    worker, stream = await begin(start, module)
    (module.parent / "slow").touch()
    for _ in range(2):  # the running one, and the one that starts
        (pid,) = worker.engine_pids()
        os.kill(pid, signal.SIGKILL)
        await stream.until(lambda pid=pid: worker.engine_pids() not in ([], [pid]))  # type: ignore[misc]
    assert (await stream.run(1, b"0", kind="mm.work")).state == SUCCEEDED
    assert {beat.health.state for beat in stream.heartbeats} == {device.HEALTH_STATE_HEALTHY}


# In the agent: a start is slow at once, and hangs after `ready_s` in which its process does nothing.
IMPATIENT = """
import sys

if "multigpu_worker.main" in sys.orig_argv:
    from multigpu_worker.processes import start as engine_start

    engine_start.SLOW_START_S, engine_start.READY_S = 0.1, {ready_s}
"""


async def test_a_first_import_that_hangs_is_logged_and_ended(
    master: ScriptedMaster, start_worker: StartWorker, module: Path
) -> None:
    (module.parent / "sitecustomize.py").write_text(IMPATIENT.format(ready_s=5.0))
    (module.parent / "outer.py").write_text("import mm\n")
    (module.parent / "hangs").touch()
    worker = await start_worker(master.address, "--handlers", "outer", pythonpath=module.parent)
    assert await worker.wait() == 3
    *_, error = worker.log.splitlines()
    assert f"it imports {module}" in error, "the innermost file, not the one that --handlers names"
    lines = [line for line in worker.log.splitlines() if "the engine is not ready yet" in line]
    assert any(str(module) in line for line in lines)
    assert len(lines) <= 3, "each file once"


async def test_a_later_import_that_hangs_is_reported_with_its_file_and_ended(start: Start, module: Path) -> None:
    (module.parent / "sitecustomize.py").write_text(IMPATIENT.format(ready_s=5.0))
    worker, stream = await begin(start, module)
    (module.parent / "hangs").touch()
    (pid,) = worker.engine_pids()
    os.kill(pid, signal.SIGKILL)
    await stream.until(lambda: str(module) in reasons(stream).get("engine_starts", ""))
    assert state(stream) == device.HEALTH_STATE_DEGRADED
    await stream.until(lambda: str(module) in reasons(stream).get("engine_fails", ""))
    (module.parent / "hangs").unlink()
    await stream.until(lambda: state(stream) == device.HEALTH_STATE_HEALTHY)
    assert (await stream.run(1, b"0", kind="mm.work")).state == SUCCEEDED


# In the agent: the system has no process left after the first engine.
NO_PROCESS = """
import sys

if "multigpu_worker.main" in sys.orig_argv:
    import subprocess

    class Popen(subprocess.Popen):
        engines = 0

        def __init__(self, args, **kwargs):
            Popen.engines += "multigpu_worker.engine.main" in args
            if Popen.engines > 1:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(args, **kwargs)

    subprocess.Popen = Popen
"""


async def test_a_model_whose_process_the_system_cannot_start_fails_its_tasks_and_no_others(
    start: Start, shop: Shop, tmp_path: Path
) -> None:
    shop.add("one")
    (tmp_path / "sitecustomize.py").write_text(NO_PROCESS)
    worker, stream = await start(*shop.flags, pythonpath=tmp_path)
    word = await stream.run(1, b"x", kind="infer", model="one")
    assert (word.error.type, word.error.retryable) == ("ModelLoadError", True)
    assert "could not start ([Errno 11] Resource temporarily unavailable)" in word.error.message
    assert (await stream.run(2, b"0", kind="sleep")).state == SUCCEEDED
    assert worker.process.returncode is None
