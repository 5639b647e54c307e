"""Models of torch by every kind of file: the answers are those of the module itself, or loading says why not."""

import contextlib
import dataclasses
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

import torch
import transformers
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.common.tensors import TensorSpec
from multigpu_worker.engines.infer.engine import InferEngine
from multigpu_worker.engines.infer.torch_backend import TorchForward, load
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.signature import NamedTensor, Signature

from tests.worker.embed.test_embed import run
from tests.worker.infer.test_infer import answer, batch_of, payload, rows

hf: Any = transformers


class Affine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.linear(x) * scale, "total": x.sum(1)}


def export(folder: Path, first: Any) -> ModelSpec:
    shapes = {"x": {0: first}, "scale": {0: first}}
    example = (torch.randn(3, 4),), {"scale": torch.ones(3, 1)}
    program = torch.export.export(Affine(), *example, dynamic_shapes=None if first is None else shapes)
    torch.export.save(program, folder / "model.pt2")
    values: dict[str, Any] = {"source": "torch-export", "file": "model.pt2", "allow_pickle": ("model.pt2",)}
    return ModelSpec(name="m", folder=folder, kind="infer", **values)


def settings_of(spec: ModelSpec) -> EngineSettings:
    return EngineSettings(device="cpu", slots=1, threads=1, models={"m": spec})


def load_here(spec: ModelSpec, precision: str = "fp32") -> TorchForward:
    return load(spec, settings_of(spec), precision)[0]


def scaled(n: int) -> dict[str, Any]:
    return {"x": rows(n), "scale": np.full((n, 1), 2, dtype=np.float32)}


def assert_right(found: dict[str, Any], n: int) -> None:
    inputs = {name: torch.from_numpy(array) for name, array in scaled(n).items()}
    with torch.inference_mode():
        expected = Affine()(inputs["x"], scale=inputs["scale"])
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_exported_program_is_joined_up_to_its_bound(tmp_path: Path) -> None:
    engine = InferEngine(settings_of(export(tmp_path, torch.export.Dim("batch", max=6))))
    facts = engine.load()
    assert facts["inputs"] == "x: float32 [any, 4]; scale: float32 [any, 1]"
    assert facts["warm-up"] == "x [1, 4], scale [1, 1]"
    x, scale = (NamedTensor(name=name, dtype="float32", shape=(-1, size)) for name, size in (("x", 4), ("scale", 1)))
    y, total = (
        NamedTensor(name=name, dtype="float32", shape=shape) for name, shape in (("y", (-1, 3)), ("total", (-1,)))
    )
    assert engine.signature() == Signature(inputs=(x, scale), outputs=(y, total))
    assert Signature.of(engine.signature().plain()) == engine.signature()
    sizes = (1, 5, 13)
    payloads = [payload(**scaled(n)) for n in sizes]
    wrong = [payload(x=rows(2, width=5), scale=np.ones((2, 1), np.float32)), payload(x=rows(1).astype(np.int64))]
    recorder = run(engine, batch_of([*payloads, *wrong]))
    for i, n in enumerate(sizes):
        assert_right(answer(recorder, i), n)
    words = "the input 'x' has type float32 and shape [2, 5]. The model takes x: float32 [any, 4]"
    assert words in recorder.outcomes[3][1]
    assert "'scale' is missing" in recorder.outcomes[4][1]
    lower = dataclasses.replace(engine._spec, precision="fp16")
    with pytest.raises(PrecisionError, match="was exported at its precision"):
        InferEngine(settings_of(lower)).load()


@pytest.mark.filterwarnings("ignore")
def test_exported_program_of_one_shape_runs_tasks_one_by_one(tmp_path: Path) -> None:
    engine = InferEngine(settings_of(export(tmp_path, None)))
    assert engine.load()["inputs"] == "x: float32 [3, 4]; scale: float32 [3, 1]"
    recorder = run(engine, batch_of([payload(**scaled(3)), payload(**scaled(2)), payload(**scaled(3))]))
    for i in (0, 2):
        assert_right(answer(recorder, i), 3)
    assert recorder.outcomes[1][0] == "BadInput"


class Evil:
    """Shows that it was unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


Members = list[tuple[str, bytes]]


def place(members: Members, ending: str) -> int:
    return next(i for i, (name, _) in enumerate(members) if name.endswith(ending))


def pickled(marker: Path) -> bytes:
    data = io.BytesIO()
    torch.save(Evil(marker), data)
    return data.getvalue()


def sample_inputs(members: Members, marker: Path) -> None:
    at = place(members, "sample_inputs/model.pt")
    members[at] = members[at][0], pickled(marker)


def sample_inputs_twice(members: Members, marker: Path) -> None:
    """Python's reader finds the last one, torch's reader another one."""
    at = place(members, "sample_inputs/model.pt")
    members[at:at] = [(members[at][0], pickled(marker))] * 3


def sample_inputs_in_capitals(members: Members, marker: Path) -> None:
    """torch's reader ignores the case of names."""
    at = place(members, "sample_inputs/model.pt")
    members[at] = members[at][0].replace("model.pt", "model.PT"), pickled(marker)


def opaque_constant(members: Members, marker: Path) -> None:
    at = place(members, "model_constants_config.json")
    name = members[at][0]
    weights = json.loads(members[place(members, "model_weights_config.json")][1])["config"]
    entry = weights["linear.bias"] | {"path_name": "opaque_obj_0"}
    members[at] = name, json.dumps({"config": {"c": entry}}).encode()
    body = pickle.dumps(Evil(marker))
    members.append((name.replace("model_constants_config.json", "opaque_obj_0"), body + bytes(-len(body) % 4)))


def symbolic_size(members: Members, marker: Path) -> None:
    """The program itself is JSON, and torch evaluates the expressions of its sizes."""
    at = place(members, "models/model.json")
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    text = re.sub(r'"expr_str": "[^"]*"', f'"expr_str": "{code}"', members[at][1].decode())
    members[at] = members[at][0], text.encode()


HARMS = [sample_inputs, sample_inputs_twice, sample_inputs_in_capitals, opaque_constant, symbolic_size]


def harmed(folder: Path, harm: Callable[[Members, Path], None]) -> ModelSpec:
    """A program whose loading creates the file "marker"."""
    spec = export(folder, torch.export.Dim("batch", max=6))
    with zipfile.ZipFile(folder / spec.file) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    harm(members, folder / "marker")
    with zipfile.ZipFile(folder / spec.file, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return spec


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("harm", HARMS)
def test_exported_program_is_code_and_must_be_allowed(tmp_path: Path, harm: Callable[[Members, Path], None]) -> None:
    spec = dataclasses.replace(harmed(tmp_path, harm), allow_pickle=())
    with pytest.raises(ModelFolderError, match=r"model\.pt2 .*can run any code.*allow_pickle"):
        load_here(spec)
    assert not (tmp_path / "marker").exists()
    with contextlib.suppress(ModelFolderError):
        load_here(dataclasses.replace(spec, allow_pickle=(spec.file,)))
    assert (tmp_path / "marker").exists(), "this archive runs no code: the test shows nothing"


BERT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
# A range that is much larger than is usual, so that different inputs get clearly different answers.
BERT |= {"vocab_size": 100, "num_labels": 3, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Any]:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT)).eval()
    model.save_pretrained(folder)
    return ModelSpec(name="m", folder=folder, kind="infer", source="huggingface"), model


def test_hugging_face_folder_by_signature(bert: tuple[ModelSpec, Any]) -> None:
    spec, model = bert
    engine = InferEngine(settings_of(spec))
    engine.load()
    assert [(each.name, each.dtype, each.shape, each.optional) for each in engine.signature().inputs][:2] == [
        ("input_ids", "int64", (-1, -1), False),
        ("attention_mask", "int64", (-1, -1), True),
    ]
    assert engine.signature().outputs == ()
    short, long = np.arange(1, 7).reshape(2, 3), np.arange(1, 11).reshape(1, 10)
    mask = np.ones_like(short)
    mask[:, 2] = 0
    asked: list[dict[str, Any]] = [
        {"input_ids": short},
        {"input_ids": long},
        {"input_ids": short, "attention_mask": mask},
    ]
    recorder = run(engine, batch_of([*(payload(**each) for each in asked), payload(attention_mask=mask)]))
    with torch.inference_mode():
        for i, inputs in enumerate(asked):
            expected = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).logits.numpy()
            np.testing.assert_allclose(answer(recorder, i)["logits"], expected, rtol=0, atol=1e-5)
    assert np.abs(answer(recorder, 0)["logits"] - answer(recorder, 2)["logits"]).max() > 1e-4
    assert "the input 'input_ids' is missing. The model takes input_ids: int64 [any, any]" in recorder.outcomes[3][1]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 1e-1), ("fp16", 1e-2)])
def test_lower_precision_is_close_in_float32(bert: tuple[ModelSpec, Any], precision: str, tolerance: float) -> None:
    spec, _ = bert
    inputs = {"input_ids": np.arange(1, 7).reshape(2, 3)}
    exact, rough = load_here(spec)(inputs)["logits"], load_here(spec, precision)(inputs)["logits"]
    assert rough.dtype == np.float32
    assert 1e-6 < np.abs(exact - rough).max() < tolerance


def test_pickled_weights_of_a_folder_must_be_allowed(bert: tuple[ModelSpec, Any], tmp_path: Path) -> None:
    spec, model = bert
    (tmp_path / "config.json").write_bytes((spec.folder / "config.json").read_bytes())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    spec = dataclasses.replace(spec, folder=tmp_path)
    with pytest.raises(ModelFolderError, match="pickle"):
        load_here(spec)
    allowed = load_here(dataclasses.replace(spec, allow_pickle=("pytorch_model.bin",)))
    inputs = {"input_ids": np.arange(1, 7).reshape(2, 3)}
    expected = load_here(bert[0])(inputs)["logits"]
    np.testing.assert_array_equal(allowed(inputs)["logits"], expected)


def test_missing_weights_are_rejected(bert: tuple[ModelSpec, Any], tmp_path: Path) -> None:
    spec, model = bert
    model.bert.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(ModelFolderError, match="classifier"):
        load_here(ModelSpec(name="m", folder=tmp_path, kind="infer", source=spec.source))


def test_pickled_weights_must_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "infer_torch_class.py").write_text("import torch\nclass Line(torch.nn.Linear): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.save({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, tmp_path / "weights.pth")
    parameters = {"class": "infer_torch_class:Line", "arguments": '{"in_features": 4, "out_features": 2}'}

    def spec(**more: Any) -> ModelSpec:
        values = {"file": "weights.pth", "parameters": parameters, **more}
        return ModelSpec(name="m", folder=tmp_path, kind="infer", source="safetensors", **values)

    with pytest.raises(ModelFolderError, match="is a pickle, which can run any code"):
        load_here(spec())
    forward = load_here(spec(allow_pickle=("weights.pth",)))
    assert forward.inputs == (TensorSpec(name="input"),)
    np.testing.assert_array_equal(forward({"input": rows(1)})["output"], [[6, 6]])
    with pytest.raises(ModelFolderError, match=r"name their class in model\.toml"):
        load_here(spec(parameters={}))
    with pytest.raises(ModelFolderError, match="has no attribute 'Lin'"):
        load_here(spec(parameters={"class": "infer_torch_class:Lin"}))
