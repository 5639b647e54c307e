"""PycudaMemory leaks nothing, whichever thread frees it. tests/gpu runs pycuda itself on a GPU."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

from multigpu_worker.engines.tensorrt.device_memory import PycudaMemory

from tests.worker.graphs import fake_pycuda
from tests.worker.graphs.test_tensorrt_run import runner


def test_pycuda_memory_is_freed_by_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake pycuda, which counts what the real one leaks silently."""
    monkeypatch.setitem(sys.modules, "pycuda", ModuleType("pycuda"))
    monkeypatch.setitem(sys.modules, "pycuda.driver", fake_pycuda)
    monkeypatch.setattr(sys.modules["pycuda"], "driver", fake_pycuda, raising=False)
    plans = [runner(tmp_path, PycudaMemory())]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            some = [rng.standard_normal((rows, 3 * rows)).astype(np.float32) for rows in (1, 4, 2)]
            waiting = [plans[0].begin({"x": x}) for x in some]
            for x, wait in zip(some, waiting, strict=True):
                np.testing.assert_array_equal(wait()["y"], 2 * x)

    work(0)
    taken = dict(fake_pycuda.held)
    work(0)
    assert fake_pycuda.held == taken
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
        pool.submit(plans.clear).result()
    gc.collect()
    assert fake_pycuda.held["device"] == 0
    assert "device" not in fake_pycuda.lost
