"""client.infer: arrays there and back, bit for bit, and what is rejected before anything is sent."""

from pathlib import Path
from typing import Any

import multigpu
import numpy as np
import pytest
from multigpu._kinds.inference import DTYPES, array_of, tensor_of
from multigpu.v1 import infer_pb2, task_pb2

from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task


def twice(spec: Spec, task: Task) -> Reply:
    """A model that doubles its inputs, under the names asked for; it wants an input x."""
    payload = infer_pb2.InferPayload.FromString(task.payload)
    arrays = {tensor.name: array_of(tensor) for tensor in payload.inputs}
    if "x" not in arrays:
        error = task_pb2.TaskError(type="BadInput", message=f"there is no input x among {', '.join(arrays)}")
        return task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_FAILED, error=error)
    outputs = [tensor_of(f"{name}2", array * 2) for name, array in arrays.items()]
    wanted = [tensor for tensor in outputs if not payload.outputs or tensor.name in payload.outputs]
    result = infer_pb2.InferResult(outputs=wanted).SerializeToString()
    return task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=result)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"bfloat16"}))
def test_every_type_comes_back_bit_for_bit(dtype: str) -> None:
    values = np.random.default_rng(7).integers(0, 100, (3, 4, 2)).astype(dtype)
    for array in (values, np.asfortranarray(values), values[::-2, 1:], values.astype(values.dtype.newbyteorder(">"))):
        back = array_of(tensor_of("x", array))
        assert (back.shape, back.dtype.name) == (array.shape, dtype)
        np.testing.assert_array_equal(back, array)


def test_empty_and_scalar_arrays_keep_their_shape() -> None:
    assert array_of(tensor_of("x", np.empty((0, 5), np.int64))).shape == (0, 5)
    scalar = array_of(tensor_of("x", np.float32(2.5)))
    assert (scalar.shape, float(scalar)) == ((), 2.5)
    assert array_of(tensor_of("x", [[1, 2], [3, 4]])).tolist() == [[1, 2], [3, 4]]


def test_bfloat16_becomes_the_float32_of_the_same_value() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -0.0, 3e38, np.inf, np.nan], ml_dtypes.bfloat16)
    tensor = tensor_of("x", array)
    assert (tensor.dtype, len(tensor.data)) == ("bfloat16", 10)
    np.testing.assert_array_equal(array_of(tensor), array.astype(np.float32))


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([object()]), np.array(["2020"], "M8[Y]")])
def test_arrays_of_unsupported_types_are_not_sent(array: Any) -> None:
    with pytest.raises(ValueError, match=r"tensor 'x' has elements of type .*make them one of bool"):
        tensor_of("x", array)


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "text"),
    [
        ("float32", [2], bytes(4), "shape \\[2\\] and 4 bytes"),
        ("float32", [-1, -1], bytes(4), "shape"),
        ("float33", [1], bytes(4), "float33"),
        ("int8", [2**40, 2**40], b"", "shape"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_an_error(dtype: str, shape: list[int], data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        array_of(infer_pb2.Tensor(name="x", dtype=dtype, shape=shape, data=data))


async def test_infer_returns_arrays_by_name() -> None:
    async with ScriptedMaster(twice) as master, multigpu.AsyncClient(master.address) as client:
        x, y = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([1, 2, 3])
        found = await client.infer({"x": x, "y": y}, model="doubler", priority=2, request_id="mine")
        np.testing.assert_array_equal(found["x2"], 2 * x)
        np.testing.assert_array_equal(found["y2"], 2 * y)
        assert list(await client.infer({"x": x, "y": y}, model="doubler", outputs=["y2"])) == ["y2"]
        spec, task = master.specs[0], master.inputs[0]
        assert (spec.kind, spec.model, spec.priority) == ("infer", "doubler", 2)
        assert (task.units, task.request_id) == (3, "mine")
        with pytest.raises(multigpu.TaskFailed, match="no input x among z"):
            await client.infer({"z": x}, model="doubler")


async def test_infer_map_keeps_the_order_and_returns_errors_in_place() -> None:
    async with ScriptedMaster(twice) as master, multigpu.AsyncClient(master.address) as client:
        inputs: list[dict[str, Any]] = [{"x": np.full((1, 2), i)} for i in range(50)]
        found = [arrays["x2"][0, 0] async for arrays in client.infer_map(inputs, model="doubler")]
        assert found == [2 * i for i in range(50)]
        inputs[20] = {"z": [1]}
        mixed: list[Any] = [item async for item in client.infer_map(inputs, model="doubler", return_exceptions=True)]
        assert [i for i, item in enumerate(mixed) if isinstance(item, multigpu.TaskFailed)] == [20]
        assert mixed[21]["x2"].tolist() == [[42, 42]]


async def test_wrong_inputs_of_infer_are_not_sent() -> None:
    async with ScriptedMaster(twice) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(multigpu.InvalidTaskError, match="at least one input"):
            await client.infer({}, model="m")
        with pytest.raises(multigpu.InvalidTaskError, match="complex128"):
            await client.infer({"x": [1j]}, model="m")
        with pytest.raises(multigpu.InvalidTaskError, match=r"'x' has 2,147,483,648 bytes, .*split it"):
            await client.infer({"x": np.broadcast_to(np.float32(0), (1 << 29,))}, model="m")
        with pytest.raises(multigpu.InvalidTaskError, match="'x' is no array"):
            await client.infer({"x": [[1, 2], [3]]}, model="m")
        with pytest.raises(TypeError, match="dict of arrays"):
            await client.infer(np.zeros(3), model="m")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"pass \[name\]"):
            await client.infer({"x": [1]}, model="m", outputs="x2")
        assert master.inputs == []


async def test_an_unreadable_result_is_a_transport_error() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        return task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=b"\xff\xff")

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(multigpu.TransportError, match="infer"):
            await client.infer({"x": [1]}, model="m")
        with pytest.raises(multigpu.TransportError, match="classify"):
            await client.classify("text", model="m")


async def test_classify_takes_pictures_paths_and_texts(tmp_path: Path) -> None:
    from multigpu.v1 import classify_pb2

    def classify(spec: Spec, task: Task) -> Reply:
        payload = classify_pb2.ClassifyPayload.FromString(task.payload)
        label = payload.text if payload.WhichOneof("input") == "text" else f"picture of {len(payload.image)}"
        classes = [classify_pb2.ClassScore(index=i, label=label, score=1 / (i + 2)) for i in range(payload.top_k)]
        result = classify_pb2.ClassifyResult(classes=classes).SerializeToString()
        return task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=result)

    picture = tmp_path / "picture.png"
    picture.write_bytes(b"12345")
    async with ScriptedMaster(classify) as master, multigpu.AsyncClient(master.address) as client:
        found = await client.classify(b"123", model="m")
        assert [label.index for label in found] == [0, 1, 2, 3, 4]
        assert (found[0].label, found[0].score) == ("picture of 3", 0.5)
        many = [labels[0].label async for labels in client.classify_map([picture, "good", b"1"], model="m", top_k=1)]
        assert many == ["picture of 5", "good", "picture of 1"]
        with pytest.raises(FileNotFoundError):
            await client.classify(tmp_path / "none.png", model="m")
        with pytest.raises(multigpu.InvalidTaskError, match="no bytes"):
            await client.classify(b"", model="m")
        with pytest.raises(ValueError, match="top_k is 0"):
            await client.classify(b"1", model="m", top_k=0)
        with pytest.raises(TypeError, match="bytes, a path or a str"):
            await client.classify(3, model="m")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"\[one\]"):
            [labels async for labels in client.classify_map("text", model="m")]
