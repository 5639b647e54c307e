"""The protocol over HTTP, by Triton's own clients: the answers are those of gRPC; what is wrong is named."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from multigpu import AdminClient, Client, OutcomeState
from tritonclient.utils import InferenceServerException

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.kserve.test_infer import COUNTS, MODEL, X, busy_workers, scale_inputs, tensor, texts

pytest.importorskip("geventhttpclient", reason="the extra `http` of Triton's client is not installed")
pytest.importorskip("aiohttp", reason="the extra `http` of Triton's client is not installed")

import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio

JSON_LENGTH = "Inference-Header-Content-Length"
X_JSON = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": X.tolist()}
COUNTS_JSON = {"name": "counts", "datatype": "INT64", "shape": [2, 1], "data": [2, -1]}


@pytest.fixture(scope="module")
def http(gateway: GatewayProcess) -> Iterator[Any]:
    with triton_http.InferenceServerClient(gateway.address, network_timeout=60) as found:
        yield found


def sent(name: str, array: Any, datatype: str = "", *, binary: bool = True) -> Any:
    """An input for the HTTP client."""
    given = tensor(name, array, datatype)
    found = triton_http.InferInput(name, list(given.shape()), given.datatype())
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def scale(*, x_binary: bool = True, counts_binary: bool = True) -> list[Any]:
    return [sent("x", X, binary=x_binary), sent("counts", COUNTS, binary=counts_binary)]


def failure(call: Any, *args: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **options)
    return str(caught.value.status()), str(caught.value.message())


def test_the_server_and_its_models(http: Any, client: Any) -> None:
    assert http.is_server_live()
    assert http.is_server_ready()
    found = client.get_server_metadata()
    assert http.get_server_metadata() == {
        "name": "multigpu", "version": found.version, "extensions": list(found.extensions)
    }  # fmt: skip
    http.load_model("scale")
    assert http.is_model_ready("scale")
    assert not http.is_model_ready("nobody")
    assert http.get_model_metadata("scale") == client.get_model_metadata("scale", as_json=True) | {
        "versions": [],
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "counts", "datatype": "INT64", "shape": [-1, 1]},
        ],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }
    config = http.get_model_config("scale")
    assert (config["name"], config["max_batch_size"], config["input"][0]["data_type"]) == ("scale", 0, "TYPE_FP32")
    assert config["input"][1]["dims"] == [-1, 1]
    states = {each["name"]: each["state"] for each in http.get_model_repository_index()}
    assert states["scale"] == "READY"
    http.unload_model("scale")
    until(lambda: {e["name"]: e["state"] for e in http.get_model_repository_index()}["scale"] == "UNAVAILABLE", 20)
    assert failure(http.get_model_metadata, "nobody") == ("404", "there is no model 'nobody'")
    assert failure(http.get_model_metadata, "scale", "7") == ("404", "there is no model 'scale:7'")
    assert failure(http.load_model, "nobody")[0] == "404"
    code, text = failure(http.load_model, "scale", config="{}")
    assert (code, "'config' is not served" in text) == ("400", True)
    assert failure(http.get_log_settings)[0] == "404"


def test_statistics_are_those_of_grpc(http: Any, client: Any) -> None:
    http.infer("scale", scale())
    (mine,) = http.get_inference_statistics("scale")["model_stats"]
    (theirs,) = client.get_inference_statistics("scale").model_stats
    assert mine["inference_count"] == theirs.inference_count >= 2
    assert mine["inference_stats"]["success"] == {
        "count": theirs.inference_stats.success.count, "ns": theirs.inference_stats.success.ns
    }  # fmt: skip
    assert "scale" in {each["name"] for each in http.get_inference_statistics()["model_stats"]}


@pytest.mark.parametrize("x_binary", [True, False])
@pytest.mark.parametrize("counts_binary", [True, False])
@pytest.mark.parametrize("y_binary", [True, False, None])
def test_a_models_numbers(http: Any, *, x_binary: bool, counts_binary: bool, y_binary: bool | None) -> None:
    outputs = None if y_binary is None else [triton_http.InferRequestedOutput("y", binary_data=y_binary)]
    inputs = scale(x_binary=x_binary, counts_binary=counts_binary)
    result = http.infer("scale", inputs, outputs=outputs, request_id="r-1")
    np.testing.assert_array_equal(result.as_numpy("y"), X * COUNTS)
    response = result.get_response()
    assert (response["model_name"], response["id"]) == ("scale", "r-1")
    assert ("data" in response["outputs"][0]) == (y_binary is False)


def test_vectors_and_texts_are_those_of_grpc(http: Any, client: Any) -> None:
    given = texts("a cat", "a dog \N{DOG}")
    wanted = client.infer(MODEL, [tensor("text", given)]).as_numpy("embedding")
    for binary in (True, False):
        found = http.infer(MODEL, [sent("text", given, binary=binary)]).as_numpy("embedding")
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    sampling = {"max_tokens": 8, "temperature": 0.0}
    prompt = texts("once \N{DOG}")
    text = client.infer("tiny", [tensor("text_input", prompt)], parameters=sampling).as_numpy("text_output")
    outputs = [triton_http.InferRequestedOutput("text_output", binary_data=False)]
    for asked in (None, outputs):
        result = http.infer("tiny", [sent("text_input", prompt)], parameters=sampling, outputs=asked)
        value = result.as_numpy("text_output")[0]
        assert (value.decode() if isinstance(value, bytes) else value) == text[0].decode()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "missing required field `inputs`"),
        ({"inputs": []}, "the request has no inputs"),
        ({"inputs": [X_JSON]}, "the input 'counts' is missing"),
        ({"inputs": [X_JSON, X_JSON]}, "it is there twice"),
        ({"inputs": [X_JSON | {"data": [1, 2]}]}, "it has 2 elements, and the shape [2, 3]"),
        ({"inputs": [X_JSON | {"data": [[1, 2, 3], 4]}]}, "nested deeper than others"),
        ({"inputs": [X_JSON | {"data": [[[1], 2, 3], [4, 5, 6]]}]}, "that is no FP32"),
        ({"inputs": [X_JSON | {"data": ["a"] * 6}]}, "that is no FP32"),
        ({"inputs": [COUNTS_JSON | {"data": [1.5, 2]}]}, "that is no INT64"),
        ({"inputs": [COUNTS_JSON | {"datatype": "UINT8", "data": [1, 256]}]}, "numbers that UINT8 can't hold"),
        ({"inputs": [X_JSON | {"datatype": "FP16"}]}, "FP16 is to be sent as bytes"),
        ({"inputs": [X_JSON | {"datatype": "FP8"}]}, "no type 'FP8'"),
        ({"inputs": [X_JSON | {"shape": [-2, 3]}]}, "and the shape [-2, 3]"),
        ({"inputs": [X_JSON | {"shape": [1 << 70]}]}, ""),
        ({"inputs": [X_JSON | {"shape": [(1 << 63) - 1] * 20_000}]}, "it has 20,000 dimensions: at most 64"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3]}]}, "neither data nor binary_data_size"),
        ({"inputs": [X_JSON | {"parameters": {"binary_data_size": 4}}]}, "binary_data_size is 4, and 0 bytes are left"),
        ({"inputs": [X_JSON | {"parameters": {"shared_memory_region": "s"}}]}, "'shared_memory_region' is not served"),
        ({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [1]}]}, "its data are to be texts"),
        ({"inputs": [X_JSON, COUNTS_JSON], "outputs": [{"name": "w"}]}, "the model has no output 'w'"),
        ({"inputs": [X_JSON, COUNTS_JSON], "parameters": {"priority": 6}}, "priority is 6"),
        ({"inputs": [X_JSON, COUNTS_JSON], "parameters": {"timeout": 1 << 70}}, ""),
        (b"{", "not valid JSON"),
    ],
)
def test_a_wrong_request_is_named(gateway: GatewayProcess, body: Any, why: str) -> None:
    response, found = gateway.call("POST", "/v2/models/scale/infer", body)
    assert (response.status, list(found), why in found["error"]) == (400, ["error"], True), found


@pytest.mark.parametrize(
    ("length", "sizes", "why"),
    [
        (None, [24, 16], "is 24, and 0 bytes are left"),
        ("x", [24, 16], "make it the size of the JSON"),
        ("9999", [24, 16], "make it the size of the JSON"),
        ("9" * 5000, [24, 16], "make it the size of the JSON"),
        ("", [24, 17], "is 17, and 16 bytes are left"),
        ("", [24, -1], "is -1, and 16 bytes are left"),
        ("", [24, True], "is True, and 16 bytes are left"),
        ("", [24, 8], "8 bytes are of no input"),
        ("", [16, 24], "FP32 [2, 3] takes 24 bytes, and 16 came"),
    ],
)
def test_bytes_that_do_not_fit_are_named(
    gateway: GatewayProcess, length: str | None, sizes: list[Any], why: str
) -> None:
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
        for (name, datatype, shape), size in zip(
            [("x", "FP32", [2, 3]), ("counts", "INT64", [2, 1])], sizes, strict=True
        )
    ]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {} if length is None else {JSON_LENGTH: length or str(len(head))}
    tail = b"" if length is None else X.tobytes() + COUNTS.tobytes()
    response, found = gateway.call("POST", "/v2/models/scale/infer", head + tail, headers)
    assert (response.status, why in found["error"]) == (400, True), found


def test_other_errors_have_tritons_form(gateway: GatewayProcess, http: Any) -> None:
    assert failure(http.infer, "nobody", scale()) == ("404", "there is no model 'nobody'")
    http.infer("scale", scale())  # the inputs of a model are known once a worker has loaded it
    code, text = failure(http.infer, "scale", scale(), request_compression_algorithm="gzip")
    assert (code, text) == ("415", "the body is compressed: send it as it is")
    code, text = failure(http.infer, "scale", [sent("text", texts("a"))])
    assert (code, text) == ("400", "the model scale takes x FP32 [-1, 3], counts INT64 [-1, 1]")
    code, _ = failure(http.infer, "tiny", [sent("text_input", texts("a"))], parameters={"max_tokens": 1900}, timeout=9)
    assert code == "504"
    for method, path, status in (
        ("GET", "/v2/models/scale/infer", 405),
        ("POST", "/v2/models/scale", 405),
        ("GET", "/v2/models", 404),
        ("POST", "/v2/repository/models/scale", 404),
        ("POST", "/v2/health/live", 405),
    ):
        response, found = gateway.call(method, path, b"" if method == "POST" else None)
        assert (response.status, list(found)) == (status, ["error"]), path


def test_numbers_that_json_cannot_hold_are_not_written(http: Any) -> None:
    inputs = [sent("x", np.full((1, 3), np.inf, np.float32)), sent("counts", np.array([[1]]))]
    outputs = [triton_http.InferRequestedOutput("y", binary_data=False)]
    code, text = failure(http.infer, "scale", inputs, outputs=outputs)
    assert (code, "not finite" in text) == ("400", True)
    assert np.isinf(http.infer("scale", inputs).as_numpy("y")).all()


def test_a_hang_up_cancels_the_task(gateway: GatewayProcess, fleet: Fleet) -> None:
    body = {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["once"]}],
        "parameters": {"max_tokens": 1900},
    }
    with AdminClient(fleet.address) as admin, Client(fleet.address) as direct:
        admin.pause_queue("http-left")
        connection = gateway.connect()
        headers = {"x-multigpu-queue": "http-left"}
        connection.request("POST", "/v2/models/tiny/infer", json.dumps(body).encode(), headers)
        (task,) = until(lambda: list(admin.list_tasks(queue="http-left")), 30)
        connection.close()
        assert until(lambda: direct.get(task.task_id).outcome, 20).state is OutcomeState.CANCELLED


@pytest.mark.slow
def test_a_request_goes_on_after_its_worker_died(http: Any, fleet: Fleet) -> None:
    inputs = [sent("text_input", texts("once"))]
    sampling = {"max_tokens": 900, "temperature": 0.0}
    whole = http.infer("tiny", inputs, parameters=sampling).as_numpy("text_output")[0]
    answered: list[Any] = []

    def ask() -> None:
        with triton_http.InferenceServerClient(http_address, network_timeout=60) as own:
            answered.append(own.infer("tiny", inputs, parameters=sampling).as_numpy("text_output")[0])

    http_address = http._parsed_url.netloc
    thread = threading.Thread(target=ask)
    thread.start()
    (busy,) = until(lambda: busy_workers(fleet), 30)
    fleet.workers[busy].kill()
    fleet.start_worker(busy)
    thread.join(60)
    assert answered == [whole]
    fleet.wait_for_workers(*fleet.workers)


async def test_the_asyncio_client(gateway: GatewayProcess) -> None:
    async with triton_http_aio.InferenceServerClient(gateway.address) as client:
        assert await client.is_server_ready()
        assert (await client.get_server_metadata())["name"] == "multigpu"
        result = await client.infer("scale", scale())
        np.testing.assert_array_equal(result.as_numpy("y"), X * COUNTS)
    counted = gateway.call("GET", "/metrics")[1]
    assert 'mgpu_gateway_requests_total{route="/v2/models",status="200"}' in counted


def test_grpc_and_http_give_the_same_bytes(http: Any, client: Any) -> None:
    over_grpc = client.infer("scale", scale_inputs()).as_numpy("y")
    assert http.infer("scale", scale()).as_numpy("y").tobytes() == over_grpc.tobytes()
