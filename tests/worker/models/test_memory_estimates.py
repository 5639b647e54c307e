"""Memory estimates for models that were never loaded, from the headers of their files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multigpu.config.config import WorkerConfig
from multigpu.repository.model import ModelSpec
from multigpu_worker.composition import model_memory_bytes
from multigpu_worker.device.cpu import host_memory_bytes
from multigpu_worker.device.interface import DeviceInfo
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.models import memory_estimates as memory
from multigpu_worker.models.memory_estimates import (
    CPU_CACHE_BYTES,
    GPU_PROCESS_BYTES,
    ONNX_BYTES,
    PROCESS_BYTES,
    TORCH_BYTES,
)

MIB = 1 << 20
CPU = DeviceInfo(device_id="cpu", name="cpu", product="a cpu", memory_total_bytes=64 << 30)
GPU = DeviceInfo(
    device_id="GPU-1", name="cuda:0", product="a GPU", memory_total_bytes=1 << 30, compute_capability="9.0"
)


def put_safetensors(path: Path, **tensors: tuple[str, list[int], int]) -> None:
    """Tensors as (dtype, shape, bytes per number), all zeros in a sparse file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def folder_spec(folder: Path, **more: Any) -> ModelSpec:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return ModelSpec(name="m", folder=folder, files_bytes=size, **({"source": "huggingface"} | more))


def settings(device: str = "cpu", **more: Any) -> EngineSettings:
    return EngineSettings(device=device, slots=1, threads=1, **more)


def estimate_bytes(
    spec: ModelSpec, settings: EngineSettings, device: DeviceInfo, slots: int, limit_bytes: int = 0
) -> int:
    return memory.estimate_bytes(spec, settings, device, slots=slots, limit_bytes=limit_bytes)


def test_weights_count_at_the_precision_they_are_served_at(tmp_path: Path) -> None:
    put_safetensors(tmp_path / "model.safetensors", w=("BF16", [1024, 1024], 2), ids=("I64", [512], 8))
    spec = folder_spec(tmp_path)
    on_cpu = estimate_bytes(spec, settings(), CPU, 1)
    assert on_cpu == TORCH_BYTES + int((4 * MIB + 4096) * 1.1), "integers are not converted"
    assert on_cpu - estimate_bytes(spec, settings(precision="bf16"), CPU, 1) == pytest.approx(2.2 * MIB, abs=1)
    on_gpu = estimate_bytes(spec, settings("cuda:0"), GPU, 1)
    assert on_gpu == GPU_PROCESS_BYTES + int((2 * MIB + 4096) * 1.1), "auto is bf16 there"


def test_all_shards_and_instances_count(tmp_path: Path) -> None:
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name in names:
        put_safetensors(tmp_path / name, w=("F32", [256, 1024], 4))
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    twice = estimate_bytes(folder_spec(tmp_path, instances=2), settings(), CPU, 1)
    assert twice == 2 * (TORCH_BYTES + int(2 * MIB * 1.1))


def test_other_sources_count_with_their_files_size(tmp_path: Path) -> None:
    onnx = ModelSpec(name="m", folder=tmp_path, kind="infer", source="onnx", files_bytes=10 * MIB)
    assert estimate_bytes(onnx, settings(), CPU, 1) == ONNX_BYTES + 11 * MIB
    own = ModelSpec(name="m", folder=tmp_path, kind="infer", source="python", engine="a:B", files_bytes=0)
    assert estimate_bytes(own, settings(), CPU, 1) == PROCESS_BYTES
    plan = ModelSpec(name="m", folder=tmp_path, kind="infer", source="onnx", engine="tensorrt", files_bytes=10 * MIB)
    assert estimate_bytes(plan, settings("cuda:0"), GPU, 1) == GPU_PROCESS_BYTES + 22 * MIB, "ONNX serves meanwhile"


def test_a_language_model_needs_a_cache(tmp_path: Path) -> None:
    put_safetensors(tmp_path / "model.safetensors", w=("F32", [1024, 1024], 4))
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = folder_spec(tmp_path, kind="generate")
    plain = TORCH_BYTES + int(4 * MIB * 1.1)
    assert estimate_bytes(spec, settings(), CPU, 8) == plain + 8 * 4 * MIB
    assert estimate_bytes(spec, settings(), CPU, 1000) == plain + CPU_CACHE_BYTES
    assert estimate_bytes(spec, settings(), CPU, 1000, plain + MIB) == plain + MIB, "the cache shrinks to the limit"
    assert estimate_bytes(spec, settings(), CPU, 1000, plain - MIB) == plain, "the weights must fit"
    half = GPU.memory_total_bytes // 2
    assert estimate_bytes(spec, settings("cuda:0"), GPU, 1000) == GPU_PROCESS_BYTES + int(2 * MIB * 1.1) + half
    set_here = folder_spec(tmp_path, kind="generate", parameters={"cache_bytes": "1MiB"})
    assert estimate_bytes(set_here, settings(), CPU, 8) == plain + MIB
    (tmp_path / "config.json").write_text('{"num_hidden_layers": "x"}')
    assert estimate_bytes(spec, settings(), CPU, 8) == plain


class OnlyInfo:
    """The part of a device that limits are computed from."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info


def test_workers_of_one_device_share_its_memory() -> None:
    gpu: Any = OnlyInfo(GPU)
    assert model_memory_bytes(WorkerConfig(), gpu) == int(0.9 * GPU.memory_total_bytes)
    assert model_memory_bytes(WorkerConfig(device_workers=3), gpu) == int(0.9 * GPU.memory_total_bytes) // 3
    assert model_memory_bytes(WorkerConfig(device_workers=3, model_memory_bytes=5), gpu) == 5, "as configured"
    cpu: Any = OnlyInfo(CPU)
    assert model_memory_bytes(WorkerConfig(device_workers=2), cpu) == host_memory_bytes() // 2 // 2


def test_a_file_whose_header_can_not_be_read_counts_with_its_size(tmp_path: Path) -> None:
    quantised = folder_spec(tmp_path, source="gguf", file="m.gguf", kind="generate")
    quantised = dataclasses.replace(quantised, files_bytes=MIB)
    assert estimate_bytes(quantised, settings(), CPU, 1) == TORCH_BYTES + int(4 * MIB * 1.1), "a byte for each number"
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    assert estimate_bytes(folder_spec(tmp_path), settings(), CPU, 1) == TORCH_BYTES + int(10 * 1.1)
