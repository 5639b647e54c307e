"""Outputs are divided among tasks only where they have a row for each example, which a count of rows doesn't prove."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
pytest.importorskip("onnx", reason="the extra `onnx` is not installed")

import onnx
import torch
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.tensors import Arrays
from multigpu_worker.engines.infer.backend import is_per_example
from multigpu_worker.engines.infer.engine import AS_CONFIGURED, AS_DECLARED, InferEngine
from multigpu_worker.repository.model import BatchRules, ModelSpec
from onnx import TensorProto, helper, numpy_helper

from tests.worker.embed.test_embed import Recorder, run
from tests.worker.graphs import small_graphs
from tests.worker.infer.test_infer import answer, batch_of, payload

# As many rows as go through a model at once on a CPU.
TABLE = np.arange(64, dtype=np.float32).reshape(32, 2)
FOUR = TABLE[:4]
Array = Any


def write(
    folder: Path,
    nodes: list[onnx.NodeProto],
    outputs: dict[str, int | str | None],
    inputs: dict[str, int | str | None] | None = None,
    table: Array = TABLE,
) -> ModelSpec:
    """A graph of `nodes` with the initializer "table": of inputs and outputs the first dimension, and 2 the second."""
    taken, given = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [first, 2]) for name, first in of.items()]
        for of in (inputs or {"x": "n"}, outputs)
    )
    graph = helper.make_graph(nodes, "g", taken, given, [numpy_helper.from_array(table, "table")])
    small_graphs.save_graph(graph, folder / "model.onnx")
    return ModelSpec(name="m", folder=folder, kind="infer", source="onnx", file="model.onnx")


SQUARE = helper.make_node("Mul", ["x", "x"], ["y"])
CODE = helper.make_node("Identity", ["table"], ["code"])
CENTER = [
    helper.make_node("Constant", [], ["axes"], value=numpy_helper.from_array(np.array([0]))),
    helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=1),
    helper.make_node("Sub", ["x", "mean"], ["y"]),
]


def engine_of(spec: ModelSpec) -> tuple[InferEngine, list[int]]:
    """An engine, loaded and warm, and what will have gone through its model: rows of the first input."""
    engine = InferEngine(EngineSettings(device="cpu", slots=1, threads=1, models={spec.id: spec}))
    engine.load()
    seen: list[int] = []
    engine._model.forward = Watched(engine._model.forward, seen)
    return engine, seen


class Watched:
    def __init__(self, forward: Any, seen: list[int]) -> None:
        self.inputs, self.outputs = forward.inputs, forward.outputs
        self.examples_max, self.per_example = forward.examples_max, forward.per_example
        self._forward, self._seen = forward, seen

    def __call__(self, inputs: Arrays) -> Arrays:
        self._seen.append(len(next(iter(inputs.values()))))
        found: Arrays = self._forward(inputs)
        return found


def some(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, 2)).astype(np.float32)


def assert_each(engine: InferEngine, sizes: list[int], expected: Callable[[Array], Arrays]) -> Recorder:
    """Tasks of so many rows, all in one batch, get the answers of the model for each alone."""
    inputs = [some(n, seed) for seed, n in enumerate(sizes)]
    recorder = run(engine, batch_of([payload(x=x) for x in inputs]))
    for index, x in enumerate(inputs):
        found, wanted = answer(recorder, index), expected(x)
        assert {name: array.shape for name, array in found.items()} == {n: a.shape for n, a in wanted.items()}
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-5)
    return recorder


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[64], [10, 22], [32], [1] * 32, [33, 31]])
def test_constant_output_is_not_split(tmp_path: Path, sizes: list[int]) -> None:
    engine, seen = engine_of(write(tmp_path, [SQUARE, CODE], {"y": "n", "code": 32}))
    assert_each(engine, sizes, lambda x: {"y": x * x, "code": TABLE})
    assert seen == sizes


@pytest.mark.parametrize("first", [4, "m"])
def test_output_with_fixed_rows_is_returned_whole(tmp_path: Path, first: int | str) -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Add", ["table", "sum"], ["y"]),
    ]
    engine, seen = engine_of(write(tmp_path, nodes, {"y": first}, table=FOUR))
    assert_each(engine, [1, 1, 1, 1], lambda x: {"y": FOUR + x.sum()})
    assert_each(engine, [2, 2], lambda x: {"y": FOUR + x.sum()})
    assert seen == [1, 1, 1, 1, 2, 2]


def test_dimension_of_another_name_is_not_the_examples(tmp_path: Path) -> None:
    """Rows of x that are above 0 in their first column: as many as there are rows, in some batches."""
    nodes = [
        helper.make_node("Constant", [], ["first"], value=numpy_helper.from_array(np.array(0))),
        helper.make_node("Constant", [], ["zero"], value=numpy_helper.from_array(np.array(0, np.float32))),
        helper.make_node("Gather", ["x", "first"], ["column"], axis=1),
        helper.make_node("Greater", ["column", "zero"], ["above"]),
        helper.make_node("Compress", ["x", "above"], ["picked"], axis=0),
        helper.make_node("Concat", ["picked", "picked"], ["y"], axis=0),
    ]
    engine, seen = engine_of(write(tmp_path, nodes, {"y": "found"}))
    # Two of four rows, each twice: four again.
    tasks = [np.array([[1, 2]], np.float32), np.array([[-1, 3]], np.float32), np.array([[5, 4], [-2, 1]], np.float32)]
    recorder = run(engine, batch_of([payload(x=x) for x in tasks]))
    for index, x in enumerate(tasks):
        picked = x[x[:, 0] > 0]
        np.testing.assert_array_equal(answer(recorder, index)["y"], np.concatenate([picked, picked]))
    assert seen == [1, 1, 2]


def test_inputs_with_different_first_dimensions_are_not_joined(tmp_path: Path) -> None:
    product = helper.make_node("Mul", ["x", "w"], ["y"])
    engine, seen = engine_of(write(tmp_path, [product], {"y": "n"}, {"x": "n", "w": "k"}))
    tasks = [(some(3, seed), some(k, seed + 9)) for seed, k in enumerate((3, 1, 3))]
    recorder = run(engine, batch_of([payload(x=x, w=w) for x, w in tasks]))
    for index, (x, w) in enumerate(tasks):
        np.testing.assert_array_equal(answer(recorder, index)["y"], x * w)
    assert seen == [3, 3, 3]


def test_declared_model_is_joined_at_once_and_one_of_unnamed_dimensions_tested_before(tmp_path: Path) -> None:
    engine, seen = engine_of(write(tmp_path, [SQUARE], {"y": "n"}))
    assert_each(engine, [1, 2, 3, 40], lambda x: {"y": x * x})
    assert seen == [32, 14]
    engine, seen = engine_of(write(tmp_path, [SQUARE], {"y": None}, {"x": None}))
    assert_each(engine, [3, 2], lambda x: {"y": x * x})
    assert_each(engine, [3, 2], lambda x: {"y": x * x})
    assert seen == [1, 2, 5, 5]


def test_coincidental_number_of_rows_is_detected(tmp_path: Path) -> None:
    """Two columns become two rows: as many as examples in a batch of two."""
    flipped = helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0])
    spec = write(tmp_path, [flipped], {"y": None}, {"x": None})
    model = onnx.load(tmp_path / "model.onnx")
    for each in (*model.graph.input, *model.graph.output):
        each.type.tensor_type.shape.dim[1].Clear()
    onnx.save(model, tmp_path / "model.onnx")
    engine, seen = engine_of(spec)
    assert_each(engine, [1, 1], lambda x: {"y": x.T})
    assert_each(engine, [2, 40], lambda x: {"y": x.T})
    assert seen == [1, 1, 1, 2, 40]


def test_tasks_max_of_one_keeps_means_over_examples_right(tmp_path: Path) -> None:
    """Neither joined with others' rows nor cut at examples_max, which is 32 here."""
    spec = write(tmp_path, CENTER, {"y": "n"})
    alone = dataclasses.replace(spec, batch=BatchRules(tasks_max=1), parameters={"examples_max": "32"})
    engine, seen = engine_of(alone)
    assert_each(engine, [64], lambda x: {"y": x - x.mean(0)})
    assert_each(engine, [3, 5, 100], lambda x: {"y": x - x.mean(0)})
    assert seen == [64, 3, 5, 100]
    assert engine.load()["tasks"] == AS_CONFIGURED


def test_facts_say_why_tasks_run_one_by_one(tmp_path: Path) -> None:
    def facts(spec: ModelSpec) -> dict[str, str]:
        return InferEngine(EngineSettings(device="cpu", slots=1, threads=1, models={spec.id: spec})).load()

    assert facts(write(tmp_path, [SQUARE, CODE], {"y": "n", "code": 32}))["tasks"] == AS_DECLARED
    assert "tasks" not in facts(write(tmp_path, [SQUARE], {"y": "n"}))


class WithTable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.from_numpy(TABLE.copy()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        assert isinstance(self.table, torch.Tensor)
        return {"y": x * x, "code": self.table + 0}


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * x, torch.cat([x, x])


class Squared(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        # Lists within are no outputs.
        return x * x, [torch.ones(5)]


def export(folder: Path, module: torch.nn.Module) -> ModelSpec:
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=4096)}}
    program = torch.export.export(module, (torch.randn(3, 2),), dynamic_shapes=shapes)
    torch.export.save(program, folder / "model.pt2")
    return ModelSpec(
        name="m", folder=folder, kind="infer", source="torch-export", file="model.pt2", allow_pickle=("model.pt2",)
    )


@pytest.mark.filterwarnings("ignore")
def test_exported_programs_declare_rows_by_symbols(tmp_path: Path) -> None:
    engine, seen = engine_of(export(tmp_path, WithTable()))
    assert_each(engine, [64, 10, 32], lambda x: {"y": x * x, "code": TABLE})
    assert seen == [64, 10, 32]
    engine, seen = engine_of(export(tmp_path, Doubled()))
    assert_each(engine, [1, 2], lambda x: {"output_0": x * x, "output_1": np.concatenate([x, x])})
    assert seen == [1, 2]
    engine, seen = engine_of(export(tmp_path, Squared()))
    assert_each(engine, [1, 2, 40], lambda x: {"output_0": x * x})
    assert seen == [32, 11]


class Moody(Squared):
    """Can't run one row or two: it needs three together."""

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) < 3:
            raise ValueError("too few")
        return x * x


def undeclared(folder: Path, kind: type[torch.nn.Module]) -> tuple[InferEngine, list[int]]:
    """Weights and a class, which declare nothing."""
    from safetensors.torch import save_file

    save_file(kind().state_dict(), folder / "weights.safetensors")
    parameters = {"class": f"{kind.__module__}:{kind.__qualname__}"}
    values: dict[str, Any] = {"source": "safetensors", "file": "weights.safetensors", "parameters": parameters}
    return engine_of(ModelSpec(name="m", folder=folder, kind="infer", **values))


def test_undeclared_module_is_tested_before_joining(tmp_path: Path) -> None:
    engine, seen = undeclared(tmp_path, WithTable)
    assert_each(engine, [64, 10, 22], lambda x: {"y": x * x, "code": TABLE})
    # One row shows it already, and no task pays for it again.
    assert seen == [1, 64, 10, 22]
    engine, seen = undeclared(tmp_path, Squared)
    assert_each(engine, [1, 2, 40], lambda x: {"output_0": x * x})
    assert seen == [1, 2, 32, 11]


def test_module_that_needs_all_rows_gets_them(tmp_path: Path) -> None:
    engine, seen = undeclared(tmp_path, Moody)
    bad, good = payload(x=some(2)), payload(x=some(40))
    for _ in range(2):
        recorder = run(engine, batch_of([bad, good, good]))
        assert recorder.outcomes[0][:2] == ("ValueError", "too few")
        for index in (1, 2):
            np.testing.assert_array_equal(answer(recorder, index)["output"], some(40) ** 2)
    # The first task can't tell: it doesn't run at all. The second does.
    assert seen == [1, 2, 1, 40, 40, 2, 40, 40]


@pytest.mark.parametrize(
    ("first_dimensions", "expected"),
    [
        (["n", "n", "n"], True),
        (["n", 4], False),
        ([4, 4], False),
        (["n", "m"], False),
        (["n", "m", None], False),
        (["n", None], None),
        ([None, None], None),
        ([None, 0], False),
    ],
)
def test_per_example_follows_first_dimensions(first_dimensions: list[int | str | None], expected: bool | None) -> None:
    assert is_per_example(first_dimensions) is expected
