"""Estimates how much device memory a model takes that was never loaded on this host.

The estimate is what a process takes without a model, the weights at the precision they are served at, and for text
generation the cache of keys and values. Memory that a user's own engine takes besides its files is not included.
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from multigpu.config.values import from_text
from multigpu.repository.files import LAYOUT_SOURCES, SAFETENSORS_HEADER_BYTES_MAX, module_folders, weight_files
from multigpu.repository.model import ModelFolderError, ModelSpec

from multigpu_worker.device.interface import DeviceInfo
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import auto_precision
from multigpu_worker.models import catalog as catalogs

# Model memory over weights, and the memory of a process with its imports but without a model. CPU: measured with torch
# 2.13, transformers 5.23 and ONNX Runtime 1.31. GPU: a CUDA context with the libraries' workspaces, a guess.
WEIGHTS_FACTOR = 1.1
PROCESS_BYTES = 24 << 20
TORCH_BYTES = 300 << 20
ONNX_BYTES = 70 << 20
GPU_PROCESS_BYTES = 500 << 20
NUMBER_BYTES = {"bf16": 2, "fp16": 2}
# Limits of the cache in engines/generate/model.py, for models that do not set cache_bytes.
CPU_CACHE_BYTES, CPU_CACHE_SHARE = 512 << 20, 0.25
GPU_CACHE_SHARE = 0.5
# Safetensors types that are converted to the precision the model is served at. Others are kept.
_FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
# What reading a damaged or truncated header may raise.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ZeroDivisionError)


def estimate_bytes(
    spec: ModelSpec, settings: EngineSettings, device: DeviceInfo, *, slots: int, limit_bytes: int
) -> int:
    """Expected memory of a model, each instance of which runs `slots` tasks at the same time.

    `limit_bytes`: for all models together; 0: no limit. The cache shrinks so that the model fits.
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
    model_bytes = int(_weights_bytes(spec, number_bytes) * WEIGHTS_FACTOR)
    if engine == "tensorrt" and spec.source != "tensorrt-plan":  # ONNX serves until the plan is built
        model_bytes *= 2
    if spec.kind == "generate":
        cache_bytes_max = int(device.memory_total_bytes * (GPU_CACHE_SHARE if on_gpu else CPU_CACHE_SHARE))
        if not on_gpu:
            cache_bytes_max = min(cache_bytes_max, CPU_CACHE_BYTES)
        with contextlib.suppress(KeyError, ValueError):  # not set, or the engine will reject it
            cache_bytes_max = from_text(spec.parameters["cache_bytes"], int, "cache_bytes")
        if limit_bytes:
            cache_bytes_max = min(cache_bytes_max, limit_bytes // spec.instances - process_bytes - model_bytes)
        model_bytes += max(0, min(slots * _context_bytes(spec, number_bytes), cache_bytes_max))
    return spec.instances * (model_bytes + process_bytes)


def _capability(device: DeviceInfo) -> tuple[int, int]:
    """(0, 0) if it is not reported."""
    major, _, minor = device.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _weights_bytes(spec: ModelSpec, number_bytes: int) -> int:
    """Memory of the weights with `number_bytes` for each number. Unreadable files count with their size on disk."""
    if spec.source == "gguf":  # counted as if each number took a byte in the file
        return spec.files_bytes * number_bytes
    try:
        if spec.source in LAYOUT_SOURCES:
            return sum(
                _safetensors_bytes(spec.folder / part / name, number_bytes)
                for part in module_folders(spec.folder)
                for name in weight_files(spec.folder, part, spec.allow_pickle)
            )
    except (ModelFolderError, *_UNREADABLE):
        pass
    return spec.files_bytes


def _safetensors_bytes(path: Path, number_bytes: int) -> int:
    """See https://github.com/huggingface/safetensors#format."""
    if path.suffix != ".safetensors":
        return path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > SAFETENSORS_HEADER_BYTES_MAX:
            raise ValueError(f"{path} has too large a header")
        header: dict[str, Any] = json.loads(file.read(header_bytes))
    size_bytes = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        floating = tensor["dtype"] in _FLOATING
        size_bytes += math.prod(tensor["shape"]) * number_bytes if floating else end - begin
    return size_bytes


def _context_bytes(spec: ModelSpec, number_bytes: int) -> int:
    """Memory of a language model's keys and values for the longest sequence. 0: unknown, as for GGUF files."""
    try:
        config = json.loads((spec.folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        layers, context = int(config["num_hidden_layers"]), int(config["max_position_embeddings"])
        all_heads = int(config["num_attention_heads"])
        heads = int(config.get("num_key_value_heads") or all_heads)
        head_size = int(config.get("head_dim") or config["hidden_size"] // all_heads)
    except _UNREADABLE:
        return 0
    return max(0, 2 * layers * heads * head_size * context * number_bytes)
