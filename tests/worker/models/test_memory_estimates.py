"""Memory estimates for models that were never loaded, from the headers of their files."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from multigpu.config.config import WorkerConfig
from multigpu_worker.composition import model_memory_bytes
from multigpu_worker.device.cpu import host_memory_bytes
from multigpu_worker.device.interface import DeviceInfo
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.planning.costs import GPU_PROCESS_BYTES
from multigpu_worker.models import memory_estimates as memory
from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.weight_files import context_bytes, weights_bytes

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
    assert weights_bytes(spec, 4) == 4 * MIB + 4096, "integers are not converted"
    on_cpu = estimate_bytes(spec, settings(), CPU, 1)
    assert on_cpu == memory.TORCH_BYTES + int((4 * MIB + 4096) * 1.1)
    assert on_cpu - estimate_bytes(spec, settings(precision="bf16"), CPU, 1) == pytest.approx(2.2 * MIB, abs=1)
    on_gpu = estimate_bytes(spec, settings("cuda:0"), GPU, 1)
    assert on_gpu == GPU_PROCESS_BYTES + int((2 * MIB + 4096) * 1.1), "auto is bf16 there"


def test_all_shards_and_instances_count_and_other_sources_with_their_files_size(tmp_path: Path) -> None:
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name in names:
        put_safetensors(tmp_path / name, w=("F32", [256, 1024], 4))
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_bytes(folder_spec(tmp_path), 4) == 2 * MIB
    twice = estimate_bytes(folder_spec(tmp_path, instances=2), settings(), CPU, 1)
    assert twice == 2 * estimate_bytes(folder_spec(tmp_path), settings(), CPU, 1)
    onnx = ModelSpec(name="m", folder=tmp_path, kind="infer", source="onnx", files_bytes=10 * MIB)
    assert estimate_bytes(onnx, settings(), CPU, 1) == memory.ONNX_BYTES + 11 * MIB
    own = ModelSpec(name="m", folder=tmp_path, kind="infer", source="python", engine="a:B", files_bytes=0)
    assert estimate_bytes(own, settings(), CPU, 1) == memory.PROCESS_BYTES
    plan = ModelSpec(name="m", folder=tmp_path, kind="infer", source="onnx", engine="tensorrt", files_bytes=10 * MIB)
    assert estimate_bytes(plan, settings("cuda:0"), GPU, 1) == GPU_PROCESS_BYTES + 22 * MIB, "ONNX serves meanwhile"


def test_a_language_model_needs_a_cache(tmp_path: Path) -> None:
    put_safetensors(tmp_path / "model.safetensors", w=("F32", [1024, 1024], 4))
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    config["max_position_embeddings"] = 1024
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = folder_spec(tmp_path, kind="generate")
    assert context_bytes(spec, 4) == 2 * 4 * 2 * 64 * 1024 * 4
    plain = memory.TORCH_BYTES + int(4 * MIB * 1.1)
    assert estimate_bytes(spec, settings(), CPU, 8) == plain + 8 * 4 * MIB
    assert estimate_bytes(spec, settings(), CPU, 1000) == plain + memory.CPU_CACHE_BYTES
    assert estimate_bytes(spec, settings(), CPU, 1000, plain + MIB) == plain + MIB, "the cache shrinks to the limit"
    assert estimate_bytes(spec, settings(), CPU, 1000, plain - MIB) == plain, "the weights must fit"
    half = GPU.memory_total_bytes // 2
    assert estimate_bytes(spec, settings("cuda:0"), GPU, 1000) == GPU_PROCESS_BYTES + int(2 * MIB * 1.1) + half
    short = folder_spec(tmp_path, kind="generate", parameters={"context": "256"})
    assert context_bytes(short, 4) == MIB
    configured = folder_spec(tmp_path, kind="generate", parameters={"cache_bytes": "1MiB"})
    assert estimate_bytes(configured, settings(), CPU, 8) == plain + MIB
    (tmp_path / "config.json").write_text('{"num_hidden_layers": "x"}')
    assert context_bytes(spec, 4) == 0


def test_a_divided_model_takes_its_limit(tmp_path: Path) -> None:
    put_safetensors(tmp_path / "model.safetensors", w=("F32", [1024, 1024], 4))
    spec = folder_spec(tmp_path, device_map="auto", max_memory={"0": "1MiB", "cpu": "2MiB"})
    assert estimate_bytes(spec, settings(), CPU, 1) == memory.TORCH_BYTES + 2 * MIB
    assert estimate_bytes(spec, settings("cuda:0"), GPU, 1) == GPU_PROCESS_BYTES + MIB
    open_ended = folder_spec(tmp_path, device_map="auto", max_memory={"disk": "1MiB"})
    assert estimate_bytes(open_ended, settings(), CPU, 1) == memory.TORCH_BYTES + int(4 * MIB * 1.1)


def test_workers_of_one_device_share_its_memory() -> None:
    gpu: Any = SimpleNamespace(info=GPU)
    assert model_memory_bytes(WorkerConfig(), gpu) == int(0.9 * GPU.memory_total_bytes)
    assert model_memory_bytes(WorkerConfig(device_workers=3), gpu) == int(0.9 * GPU.memory_total_bytes) // 3
    assert model_memory_bytes(WorkerConfig(device_workers=3, model_memory_bytes=5), gpu) == 5, "as configured"
    cpu: Any = SimpleNamespace(info=CPU)
    assert model_memory_bytes(WorkerConfig(device_workers=2), cpu) == host_memory_bytes() // 2 // 2


def put_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_bool("llama.some.flag", True)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float16))
    blocks = np.zeros((16, 64 // 32 * 34), np.uint8)  # 16 rows of 64 numbers, in Q8_0
    writer.add_tensor("output.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_quantised_file_counts_with_its_dequantised_size(tmp_path: Path) -> None:
    put_gguf(tmp_path / "m.gguf")
    spec = folder_spec(tmp_path, source="gguf", file="m.gguf", kind="generate", changed_ns=1)
    assert weights_bytes(spec, 4) == 4 * (32 * 64 + 16 * 64)
    assert context_bytes(spec, 4) == 2 * 3 * 2 * 16 * 128 * 4


def test_a_file_with_a_damaged_header_counts_with_its_size(tmp_path: Path) -> None:
    put_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    cuts = [whole[:at] for at in range(1, 400, 7)]
    lies = [whole[:at] + b"\xff" * 8 + whole[at + 8 :] for at in range(0, 400, 7)]
    for nth, content in enumerate(cuts + lies):
        (tmp_path / "m.gguf").write_bytes(content)
        spec = folder_spec(tmp_path, source="gguf", file="m.gguf", kind="generate", changed_ns=nth + 2)
        assert weights_bytes(spec, 4) >= 0
        assert context_bytes(spec, 4) >= 0
        if content in cuts:
            assert weights_bytes(spec, 4) == len(content)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    assert weights_bytes(folder_spec(tmp_path), 4) == folder_spec(tmp_path).files_bytes


def test_a_divided_model_counts_with_its_share_of_a_gpu(tmp_path: Path) -> None:
    """Else no model that is larger than one GPU would ever be loaded."""
    put_safetensors(tmp_path / "model.safetensors", w=("BF16", [1024, 1024, 750], 2))
    pair = dataclasses.replace(
        GPU, memory_total_bytes=2 << 30, members=(GPU, dataclasses.replace(GPU, device_id="GPU-2"))
    )
    limit_bytes = int(GPU.memory_total_bytes * 0.9)
    weights = int(1500 * MIB * 1.1)

    def estimate(device: DeviceInfo = pair, **values: Any) -> int:
        spec = folder_spec(tmp_path, kind="embed", **values)
        return estimate_bytes(spec, settings("cuda:0"), device, 1, limit_bytes=limit_bytes)

    assert estimate() == GPU_PROCESS_BYTES + weights, "it does not fit"
    for shared in ({"tensor_parallel": 4}, {"pipeline": 4}, {"device_map": "auto", "devices": 4}):
        assert estimate(**shared) == GPU_PROCESS_BYTES + -(-weights // 4)
    assert estimate(device_map="auto") == limit_bytes, "what does not fit on both is on the host"
    assert estimate(GPU, device_map="auto") == limit_bytes
    assert estimate(device_map="auto", max_memory={"0": "100MiB", "cpu": "9GiB"}) == GPU_PROCESS_BYTES + 100 * MIB
