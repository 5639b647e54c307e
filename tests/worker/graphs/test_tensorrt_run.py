"""Around a plan that runs: shapes, buffers, errors, and the change from what served before to the plan.

What needs a GPU is in tests/gpu. Here the module is the real one as far as it goes without a driver, and beyond that a
fake one, whose calls are compared with the real one's.
"""

import ast
import contextlib
import gc
import inspect
import json
import re
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

from multigpu_worker.engines.tensorrt import run as tensorrt_run
from multigpu_worker.engines.tensorrt.device_memory import DeviceMemory
from multigpu_worker.engines.tensorrt.profiles import Limits, Profile, profiles_for
from multigpu_worker.engines.tensorrt.run import PlanRunner
from multigpu_worker.repository.folders import ModelFolderError

from tests.worker.graphs import fake_tensorrt, small_graphs

PROFILES = profiles_for(Limits(rows_max=8, width_max=256, tokens_max=1024))
MODULE = "tests.worker.graphs.fake_tensorrt"


class HostMemory:
    """A DeviceMemory whose device is the host."""

    stream = 7

    def __init__(self) -> None:
        self.allocated: list[int] = []

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        yield

    def empty(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        self.allocated.append(size_bytes)
        return np.empty(size_bytes, np.uint8)

    def address(self, buffer: Any) -> int:
        return int(buffer.ctypes.data)

    def upload(self, array: npt.NDArray[Any], buffer: Any) -> None:
        buffer[: array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, buffer: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array: npt.NDArray[Any] = buffer[:size].copy().view(dtype).reshape(shape)
        return array

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def trim(self) -> None: ...


def fake_plan(graph: Path, profiles: list[Profile], plan: Path) -> Path:
    plan.write_text(json.dumps({"graph": str(graph), "profiles": profiles}))
    return plan


def runner(folder: Path, memory: DeviceMemory | None = None) -> PlanRunner:
    """y = 2 * x, for any number of rows of any width."""
    graph = small_graphs.save_double(folder)
    return PlanRunner(fake_plan(graph, PROFILES, folder / "model.plan"), MODULE, memory or HostMemory())


def test_shapes_use_their_profile_and_reuse_buffers(tmp_path: Path) -> None:
    memory = HostMemory()
    plan = runner(tmp_path, memory)
    rng = np.random.default_rng(0)
    for shape in [(1, 1), (8, 16), (1, 17), (4, 256), (8, 64), (2, 3)]:
        x = rng.standard_normal(shape)
        np.testing.assert_allclose(plan({"x": x})["y"], 2 * x, rtol=1e-6)  # and float64 was cast
    after = len(memory.allocated)
    for shape in [(4, 256), (1, 1), (8, 16)]:
        plan({"x": np.ones(shape)})
    assert len(memory.allocated) == after
    # One scratch for all profiles, the largest, and room to align it.
    assert memory.allocated[0] == 1000 * len(PROFILES) + 256


def test_runs_overwrite_no_outputs_may_overlap_and_come_from_several_threads(tmp_path: Path) -> None:
    plan = runner(tmp_path)
    first = plan({"x": np.full((2, 2), 1.0)})["y"]
    plan({"x": np.full((2, 2), 5.0)})
    assert (first == 2).all()
    inputs = [np.full((2, width), float(width)) for width in (1, 200, 20)]
    finish = [plan.begin({"x": x}) for x in inputs]
    for x, wait in zip(inputs, finish, strict=True):
        np.testing.assert_array_equal(wait()["y"], 2 * x)
    right: list[bool] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            x = rng.standard_normal((rng.integers(2, 5), rng.integers(1, 257))).astype(np.float32)
            right.append(np.array_equal(plan({"x": x})["y"], 2 * x))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert right == [True] * 400


def test_plan_lives_until_its_runs_are_done(tmp_path: Path) -> None:
    plan = runner(tmp_path)
    alive, finish = weakref.ref(plan), plan.begin({"x": np.ones((1, 1))})
    del plan
    gc.collect()
    assert alive() is not None
    assert finish()["y"].tolist() == [[2.0]]
    del finish
    gc.collect()
    assert alive() is None


def test_errors_of_a_plan(tmp_path: Path) -> None:
    plan = runner(tmp_path)
    with pytest.raises(ValueError, match=r"takes no inputs of the shapes \{'x': \(9, 1\)\}"):
        plan({"x": np.ones((9, 1))})
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        plan({"x": np.ones((1, 13))})
    with pytest.raises(RuntimeError, match="the plan failed to run: an illegal instruction"):
        plan({"x": np.ones((1, 14))})
    assert (plan({"x": np.ones((1, 15))})["y"] == 2).all()
    (tmp_path / "cut.plan").write_text("{")
    with pytest.raises(ModelFolderError, match=r"cut\.plan can't be loaded by .*it is malformed"):
        PlanRunner(tmp_path / "cut.plan", MODULE, HostMemory())


def test_real_module_has_everything_that_is_called() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    owners = {"_engine": trt.ICudaEngine, "context": trt.IExecutionContext, "_runtime": trt.Runtime, "_trt": trt}
    fake = {"_engine": fake_tensorrt.Engine, "context": fake_tensorrt.Context, "_runtime": fake_tensorrt.Runtime}
    seen = set()
    for node in ast.walk(ast.parse(inspect.getsource(tensorrt_run))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of = node.func.value
        owner = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
        if owner not in owners:
            continue
        method, arguments = node.func.attr, len(node.args)
        seen.add(method)
        documented = getattr(owners[owner], method)
        if owner == "_trt":
            continue
        # pybind11 writes a signature for each form: one of them takes as many as we give. (A default may follow.)
        forms = re.findall(rf"{method}\(self: [^,)]+(.*)\) ->", documented.__doc__)
        assert arguments in {form.count(": ") for form in forms}, (method, documented.__doc__)
        assert len(inspect.signature(getattr(fake[owner], method)).parameters) == arguments + 1, method
    assert {"execute_async_v3", "set_input_shape", "set_tensor_address", "deserialize_cuda_engine"} <= seen
    assert trt.ExecutionContextAllocationStrategy.USER_MANAGED is not None
    assert [trt.nptype(kind) for kind in (trt.float32, trt.int64, trt.float16)] == [np.float32, np.int64, np.float16]
    with pytest.raises(TypeError):
        trt.nptype(trt.bfloat16)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_real_library_reports_a_missing_driver(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    (tmp_path / "model.plan").write_bytes(b"no plan at all" * 100)
    with pytest.raises(ModelFolderError, match=r"can't be loaded by tensorrt_rtx .*: \S+"):
        PlanRunner(tmp_path / "model.plan", "tensorrt_rtx", HostMemory())
