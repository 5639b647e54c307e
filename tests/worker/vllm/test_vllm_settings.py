"""The engine vllm without vLLM: which models it runs, what vLLM is started with, and errors before and while it starts.

tests/integration/models/test_vllm.py runs the engine on a real one.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from multigpu_worker.device.interface import DeviceInfo
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.planning.costs import GPU_PROCESS_BYTES
from multigpu_worker.models import memory_estimates
from multigpu_worker.models.catalog import installed
from multigpu_worker.models.model_sizes import slots_of
from multigpu_worker.repository.model import ModelFolderError, ModelSpec, Scan
from multigpu_worker.repository.scan import read_model

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("httpx2", reason="the extra `remote` is not installed")

from multigpu_worker.engines.vllm.engine import arguments_of, environment_of
from multigpu_worker.engines.vllm.server import VllmServer

from tests.worker.generate.tiny_llama import save_tiny_llama

MIB = 1 << 20


def spec_of(**values: Any) -> ModelSpec:
    given: dict[str, Any] = {"name": "chat", "folder": Path("/srv/chat"), "source": "huggingface", "kind": "generate"}
    return ModelSpec(**given | values)


def settings(device: str = "cuda:0", slots: int = 64) -> EngineSettings:
    return EngineSettings(device=device, slots=slots, threads=0, vllm_python="/opt/vllm/bin/python")


@pytest.mark.parametrize(
    ("spec", "vllm", "on_gpu", "engine"),
    [
        (spec_of(), True, True, "vllm"),
        (spec_of(), True, False, "auto"),
        (spec_of(), False, True, "auto"),
        (spec_of(engine="torch"), True, True, "torch"),
        (spec_of(source="gguf"), True, True, "auto"),
        (spec_of(kind="embed"), True, True, "auto"),
        (spec_of(precision="tf32"), True, True, "auto"),
        (spec_of(parameters={"context": "100"}), True, True, "vllm"),
        (spec_of(engine="vllm"), True, False, "vllm"),
    ],
)
def test_auto_is_vllm_on_a_gpu_where_it_is_installed(spec: ModelSpec, vllm: bool, on_gpu: bool, engine: str) -> None:
    found = installed(Scan(models={"chat": spec}), "auto", vllm=vllm, on_gpu=on_gpu, gpus=1)
    assert not found.errors
    assert found.models["chat"].engine == engine
    assert (
        installed(Scan(models={"chat": spec}), "torch", vllm=vllm, on_gpu=on_gpu, gpus=1).models["chat"].engine
        == spec.engine
    )


def test_a_model_that_names_it_is_an_error_where_it_is_not() -> None:
    found = installed(Scan(models={"chat": spec_of(engine="vllm")}), "auto", vllm=False, on_gpu=True, gpus=1)
    assert not found.models
    assert "needs vllm_python" in found.errors["chat"]


def test_it_runs_language_models_of_hugging_face_folders(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    (tmp_path / "model.toml").write_text('engine = "vllm"\n')
    with pytest.raises(ModelFolderError, match="the engine vllm can't run onnx"):
        read_model(tmp_path, "m", None)
    save_tiny_llama(tmp_path / "chat")
    (tmp_path / "chat" / "model.toml").write_text('engine = "vllm"\nkind = "embed"\n')
    with pytest.raises(ModelFolderError, match="the engine vllm runs Hugging Face folders of kind generate, not"):
        read_model(tmp_path / "chat", "m", None)
    (tmp_path / "chat" / "model.toml").write_text('engine = "vllm"\n')
    ((spec,), _) = read_model(tmp_path / "chat", "m", None)
    assert (spec.engine, spec.kind, slots_of(spec)) == ("vllm", "generate", 64)


def test_model_toml_becomes_arguments() -> None:
    plain = ["--model", "/srv/chat", "--served-model-name", "chat", "--generation-config", "vllm"]
    plain += ["--structured-outputs-config.backend", "guidance"]
    assert arguments_of(spec_of(), settings()) == [*plain, "--dtype", "auto", "--max-num-seqs", "64"]
    parameters = {"context": "4096", "cache_bytes": "2GiB", "arguments": "--quantization awq --swap-space '4'"}
    given = arguments_of(spec_of(precision="fp16", parameters=parameters), settings(slots=2))
    assert given == [
        *plain, *("--dtype", "float16", "--max-num-seqs", "2", "--max-model-len", "4096"),
        *("--kv-cache-memory-bytes", str(2 << 30), "--quantization", "awq", "--swap-space", "4"),
    ]  # fmt: skip
    assert arguments_of(spec_of(), settings("cpu"))[-2:] == ["--kv-cache-memory-bytes", str(512 * MIB)]


def test_adapters_become_arguments(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    for name, rank in (("a", 4), ("b", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (tmp_path / "model.toml").write_text('engine = "vllm"\nadapters = { a = "a", other = "b" }\n')
    ((spec,), _) = read_model(tmp_path, "m", None)
    found = arguments_of(spec, settings())
    assert found[found.index("--max-lora-rank") + 1] == "32"
    modules = found[found.index("--lora-modules") + 1 :]
    assert [json.loads(each)["name"] for each in modules] == ["a", "other"]
    (tmp_path / "b" / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match=r"adapter_config.json has r = None, and vLLM takes 1 to 512"):
        arguments_of(spec, settings())
    for toml, error in (
        ('adapters = { a = "a" }', 'adapters are for engine = "vllm"'),
        ('engine = "vllm"\nadapters = { a = "c" }', "c/adapter_config.json is missing: adapters: a"),
        ('engine = "vllm"\nadapters = { a = "../a" }', "no path of a file in the model's folder"),
    ):
        (tmp_path / "model.toml").write_text(toml)
        with pytest.raises(ModelFolderError, match=error):
            read_model(tmp_path, "m", None)


def test_on_a_cpu_it_is_bound_to_no_cores() -> None:
    assert environment_of(settings()) == {}
    given = environment_of(EngineSettings(device="cpu", slots=1, threads=3, artifacts="/var/cache/mgpu"))
    assert given == {
        "VLLM_CACHE_ROOT": "/var/cache/mgpu/vllm", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "3"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"precision": "int8"}, "vllm takes precision auto, fp32, bf16, fp16, not int8"),
        ({"parameters": {"cache": "1"}}, "parameters.cache: vllm knows arguments, cache_bytes, context"),
        ({"parameters": {"cache_bytes": "1x"}}, "'1x' is not a size"),
        ({"parameters": {"context": "long"}}, "long"),
        ({"parameters": {"context": "-3"}}, "context is -3: it must be at least 1"),
        ({"parameters": {"arguments": "--trust-remote-code"}}, "--trust-remote-code, which may not be set there"),
        ({"parameters": {"arguments": "--host=0.0.0.0"}}, "--host=0.0.0.0, which may not be set there"),
        ({"parameters": {"arguments": "--a 'b"}}, "No closing quotation"),
    ],
)
def test_wrong_settings_are_errors(values: dict[str, Any], error: str) -> None:
    with pytest.raises(ModelFolderError, match=error):
        arguments_of(spec_of(**values), settings())


def test_a_python_without_vllm_is_an_error_and_leaves_no_process() -> None:
    died: list[str] = []
    server = VllmServer(sys.executable, [], {}, died.append)
    with pytest.raises(ModelFolderError, match=r"vLLM has ended while it loaded the model: .*vllm.* exit code 1"):
        server.wait_ready()
    server.close()
    assert not died
    assert not Path(server.socket).parent.exists()


# What vLLM prints when its engine finds too little memory: the server's traceback comes last.
NO_MEMORY = """#!/bin/sh
echo "(EngineCore pid=7) ERROR 08-14 16:07:04 [core.py:1] EngineCore failed to start."
echo "(EngineCore pid=7) ERROR 08-14 16:07:04 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to ..."
for i in $(seq 60); do echo "(APIServer pid=1)   File \\"async_llm.py\\", line $i, in f"; done
echo "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."
exit 1
"""


def test_a_lack_of_memory_is_found_before_the_traceback_of_the_server(tmp_path: Path) -> None:
    """The loader makes room for such a model, and tries again."""
    program = tmp_path / "python"
    program.write_text(NO_MEMORY)
    program.chmod(0o755)
    server = VllmServer(str(program), [], {}, lambda _: None)
    with pytest.raises(MemoryError, match=r"CUDA out of memory.* RuntimeError: Engine core initialization failed"):
        server.wait_ready()
    server.close()


def test_a_server_that_can_not_be_started_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="null byte"):
        VllmServer(sys.executable, ["--served-model-name", "a\0b"], {}, lambda _: None)
    assert not list(tmp_path.iterdir())


def test_its_memory_is_estimated_as_it_takes_it() -> None:
    gpu = DeviceInfo(
        device_id="GPU-1", name="cuda:0", product="a GPU", memory_total_bytes=1000, compute_capability="9.0"
    )
    limited = spec_of(engine="vllm", parameters={"cache_bytes": "1MiB"}, files_bytes=10 * MIB)
    whole = memory_estimates.estimate_bytes(spec_of(engine="vllm"), settings(), gpu, slots=64, limit_bytes=0)
    assert whole == 900
    part = memory_estimates.estimate_bytes(limited, settings(), gpu, slots=64, limit_bytes=0)
    assert part == GPU_PROCESS_BYTES + 11 * MIB
