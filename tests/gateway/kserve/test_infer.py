"""ModelInfer by Triton's own client: numbers, vectors and texts are those of the models; what is wrong is named."""

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from multigpu import AdminClient, Client, OutcomeState
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess

MODEL = "all-MiniLM-L6-v2"
X = np.arange(6, dtype=np.float32).reshape(2, 3)
COUNTS = np.array([[2], [-1]])


def tensor(name: str, array: Any, datatype: str = "") -> Any:
    found = triton.InferInput(name, list(array.shape), datatype or np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array)
    return found


def texts(*values: str) -> Any:
    return np.array([value.encode() for value in values], dtype=object)


def scale_inputs() -> list[Any]:
    return [tensor("x", X), tensor("counts", COUNTS)]


def busy_workers(fleet: Fleet) -> list[str]:
    """The workers that run something."""
    return [worker.worker_id for worker in fleet.list_workers() if worker.leases]


def failure(client: Any, *args: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(*args, **options)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_a_models_numbers(client: Any) -> None:
    result = client.infer("scale", scale_inputs(), request_id="r-1")
    np.testing.assert_array_equal(result.as_numpy("y"), X * COUNTS)
    response = result.get_response()
    assert (response.model_name, response.id, [each.datatype for each in response.outputs]) == (
        "scale",
        "r-1",
        ["FP32"],
    )
    asked = client.infer("scale", scale_inputs(), outputs=[triton.InferRequestedOutput("y")])
    np.testing.assert_array_equal(asked.as_numpy("y"), X * COUNTS)


def test_typed_contents_give_the_same(client: Any) -> None:
    request = service_pb2.ModelInferRequest(model_name="scale")
    x = request.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    x.contents.fp32_contents.extend(X.ravel().tolist())
    counts = request.inputs.add(name="counts", datatype="INT64", shape=[2, 1])
    counts.contents.int64_contents.extend([2, -1])
    response = client._client_stub.ModelInfer(request)
    np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0], "<f4"), (X * COUNTS).ravel())


def test_vectors_are_those_of_the_sdk(client: Any, fleet: Fleet) -> None:
    given = ["a cat", "", "a dog \N{DOG}"]
    result = client.infer(MODEL, [tensor("text", texts(*given))])
    with Client(fleet.address) as direct:
        np.testing.assert_allclose(result.as_numpy("embedding"), direct.embed(given), atol=1e-6)


def test_texts_are_those_of_the_sdk(client: Any, fleet: Fleet) -> None:
    with Client(fleet.address) as direct:
        wanted = "".join(direct.generate("once", model="tiny", max_tokens=8))
    prompt = tensor("text_input", texts("once"))
    sampling = tensor("sampling_parameters", texts(json.dumps({"max_tokens": "8", "temperature": 0})))
    result = client.infer("tiny", [prompt, sampling])
    assert result.as_numpy("text_output")[0].decode() == "once" + wanted
    without = tensor("exclude_input_in_output", np.array([True]))
    result = client.infer("tiny", [prompt, without], parameters={"max_tokens": 8, "temperature": 0.0})
    assert result.as_numpy("text_output")[0].decode() == wanted


def test_wrong_inputs_are_named(client: Any) -> None:
    for why, inputs in {
        "the input 'counts' is missing": [tensor("x", X)],
        "the model has no input 'z'": [*scale_inputs(), tensor("z", X)],
        "the input 'x' has type float64 and shape [2, 3]": [tensor("x", X.astype(float)), tensor("counts", COUNTS)],
        "the input 'x' has type float32 and shape [2, 2]": [tensor("x", X[:, :2]), tensor("counts", COUNTS)],
        "the model scale takes x FP32 [-1, 3], counts INT64 [-1, 1]": [tensor("text", texts("a"))],
        "the tensor 'other': the model has no such input": [tensor("other", texts("a"))],
    }.items():
        code, text = failure(client, "scale", inputs)
        assert (code, why in text) == ("INVALID_ARGUMENT", True), text
    code, text = failure(client, MODEL, [tensor("x", X)])
    assert (code, text) == ("INVALID_ARGUMENT", f"the model {MODEL} takes text BYTES [-1]")
    sampling = tensor("sampling_parameters", texts("{}"))
    assert failure(client, "tiny", [sampling]) == ("INVALID_ARGUMENT", "the tensor 'text_input': it is missing")
    code, text = failure(client, MODEL, [tensor("text", np.array([[b"a"]], dtype=object))])
    assert (code, "it is BYTES [1, 1], and the model takes BYTES [-1]" in text) == ("INVALID_ARGUMENT", True)
    code, text = failure(client, "scale", scale_inputs(), outputs=[triton.InferRequestedOutput("w")])
    assert (code, "the model has no output 'w'" in text) == ("INVALID_ARGUMENT", True)
    code, text = failure(client, MODEL, [tensor("text", texts("a"))], outputs=[triton.InferRequestedOutput("w")])
    assert (code, text) == ("INVALID_ARGUMENT", "the tensor 'w': the model has no such output: it gives embedding")
    asked = triton.InferRequestedOutput("y", class_count=2)
    code, text = failure(client, "scale", scale_inputs(), outputs=[asked])
    assert (code, "the parameter 'classification' is not served" in text) == ("INVALID_ARGUMENT", True)
    assert failure(client, "nobody", scale_inputs()) == ("NOT_FOUND", "there is no model 'nobody'")
    assert failure(client, "scale", scale_inputs(), model_version="7") == ("NOT_FOUND", "there is no model 'scale:7'")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r.raw_input_contents.pop(), "there are 2 inputs and 1 raw_input_contents"),
        (lambda r: r.raw_input_contents.__setitem__(0, b"1234"), "FP32 [2, 3] takes 24 bytes, and 4 came"),
        (lambda r: r.inputs[0].shape.__setitem__(0, -2), "[-2, 3] is no shape"),
        (lambda r: r.inputs[0].contents.fp32_contents.append(1), "send either"),
        (lambda r: setattr(r.inputs[0], "datatype", "FP8"), "no type 'FP8'"),
        (lambda r: setattr(r.inputs[1], "name", "x"), "it is there twice"),
        (lambda r: r.ClearField("raw_input_contents"), "it has 0 elements, and the shape [2, 3]"),
        (lambda r: r.inputs[0].parameters["shared_memory_region"].__setattr__("string_param", "s"), "is not served"),
        (lambda r: r.parameters["sequence_id"].__setattr__("int64_param", 1), "'sequence_id' is not served"),
        (lambda r: r.parameters["priority"].__setattr__("uint64_param", 6), "priority is 6"),
        (lambda r: r.parameters["timeout"].__setattr__("string_param", "1"), "timeout is '1'"),
        (lambda r: r.ClearField("inputs"), "there are 0 inputs and 2 raw_input_contents"),
        (lambda r: r.ClearField("model_name"), "model_name is missing"),
        (lambda r: r.inputs[0].shape.extend([1] * 63), "it has 65 dimensions: at most 64"),
    ],
)
def test_a_request_that_contradicts_itself_is_rejected(client: Any, change: Any, why: str) -> None:
    request = service_pb2.ModelInferRequest(model_name="scale")
    for each in scale_inputs():
        request.inputs.add().CopyFrom(each._get_tensor())
        request.raw_input_contents.append(each._get_content())
    change(request)
    with pytest.raises(Exception, match="INVALID_ARGUMENT") as caught:
        client._client_stub.ModelInfer(request)
    error: Any = caught.value
    assert why in error.details()


@pytest.mark.parametrize(
    ("raw", "shape", "why"),
    [
        (b"\x05\0\0\0abc", 1, "its bytes end within an element"),
        (b"\x05\0", 1, "its bytes end within an element"),
        (b"\x01\0\0\0a", 2, "it has 1 elements, and the shape [2]"),
        (b"\x01\0\0\0\xff", 1, "it is no UTF-8"),
        (b"", 0, "it has 0 texts"),
    ],
)
def test_texts_that_are_none_are_rejected(client: Any, raw: bytes, shape: int, why: str) -> None:
    request = service_pb2.ModelInferRequest(model_name=MODEL, raw_input_contents=[raw])
    request.inputs.add(name="text", datatype="BYTES", shape=[shape])
    with pytest.raises(Exception, match="INVALID_ARGUMENT") as caught:
        client._client_stub.ModelInfer(request)
    error: Any = caught.value
    assert why in error.details()


def test_wrong_sampling_is_named(client: Any) -> None:
    prompt = tensor("text_input", texts("once"))
    for given, why in (
        ("{", "it is no JSON"),
        ("[]", "is to be a JSON object"),
        ('{"best": 1}', "'best' is not served"),
        ('{"max_tokens": "many"}', "max_tokens"),
        ('{"max_tokens": 0}', "max_tokens: 0 is too small"),
    ):
        code, text = failure(client, "tiny", [prompt, tensor("sampling_parameters", texts(given))])
        assert (code, why in text) == ("INVALID_ARGUMENT", True), text


def test_a_call_that_is_cancelled_cancels_its_task(client: Any, fleet: Fleet) -> None:
    answered: list[Any] = []
    inputs = [tensor("text_input", texts("once"))]
    with AdminClient(fleet.address) as admin, Client(fleet.address) as direct:
        admin.pause_queue("left")
        call = client.async_infer(
            "tiny", inputs, callback=lambda result, error: answered.append(error), headers={"x-multigpu-queue": "left"}
        )
        (task,) = until(lambda: list(admin.list_tasks(queue="left")), 30)
        call.cancel()
        (error,) = until(lambda: answered, 20)
        assert error.status() == "StatusCode.CANCELLED"
        assert until(lambda: direct.get(task.task_id).outcome, 20).state is OutcomeState.CANCELLED


def test_a_call_that_is_cancelled_frees_its_worker(client: Any, fleet: Fleet) -> None:
    inputs = [tensor("text_input", texts("once"))]
    with AdminClient(fleet.address) as admin, Client(fleet.address) as direct:
        call = client.async_infer(
            "tiny", inputs, callback=lambda result, error: None, parameters={"max_tokens": 1900},
            headers={"x-multigpu-queue": "freed"},
        )  # fmt: skip
        until(lambda: busy_workers(fleet), 30)
        (task,) = admin.list_tasks(queue="freed")
        call.cancel()
        assert until(lambda: direct.get(task.task_id).outcome, 20).state is OutcomeState.CANCELLED
        until(lambda: not busy_workers(fleet), 20)


def test_a_deadline_ends_the_call(client: Any) -> None:
    inputs = [tensor("text_input", texts("once"))]
    sampling = {"max_tokens": 1900}
    code, _ = failure(client, "tiny", inputs, parameters=sampling, client_timeout=0.5)
    assert code == "DEADLINE_EXCEEDED"
    code, text = failure(client, "tiny", inputs, parameters=sampling, timeout=500_000)
    assert code == "DEADLINE_EXCEEDED", text


@pytest.mark.slow
def test_a_call_goes_on_after_its_worker_died(client: Any, fleet: Fleet, gateway: GatewayProcess) -> None:
    inputs = [tensor("text_input", texts("once"))]
    sampling = {"max_tokens": 900, "temperature": 0.0}
    whole = client.infer("tiny", inputs, parameters=sampling).as_numpy("text_output")[0]
    answered: list[Any] = []
    client.async_infer(
        "tiny", inputs, callback=lambda result, error: answered.append(error or result), parameters=sampling
    )
    (busy,) = until(lambda: busy_workers(fleet), 30)
    fleet.workers[busy].kill()
    fleet.start_worker(busy)
    (result,) = until(lambda: answered, 60)
    assert result.as_numpy("text_output")[0] == whole
    fleet.wait_for_workers(*fleet.workers)


def test_a_full_queue_is_resource_exhausted(client: Any, fleet: Fleet) -> None:
    with AdminClient(fleet.address) as admin, Client(fleet.address) as direct:
        admin.pause_queue("small")
        admin.set_queue_limits("small", tasks_max=1)
        handle = direct.submit("echo", b"", queue="small")
        code, text = failure(client, "scale", scale_inputs(), headers={"x-multigpu-queue": "small"})
        assert (code, "holds its limit of 1 tasks" in text) == ("RESOURCE_EXHAUSTED", True)
        handle.cancel()
