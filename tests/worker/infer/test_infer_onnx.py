"""Any ONNX graph as a model of kind infer: by its own names, types and shapes."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
pytest.importorskip("onnx", reason="the extra `onnx` is not installed")

import onnx
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.infer import onnx_backend as infer_onnx
from multigpu_worker.engines.infer.engine import InferEngine
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec
from onnx import TensorProto, helper

from tests.worker.embed.test_embed import run
from tests.worker.infer.test_infer import answer, batch_of, payload

# Type and sizes.
Shape = tuple[int, list[int | str]]
SETTINGS = EngineSettings(device="cpu", slots=1, threads=1)


def write(folder: Path, nodes: list[onnx.NodeProto], inputs: dict[str, Shape], output: str) -> ModelSpec:
    taken = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    given = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", taken, [given])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "model.onnx"
    )
    return ModelSpec(name="m", folder=folder, kind="infer", source="onnx", file="model.onnx")


def scaled_sum(folder: Path) -> ModelSpec:
    nodes = [
        helper.make_node("Cast", ["counts"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "floats"], ["y"]),
    ]
    shape: list[int | str] = ["batch", 3]
    return write(folder, nodes, {"x": (TensorProto.FLOAT, shape), "counts": (TensorProto.INT64, ["batch", 1])}, "y")


def engine_of(spec: ModelSpec) -> InferEngine:
    engine = InferEngine(EngineSettings(device="cpu", slots=1, threads=1, models={spec.id: spec}))
    assert engine.load()["engine"] == "onnx"
    return engine


def test_names_types_and_shapes_come_from_the_file(tmp_path: Path) -> None:
    forward, facts = infer_onnx.load(scaled_sum(tmp_path), SETTINGS, "fp32")
    assert [(each.name, each.dtype, each.shape) for each in forward.inputs] == [
        ("x", "float32", (None, 3)),
        ("counts", "int64", (None, 1)),
    ]
    assert [each.name for each in forward.outputs] == ["y"]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    answer = forward({"x": x, "counts": np.array([[2], [-1]])})
    np.testing.assert_array_equal(answer["y"], [[0, 2, 4], [-3, -4, -5]])
    assert facts == {"precision": "as its file"}


def test_tasks_are_joined_with_exact_integers_as_floats_and_a_bad_one_fails_alone(tmp_path: Path) -> None:
    engine = engine_of(scaled_sum(tmp_path))
    payloads = [
        b'{"inputs": {"x": [[1, 2, 3]], "counts": [[2]]}}',
        b'{"inputs": {"x": [[1, 2]], "counts": [[2]]}}',
        b'{"inputs": {"x": [[1, 1, 1], [2, 2, 2]], "counts": [[3], [5]]}}',
    ]
    recorder = run(engine, batch_of(payloads, "application/json"))
    assert recorder.outcomes[0][1] == b'{"outputs": {"y": [[2.0, 4.0, 6.0]]}}'
    assert recorder.outcomes[1][0] == "BadInput"
    assert recorder.outcomes[2][1] == b'{"outputs": {"y": [[3.0, 3.0, 3.0], [10.0, 10.0, 10.0]]}}'
    payloads = [payload(x=np.array([[1, 2, last]]), counts=np.array([[2]])) for last in (3, 2**53 + 1)]
    recorder = run(engine, batch_of(payloads))
    assert answer(recorder, 0)["y"].tolist() == [[2.0, 4.0, 6.0]]
    assert recorder.outcomes[1][0] == "BadInput"


def test_unsupported_models_are_rejected(tmp_path: Path) -> None:
    spec = scaled_sum(tmp_path)
    for precision, words in (("fp16", "leave fp16 out"), ("fp8", "not fp8: take engine tensorrt")):
        with pytest.raises(PrecisionError, match=words):
            infer_onnx.load(spec, SETTINGS, precision)
    with pytest.raises(ModelFolderError, match=r"source huggingface: for engine onnx make a model\.onnx"):
        infer_onnx.load(ModelSpec(name="m", folder=tmp_path, source="huggingface"), SETTINGS, "fp32")
    nodes = [helper.make_node("Identity", ["words"], ["y"])]
    texts = write(tmp_path, nodes, {"words": (TensorProto.STRING, ["n"])}, "y")
    texts_model = onnx.load(tmp_path / "model.onnx")
    texts_model.graph.output[0].type.tensor_type.elem_type = TensorProto.STRING
    onnx.save(texts_model, tmp_path / "model.onnx")
    with pytest.raises(ModelFolderError, match=r"words of type tensor\(string\)"):
        infer_onnx.load(texts, SETTINGS, "fp32")
    (tmp_path / "model.onnx").write_bytes(b"\x00" * 64)
    with pytest.raises(ModelFolderError, match="can't be loaded by ONNX Runtime"):
        infer_onnx.load(spec, SETTINGS, "fp32")


def with_external_data(folder: Path, location: str, offset: int = 0) -> ModelSpec:
    """y = x + w, with w in another file."""
    spec = write(folder, [helper.make_node("Add", ["x", "w"], ["y"])], {"x": (TensorProto.FLOAT, ["batch", 4])}, "y")
    model = onnx.load(folder / spec.file)
    w = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
    w.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", "16")):
        w.external_data.add(key=key, value=value)
    (folder / spec.file).write_bytes(model.SerializeToString())
    return spec


def test_external_data_in_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/w").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    forward, _ = infer_onnx.load(with_external_data(tmp_path, "deep/w"), SETTINGS, "fp32")
    np.testing.assert_array_equal(forward({"x": np.ones((1, 4), np.float32)})["y"], [[1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("{outside}/secret", "Absolute path not allowed"),
        ("../outside/secret", "escapes model directory"),
        ("link", "escapes model directory"),
        ("folder/secret", "escapes model directory"),
        # ONNX Runtime's own name for data at an address of the process.
        ("*/_ORT_MEM_ADDR_/*", "can't be loaded by ONNX Runtime"),
    ],
)
def test_external_data_outside_the_folder_is_rejected(tmp_path: Path, location: str, words: str) -> None:
    """The folder is not in a repository, so the scan does not reject the links."""
    outside, folder = tmp_path / "outside", tmp_path / "m"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (folder / "link").symlink_to(outside / "secret")
    (folder / "folder").symlink_to(outside)
    spec = with_external_data(folder, location.format(outside=outside), offset=4096 if "*" in location else 0)
    with pytest.raises(ModelFolderError, match=words):
        infer_onnx.load(spec, SETTINGS, "fp32")
