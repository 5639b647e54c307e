"""What a model takes of the device's memory: measured, or before it was ever loaded, estimated from its files.

On a GPU it is what the driver says its processes have. On a processor it is the private memory of its processes, which
is what comes back when they end: libraries that other processes have mapped too are not in it.

An estimate is what a process takes before it has a model, the weights at the precision that they are served at, and for
text generation the cache of keys and values. What a user's own engine takes beside its files nobody can know.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from multigpu.config.values import from_text
from multigpu.repository.model import ModelSpec

from multigpu_worker.device.interface import DeviceInfo
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import auto_precision
from multigpu_worker.models import catalog as catalogs
from multigpu_worker.models.weight_files import context_bytes, weights_bytes

# How much more than its weights a model takes, and what a process takes with its imports before it has any model: on a
# processor as measured with torch 2.13, transformers 5.23 and ONNX Runtime 1.31; on a GPU a context of CUDA with the
# libraries' workspaces, which nobody has measured yet.
WEIGHTS_FACTOR = 1.1
PROCESS_BYTES = 24 << 20
TORCH_BYTES = 300 << 20
ONNX_BYTES = 70 << 20
GPU_PROCESS_BYTES = 500 << 20
NUMBER_BYTES = {"bf16": 2, "fp16": 2}
# What the cache of engines/generate/model.py takes at most, where the model doesn't say it (cache_bytes).
CPU_CACHE_BYTES, CPU_CACHE_SHARE = 512 << 20, 0.25
GPU_CACHE_SHARE = 0.5
_SAMPLE_TIMEOUT_S = 5.0


def estimate_bytes(
    spec: ModelSpec, settings: EngineSettings, device: DeviceInfo, *, slots: int, limit_bytes: int
) -> int:
    """What a model that was never loaded here is expected to take, with so many tasks at a time on a copy of it.

    `limit_bytes`: of all models together, 0: none. A cache that can be smaller is no reason why one doesn't fit.
    """
    imports = catalogs.imports_of(spec, settings.engine)
    on_gpu = settings.device != "cpu"
    if on_gpu:
        process_bytes = GPU_PROCESS_BYTES
    else:
        process_bytes = TORCH_BYTES if "torch" in imports else ONNX_BYTES if "onnxruntime" in imports else PROCESS_BYTES
    engine = catalogs.engine_of(spec, settings.engine)
    precision = spec.precision if spec.precision != "auto" else settings.precision
    if precision == "auto":
        precision = auto_precision(_capability(device) if on_gpu else None, engine)
    number_bytes = NUMBER_BYTES.get(precision, 4)
    model_bytes = int(weights_bytes(spec, number_bytes) * WEIGHTS_FACTOR)
    if engine == "tensorrt" and spec.source != "tensorrt-plan":  # another engine serves until the plan is there
        model_bytes *= 2
    if spec.kind == "generate":
        cache_bytes_max = int(device.memory_total_bytes * (GPU_CACHE_SHARE if on_gpu else CPU_CACHE_SHARE))
        if not on_gpu:
            cache_bytes_max = min(cache_bytes_max, CPU_CACHE_BYTES)
        with contextlib.suppress(KeyError, ValueError):  # it doesn't say, or the engine will reject what it says
            cache_bytes_max = from_text(spec.parameters["cache_bytes"], int, "cache_bytes")
        if limit_bytes:
            cache_bytes_max = min(cache_bytes_max, limit_bytes // spec.instances - process_bytes - model_bytes)
        model_bytes += max(0, min(slots * context_bytes(spec, number_bytes), cache_bytes_max))
    return spec.instances * (model_bytes + process_bytes)


def _capability(device: DeviceInfo) -> tuple[int, int]:
    """(0, 0): it doesn't tell."""
    major, _, minor = device.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


async def measure_bytes(pids: Sequence[int], sampler: Sampler, device_bytes: int) -> int:
    """What these processes take. `device_bytes`: what they say themselves, for drivers that don't tell. 0: unknown."""
    if sampler.device.info.device_id == "cpu":
        return await asyncio.to_thread(lambda: sum(map(private_bytes, pids)))
    sample = await sampler.sample(_SAMPLE_TIMEOUT_S)
    processes = () if sample is None else sample.telemetry.processes
    told = [process.memory_used_bytes or 0 for process in processes if process.pid in pids]
    return sum(told) or device_bytes


def private_bytes(pid: int) -> int:
    """Memory that is this process's alone; 0: it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty") if name in fields)
