"""Estimates how much device memory a model takes that was never loaded on this host.

The estimate is what a process takes without a model, the weights at the precision they are served at, and for text
generation the cache of keys and values. Memory that a user's own engine takes besides its files is not included.
"""

import contextlib

from multigpu.config.values import from_text

from multigpu_worker.device.interface import DeviceInfo
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import NUMBER_BYTES, auto_precision
from multigpu_worker.engines.planning.costs import GPU_PROCESS_BYTES
from multigpu_worker.models import catalog as catalogs
from multigpu_worker.repository.model import MEASURED, VLLM, ModelSpec
from multigpu_worker.repository.weight_files import context_bytes, weights_bytes

# A model's memory divided by its weights; and the memory of a process with its imports but without a model, on a CPU,
# measured with torch 2.13, transformers 5.23 and ONNX Runtime 1.31.
WEIGHTS_FACTOR = 1.1
PROCESS_BYTES = 24 << 20
TORCH_BYTES = 300 << 20
ONNX_BYTES = 70 << 20
# vLLM's processes on a CPU, and the share of a GPU that it takes if its cache has no limit.
VLLM_BYTES, VLLM_GPU_SHARE = 1500 << 20, 0.9
# Limits of the cache in engines/generate/model.py, for models that do not set cache_bytes.
CPU_CACHE_BYTES, CPU_CACHE_SHARE = 512 << 20, 0.25
GPU_CACHE_SHARE = 0.5
# Limit of an estimate: a model.toml may set any cache_bytes, and a message's field has 64 bits.
ESTIMATE_BYTES_MAX = 1 << 50


def estimate_bytes(
    spec: ModelSpec, settings: EngineSettings, device: DeviceInfo, *, slots: int, limit_bytes: int
) -> int:
    """Expected memory of all instances of a model, each of which runs `slots` tasks at the same time. If the model is
    divided among GPUs: the memory on the GPU that has most of it.

    `limit_bytes`: for all models together; 0: no limit. The cache shrinks so that the model fits.
    """
    imports = catalogs.imports_of(spec, settings.engine)
    on_gpu = settings.device != "cpu"
    if on_gpu:
        process_bytes = GPU_PROCESS_BYTES
    else:
        has_torch = "torch" in imports or spec.engine == MEASURED
        process_bytes = TORCH_BYTES if has_torch else ONNX_BYTES if "onnxruntime" in imports else PROCESS_BYTES
    engine = catalogs.engine_of(spec, settings.engine)
    precision = spec.precision if spec.precision != "auto" else settings.precision
    if precision == "auto":
        precision = auto_precision(_capability(device) if on_gpu else None, engine)
    number_bytes = NUMBER_BYTES.get(precision, 4)
    shares = _shares(spec, device) if on_gpu else 1
    model_bytes = -(-int(weights_bytes(spec, number_bytes) * WEIGHTS_FACTOR) // shares)
    if spec.device_map:  # other parts are on the host or disk; the plan that is made at load says whether all parts fit
        limits = [size for place, size in spec.max_memory.items() if (place.isdecimal() if on_gpu else place == "cpu")]
        model_bytes = min([model_bytes, *(from_text(size, int, "size_bytes") for size in limits)])
        if limit_bytes:
            model_bytes = max(0, min(model_bytes, limit_bytes // spec.instances - process_bytes))
    if engine == "tensorrt" and spec.source != "tensorrt-plan":  # ONNX serves until the plan is built
        model_bytes *= 2
    if engine == VLLM and on_gpu and "cache_bytes" not in spec.parameters:
        return min(int(device.smallest_bytes * VLLM_GPU_SHARE), ESTIMATE_BYTES_MAX)
    if engine == VLLM and not on_gpu:
        process_bytes += VLLM_BYTES
    process_bytes *= 1 if on_gpu else spec.ranks
    if spec.kind == "generate":
        cache_bytes_max = int(device.smallest_bytes * (GPU_CACHE_SHARE if on_gpu else CPU_CACHE_SHARE))
        if not on_gpu:
            cache_bytes_max = min(cache_bytes_max, CPU_CACHE_BYTES)
        with contextlib.suppress(KeyError, ValueError):  # not set, or the engine will reject it
            cache_bytes_max = from_text(spec.parameters["cache_bytes"], int, "cache_bytes") // shares
        if limit_bytes:
            cache_bytes_max = min(cache_bytes_max, limit_bytes // spec.instances - process_bytes - model_bytes)
        model_bytes += max(0, min(slots * context_bytes(spec, number_bytes) // shares, cache_bytes_max))
    return min(spec.instances * (model_bytes + process_bytes), ESTIMATE_BYTES_MAX)


def _shares(spec: ModelSpec, device: DeviceInfo) -> int:
    """Among how many GPUs the model is divided."""
    return (spec.devices or len(device.each)) if spec.device_map else spec.ranks


def _capability(device: DeviceInfo) -> tuple[int, int]:
    """The device's compute capability; (0, 0) if it is not reported."""
    major, _, minor = device.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
