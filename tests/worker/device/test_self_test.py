"""The self-test in real workers."""

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multigpu.v1 import device_pb2 as device
from multigpu_worker.engines.common import self_test
from multigpu_worker.engines.common.subprocess_call import subprocess_call

from tests.worker.asking import until
from tests.worker.device.conftest import Begin
from tests.worker.device.reports import HEALTHY, SICK, codes, health, is_
from tests.worker.processes.test_cuda_errors import CORPUS

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch: pip install 'multigpu[worker]'")


@pytest.mark.slow
@needs_torch
async def test_a_device_with_wrong_results_is_sick_until_they_are_right(tmp_path: Path, begin: Begin) -> None:
    wrong = tmp_path / "wrong"
    _, stream = await begin("--canary-interval-s", "0.3", TEST_WRONG_FILE=str(wrong))
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


async def test_a_task_that_ends_the_engine_during_the_self_test_blames_no_device(tmp_path: Path, begin: Begin) -> None:
    begun = tmp_path / "begun"
    worker, stream = await begin("--canary-interval-s", "0.3", TEST_SELF_TEST_SLOW_FILE=str(begun))
    await until(begun.exists, "the self-test to run")
    begun.unlink()  # now: the next self-test may run before the report arrives
    word = await stream.run(1, b"30", kind="health.work", run_timeout={"nanos": 200_000_000})
    assert word.error.type == "RunTimeout"
    await until(begun.exists, "the self-test to run in the next engine")
    begun.unlink()
    assert (await stream.run(2, b"", kind="health.crash")).error.type == "EngineDied"
    await until(begun.exists, "the self-test to run in the third engine")
    assert all(beat.health.state == HEALTHY for beat in stream.heartbeats)
    # Only the self-test runs: the device is to blame.
    os.kill(worker.engine_pids()[0], signal.SIGSEGV)
    await stream.until(lambda: is_(stream, SICK))
    assert codes(stream) == ["canary_wrong"]


@pytest.mark.parametrize(
    ("kind", "passed"),
    [("occupied", None), ("elsewhere", None), ("lost", False), ("hardware", False), ("survives", False)],
)
def test_a_full_or_occupied_device_is_not_sick(kind: str, passed: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device raises in the self-test, by the classes of cuda_error_texts.toml."""
    for text in CORPUS[kind]:

        def product(torch: Any, device: str, size: int, text: str = text) -> Any:
            raise RuntimeError(text)

        monkeypatch.setattr(self_test, "product", product)
        monkeypatch.setattr(self_test, "load", lambda: SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 1)))
        monkeypatch.setattr(self_test, "shortage", lambda *_: "")
        result, message = self_test.attempt("cuda:0", lambda: None)
        assert result is passed, text
        assert text in message


@needs_torch
async def test_a_worker_on_a_full_gpu_stays_healthy(tmp_path: Path, begin: Begin) -> None:
    raised = tmp_path / "raised"
    raised.write_text("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    worker, stream = await begin("--canary-interval-s", "0.3", TEST_WRONG_FILE=str(raised))
    await until(lambda: worker.log.count("no self-test") >= 2 or is_(stream, SICK), "the self-test to be tried")
    assert {beat.health.state for beat in stream.heartbeats} == {HEALTHY}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["UNLOADABLE", *(["ANYWAY"] if HAS_TORCH else [])])
async def test_the_device_is_not_blamed_for_too_little_memory_for_the_self_test(how: str, begin: Begin) -> None:
    small = ("--canary-interval-s", "0.3", "--engine-memory-bytes", "160MiB")
    # A library may hang if it gets no memory for its threads.
    alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    worker, stream = await begin(*small, **{f"TEST_SELF_TEST_{how}": "yes"}, **alone)
    await until(lambda: worker.log.count("no self-test") >= 2, "the self-test to be tried")
    assert all(beat.health.state == HEALTHY for beat in stream.heartbeats)


DYING = """
import os
import sys
from pathlib import Path

def answer(*, device, begun):
    Path(begun).write_text("begun", encoding="ascii")
    os.write(int(sys.argv[2]), b'[tru')  # as if the disk were full
    if int(device):
        os.kill(os.getpid(), int(device))
    os._exit(1)
"""


@pytest.mark.parametrize(
    ("number", "passed"), [(signal.SIGABRT, False), (signal.SIGKILL, None), (signal.SIGTERM, None), (0, None)]
)
def test_only_a_crash_of_the_subprocess_blames_the_device(
    number: int, passed: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills it if the host has no memory; it ends with its answer cut off if the disk is full."""
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def call(_: str, arguments: dict[str, str], **options: bool) -> Any:
        return subprocess_call("dying:answer", arguments, **options)

    monkeypatch.setattr(self_test, "subprocess_call", call)
    result, message = self_test.run_in_subprocess(str(int(number)))
    assert result is passed
    assert "died with exit status" in message


def test_a_full_disk_blames_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))  # no temporary file can be created
    result, message = self_test.run_in_subprocess("cpu")
    assert result is None
    assert "No such file" in message


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


@pytest.mark.slow
@needs_torch
def test_a_process_without_torch_runs_the_self_test_in_a_subprocess() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SELF_TEST], capture_output=True, text=True, timeout=400, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "('self_test', 1, False, 'it raised " in done.stdout, "there is no such device"
    assert "(True, '')" in done.stdout


@needs_torch
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
