"""The infer engine on real models of torch: examples of many tasks together, every answer that of its task alone."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

import torch
from multigpu._kinds.inference import arrays_of, tensor_of
from multigpu.v1 import infer_pb2
from multigpu_worker.engines.base import Batch, EngineSettings, Item
from multigpu_worker.engines.infer.engine import InferEngine
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

from tests.worker.embed.test_embed import Recorder, run

MODELS = """
import torch

# The shapes of first inputs, as models saw them; and how many rows they find room for.
SEEN = []
ROOM = [10_000]

class Scale(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(width))

    def forward(self, x, bias=None):
        see(x)
        y = x * self.factor
        return {"y": y if bias is None else y + bias, "total": y.flatten(1).sum(1), "name": "left out"}

class Summed(Scale):
    # Its first dimension is no count of examples: the answer has one row for all.
    def forward(self, x):
        see(x)
        return (x * self.factor).sum(0, keepdim=True)

def see(x):
    SEEN.append(list(x.shape))
    if x.ndim and len(x) > ROOM[0]:
        raise torch.OutOfMemoryError("simulated")
    if (x == 666).any():
        raise ValueError("a number that spoils the batch")
"""


MakeEngine = Callable[..., InferEngine]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of models."""
    (tmp_path / "worker_infer_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("worker_infer_models")
    del sys.modules["worker_infer_models"]


@pytest.fixture
def make_engine(tmp_path: Path, models: Any) -> MakeEngine:
    """An engine with a class from a module and weights in safetensors."""
    from safetensors.torch import save_file

    assert models.SEEN == []
    save_file({"factor": torch.tensor([1.0, 2.0, 3.0, 4.0])}, tmp_path / "weights.safetensors")

    def make(kind: str = "Scale", **parameters: str) -> InferEngine:
        values: dict[str, Any] = {"parameters": {"class": f"worker_infer_models:{kind}", **parameters}}
        values |= {"source": "safetensors", "file": "weights.safetensors"}
        spec = ModelSpec(name="m", folder=tmp_path, kind="infer", **values)
        engine = InferEngine(EngineSettings(device="cpu", slots=1, threads=1, models={"m": spec}))
        engine.load()
        return engine

    return make


def payload(outputs: tuple[str, ...] = (), **arrays: Any) -> bytes:
    tensors = [tensor_of(name, array) for name, array in arrays.items()]
    return infer_pb2.InferPayload(inputs=tensors, outputs=outputs).SerializeToString()


def batch_of(payloads: list[bytes], content_type: str = "", **parameters: str) -> Batch:
    items = [Item(i, i, 1, each, 1, b"", 0) for i, each in enumerate(payloads)]
    return Batch("infer", "", parameters, content_type, items)


def answer(recorder: Recorder, lease_id: int) -> dict[str, Any]:
    kind, result, _ = recorder.outcomes[lease_id]
    assert kind == "ok", recorder.outcomes[lease_id]
    return arrays_of(result)


def acquaint(engine: InferEngine, models: Any, *payloads: bytes) -> None:
    """Let the engine find out that the model's outputs have a row for each example, and forget what that took."""
    run(engine, batch_of(list(payloads) or [payload(x=rows(1))]))
    models.SEEN.clear()


def rows(n: int, start: float = 0.0, width: int = 4) -> Any:
    return np.arange(start, start + n * width, dtype=np.float32).reshape(n, width)


def test_tasks_are_joined_and_split_and_cancelled_ones_skipped(make_engine: MakeEngine, models: Any) -> None:
    engine = make_engine()
    acquaint(engine, models)
    sizes = (1, 3, 2)
    recorder = run(engine, batch_of([payload(x=rows(n, 10.0 * n)) for n in sizes]))
    assert models.SEEN == [[6, 4]]
    for i, n in enumerate(sizes):
        found = answer(recorder, i)
        np.testing.assert_array_equal(found["y"], rows(n, 10.0 * n) * [1, 2, 3, 4])
        np.testing.assert_array_equal(found["total"], found["y"].sum(axis=1))
    models.SEEN.clear()
    recorder = run(engine, batch_of([payload(x=rows(1)), payload(x=rows(2))]), Recorder(cancelled_ids={0}))
    assert models.SEEN == [[2, 4]]
    assert set(recorder.outcomes) == {1}


def test_only_equal_signatures_are_joined(make_engine: MakeEngine, models: Any) -> None:
    payloads = [
        payload(x=rows(1)),
        payload(x=rows(1), bias=rows(1)),
        payload(x=rows(1).astype(np.float64)),
        payload(x=rows(1).reshape(1, 1, 4)),
        payload(x=rows(2)),
    ]
    engine = make_engine()
    acquaint(engine, models, *payloads)
    recorder = run(engine, batch_of(payloads))
    assert sorted(models.SEEN) == [[1, 1, 4], [1, 4], [1, 4], [3, 4]]
    np.testing.assert_array_equal(answer(recorder, 1)["y"], rows(1) * [2, 3, 4, 5])
    assert answer(recorder, 3)["y"].shape == (1, 1, 4)
    assert answer(recorder, 4)["y"].shape == (2, 4)


def test_large_task_is_split(make_engine: MakeEngine, models: Any) -> None:
    engine = make_engine(examples_max="4")
    acquaint(engine, models)
    recorder = run(engine, batch_of([payload(x=rows(3)), payload(x=rows(7)), payload(x=rows(1))]))
    assert [shape[0] for shape in models.SEEN] == [4, 4, 3]
    for i, n in enumerate((3, 7, 1)):
        np.testing.assert_array_equal(answer(recorder, i)["y"], rows(n) * [1, 2, 3, 4])


def test_array_without_elements_goes_through_the_model_once(make_engine: MakeEngine, models: Any) -> None:
    engine = make_engine("Scale")
    acquaint(engine, models)
    recorder = run(engine, batch_of([payload(x=np.zeros((7_000, 0, 4), np.float32))]))
    assert answer(recorder, 0)["y"].shape == (7_000, 0, 4)
    assert models.SEEN == [[7_000, 0, 4]]


@pytest.mark.parametrize("shape", [(10**15, 0), (0, 10**15), (2**11, 0, 2**11)])
def test_empty_array_has_bounded_dimensions(make_engine: MakeEngine, models: Any, shape: tuple[int, ...]) -> None:
    tensor = infer_pb2.Tensor(name="x", dtype="float32", shape=shape)
    huge = infer_pb2.InferPayload(inputs=[tensor]).SerializeToString()
    recorder = run(make_engine(), batch_of([huge, payload(x=rows(1))]))
    error_type, message, retryable = recorder.outcomes[0]
    assert (error_type, retryable) == ("BadInput", False)
    assert message.startswith(f"the input 'x' has no elements and the shape {list(shape)}")
    assert "1,048,576" in message
    assert answer(recorder, 1)["y"].shape == (1, 4)


def test_item_that_the_model_cannot_run_or_take_fails_alone_with_a_description(make_engine: MakeEngine) -> None:
    spoilt = rows(5)
    spoilt[4, 2] = 666
    payloads = [payload(x=rows(3)), payload(x=spoilt), payload(x=rows(6, 40.0))]
    recorder = run(make_engine(examples_max="4"), batch_of(payloads))
    assert recorder.outcomes[1] == ("ValueError", "a number that spoils the batch", True)
    for i, expected in ((0, rows(3)), (2, rows(6, 40.0))):
        np.testing.assert_array_equal(answer(recorder, i)["y"], expected * [1, 2, 3, 4])
    bad = [
        (b"\xff", "no multigpu.v1.InferPayload"),
        (payload(y=rows(1)), "no input 'y'"),
        (payload(bias=rows(1)), "the input 'x' is missing"),
        (infer_pb2.InferPayload(inputs=[tensor_of("x", rows(1))] * 2).SerializeToString(), "an input twice"),
        (payload(("z",), x=rows(1)), "no output 'z': it has y, total"),
    ]
    recorder = run(make_engine(), batch_of([payload(x=rows(1)), *(each for each, _ in bad), payload(x=rows(1))]))
    assert answer(recorder, 0)["y"].shape == answer(recorder, len(bad) + 1)["y"].shape == (1, 4)
    for i, (_, message) in enumerate(bad, start=1):
        error_type, said, retryable = recorder.outcomes[i]
        assert (error_type, retryable) == ("BadInput", False)
        assert message in said
    assert "The model takes x: any type; bias: any type, optional" in recorder.outcomes[2][1]


def test_out_of_memory_halves_the_limit_and_then_fails_the_task(make_engine: MakeEngine, models: Any) -> None:
    models.ROOM[0] = 5
    engine = make_engine()
    acquaint(engine, models)
    batch = batch_of([payload(x=rows(2)) for _ in range(8)])
    recorder = run(engine, batch)
    assert [shape[0] for shape in models.SEEN] == [16, 8, 4, 4, 4, 4]
    for i in range(8):
        np.testing.assert_array_equal(answer(recorder, i)["y"], rows(2) * [1, 2, 3, 4])
    models.SEEN.clear()
    run(engine, batch)
    assert [shape[0] for shape in models.SEEN] == [4, 4, 4, 4]
    models.ROOM[0] = 0
    error_type, message, retryable = run(engine, batch_of([payload(x=rows(2))])).outcomes[0]
    assert (error_type, retryable) == ("OutOfMemory", True)
    assert "send fewer or smaller examples" in message


def test_model_without_rows_per_example_gets_single_tasks(make_engine: MakeEngine, models: Any) -> None:
    engine = make_engine("Summed")
    for _ in range(2):
        recorder = run(engine, batch_of([payload(x=rows(2)), payload(x=rows(3, 5.0))]))
        for i, x in enumerate((rows(2), rows(3, 5.0))):
            np.testing.assert_array_equal(answer(recorder, i)["output"], (x * [1, 2, 3, 4]).sum(0, keepdims=True))
    # One row and two find it out: nothing is joined before.
    assert [shape[0] for shape in models.SEEN] == [1, 2, 2, 3, 2, 3]


def test_chosen_outputs_and_scalars(make_engine: MakeEngine) -> None:
    recorder = run(make_engine(), batch_of([payload(("total",), x=rows(1)), payload(x=np.float32(2))]))
    assert set(answer(recorder, 0)) == {"total"}
    # No first dimension: by itself, and the model can't flatten its answer.
    assert recorder.outcomes[1][0] == "IndexError"


def test_json_in_json_out(make_engine: MakeEngine) -> None:
    good = {"inputs": {"x": [[1.5, 2, 3, 4]]}, "outputs": ["y"]}
    bad: list[Any] = [
        [1],
        {"inputs": {"x": [["a"]]}},
        {"inputs": {"x": [[1], [2, 3]]}},
        {"inputs": {"x": [[1]]}, "outputs": "y"},
        {"inputs": {"x": [[1]]}, "more": 1},
    ]
    payloads = [json.dumps(each).encode() for each in (good, *bad)] + [b"{", b"[" * 100_000]
    recorder = run(make_engine(), batch_of(payloads, "application/json"))
    assert recorder.outcomes[0][2] == "application/json"
    assert json.loads(recorder.outcomes[0][1]) == {"outputs": {"y": [[1.5, 4.0, 9.0, 16.0]]}}
    for i in range(1, len(payloads)):
        assert recorder.outcomes[i][0] == "BadInput", recorder.outcomes[i]


def test_tasks_with_parameters_fail(make_engine: MakeEngine) -> None:
    recorder = run(make_engine(), batch_of([payload(x=rows(1))] * 2, precision="fp32"))
    message = "infer has no task parameter 'precision': name the precision in the model's model.toml"
    assert recorder.outcomes == dict.fromkeys((0, 1), ("BadInput", message, False))


def test_facts_describe_the_inputs(make_engine: MakeEngine) -> None:
    facts = make_engine().load()
    assert facts == {
        "engine": "torch",
        "precision": "fp32",
        "inputs": "x: any type; bias: any type, optional",
        "warm-up": "none: the model doesn't say which shapes it takes",
    }
    with pytest.raises(ModelFolderError, match="examples_max of m is '0'"):
        make_engine(examples_max="0")
