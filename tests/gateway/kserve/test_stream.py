"""ModelStreamInfer by Triton's own clients: texts as they come, errors of one request, streams that are closed."""

import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from multigpu import AdminClient, Client, OutcomeState
from tritonclient.grpc import service_pb2

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.kserve.test_infer import COUNTS, MODEL, X, busy_workers, failure, scale_inputs, tensor, texts

SAMPLING = {"max_tokens": 40, "temperature": 0.0}
FINAL = "triton_final_response"


def prompt(text: str = "once") -> list[Any]:
    return [tensor("text_input", texts(text))]


def message(model: str, inputs: list[Any], **parameters: int) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    for each in inputs:
        request.inputs.add().CopyFrom(each._get_tensor())
        request.raw_input_contents.append(each._get_content())
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


def texts_of(response: Any) -> str:
    """The text of a response; empty: it has none."""
    return "".join(raw[4:].decode() for raw in response.raw_output_contents)


class Streamed:
    """A stream, and what it has answered."""

    def __init__(self, gateway: GatewayProcess, headers: dict[str, str]) -> None:
        self.client = triton.InferenceServerClient(gateway.grpc)
        self._answers: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self._answers.put(error or result), headers=headers)

    def next(self) -> Any:
        return self._answers.get(timeout=60)

    def all_of(self, *ids: str) -> dict[str, list[Any]]:
        """The responses of requests by id, up to the last of each."""
        found: dict[str, list[Any]] = {each: [] for each in ids}
        open_ids = set(ids)
        while open_ids:
            response = self.next().get_response()
            found[response.id].append(response)
            if response.parameters[FINAL].bool_param:
                open_ids.remove(response.id)
        return found


@pytest.fixture
def stream(gateway: GatewayProcess) -> Iterator[Streamed]:
    found = Streamed(gateway, {})
    yield found
    found.client.stop_stream()
    assert found._answers.empty()
    found.client.close()


@pytest.fixture(scope="module")
def wanted(fleet: Fleet) -> str:
    with Client(fleet.address) as direct:
        return "".join(direct.generate("once", model="tiny", max_tokens=40))


@pytest.mark.parametrize("empty_final", [True, False])
def test_the_pieces_are_the_text_of_the_sdk(stream: Streamed, wanted: str, *, empty_final: bool) -> None:
    stream.client.async_stream_infer(
        "tiny", prompt(), request_id="r", parameters=SAMPLING, enable_empty_final_response=empty_final
    )
    responses = stream.all_of("r")["r"]
    assert len(responses) > 2, "in pieces"
    assert "".join(map(texts_of, responses)) == wanted
    assert [each.parameters[FINAL].bool_param for each in responses] == [False] * (len(responses) - 1) + [True]
    assert len(responses[-1].outputs) == (0 if empty_final else 1)


def test_the_input_stream_says_whether_a_text_comes_in_pieces(stream: Streamed, client: Any, wanted: str) -> None:
    for pieces in (True, False):
        inputs = [*prompt(), tensor("stream", np.array([pieces]))]
        stream.client.async_stream_infer("tiny", inputs, request_id="r", parameters=SAMPLING)
        responses = stream.all_of("r")["r"]
        assert (len(responses) > 2) == pieces
        assert "".join(map(texts_of, responses)) == (wanted if pieces else "once" + wanted)
    whole = client.infer("tiny", inputs, parameters=SAMPLING).as_numpy("text_output")[0].decode()
    assert whole == "once" + wanted
    inputs = [*prompt(), tensor("stream", np.array([True]))]
    code, text = failure(client, "tiny", inputs)
    assert (code, "use ModelStreamInfer" in text) == ("INVALID_ARGUMENT", True)


def test_requests_run_together(stream: Streamed, wanted: str) -> None:
    stream.client.async_stream_infer("tiny", prompt(), request_id="text", parameters=SAMPLING)
    stream.client.async_stream_infer("scale", scale_inputs(), request_id="numbers")
    stream.client.async_stream_infer(MODEL, [tensor("text", texts("a"))], request_id="vector")
    found = stream.all_of("text", "numbers", "vector")
    assert "".join(map(texts_of, found["text"])) == wanted
    assert [len(found["numbers"]), len(found["vector"])] == [1, 1]
    np.testing.assert_array_equal(triton.InferResult(found["numbers"][0]).as_numpy("y"), X * COUNTS)


def test_more_requests_than_run_at_once(stream: Streamed) -> None:
    ids = [str(number) for number in range(200)]
    for each in ids:
        stream.client.async_stream_infer("scale", scale_inputs(), request_id=each)
    assert all(len(responses) == 1 for responses in stream.all_of(*ids).values())


def test_an_error_ends_its_request_alone(stream: Streamed) -> None:
    for model, inputs, why in (
        ("nobody", scale_inputs(), "there is no model 'nobody'"),
        ("nobody", prompt(), "there is no model 'nobody'"),
        (MODEL, prompt(), f"the model {MODEL} takes text BYTES [-1]"),
        ("scale", [tensor("x", X)], "the input 'counts' is missing"),
        ("tiny", [*prompt(), tensor("exclude_input_in_output", np.array([False]))], "a stream has the new text alone"),
    ):
        stream.client.async_stream_infer(model, inputs)
        assert why in stream.next().message()
    stream.client.async_stream_infer("scale", scale_inputs(), request_id="r")
    assert len(stream.all_of("r")["r"]) == 1


def test_an_undecodable_request_ends_alone(gateway: GatewayProcess) -> None:
    with triton.InferenceServerClient(gateway.grpc) as client:
        call = client._channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = [service_pb2.ModelStreamInferResponse.FromString(each) for each in call(iter([b"\xff", b""]))]
    undecodable, nameless = sorted((each.error_message for each in answers), reverse=True)
    assert undecodable.startswith("the request is no ModelInferRequest: ")
    assert nameless == "model_name is missing"


def test_a_closed_stream_cancels_its_tasks(gateway: GatewayProcess, fleet: Fleet) -> None:
    stream = Streamed(gateway, {"x-multigpu-queue": "closed"})
    stream.client.async_stream_infer("tiny", prompt(), parameters={"max_tokens": 1900})
    stream.client.async_stream_infer("tiny", prompt(), parameters={"max_tokens": 1900})
    until(lambda: busy_workers(fleet), 30)
    assert stream.next().get_response().outputs
    with AdminClient(fleet.address) as admin, Client(fleet.address) as direct:
        tasks = until(lambda: found if len(found := list(admin.list_tasks(queue="closed"))) == 2 else None, 20)
        stream.client.stop_stream(cancel_requests=True)

        def ended() -> list[Any]:
            found = [direct.get(each.task_id).outcome for each in tasks]
            return found if all(found) else []

        outcomes: list[Any] = until(ended, 20)
        assert {each.state for each in outcomes} == {OutcomeState.CANCELLED}
    until(lambda: not busy_workers(fleet), 20)
    stream.client.close()


def test_a_reader_that_pauses_gets_all(client: Any, gateway: GatewayProcess) -> None:
    request = message("tiny", prompt(), max_tokens=400)
    whole = client.infer(
        "tiny", [*prompt(), tensor("exclude_input_in_output", np.array([True]))],
        parameters={"max_tokens": 400, "temperature": 0.0},
    ).as_numpy("text_output")[0]  # fmt: skip
    request.parameters["temperature"].double_param = 0
    answers = client._client_stub.ModelStreamInfer(iter([request]))
    found = texts_of(next(answers).infer_response)
    assert client.is_server_live()
    assert found + "".join(texts_of(each.infer_response) for each in answers) == whole.decode()


async def test_the_asyncio_client(gateway: GatewayProcess, wanted: str) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "tiny", "inputs": prompt(), "parameters": SAMPLING}

    async with triton_aio.InferenceServerClient(gateway.grpc) as client:
        pieces = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            pieces.append(texts_of(result.get_response()))
    assert "".join(pieces) == wanted
    counted = gateway.call("GET", "/metrics")[1]
    assert (
        'mgpu_gateway_requests_total{route="/inference.GRPCInferenceService/ModelStreamInfer",status="OK"}' in counted
    )


@pytest.mark.slow
def test_a_text_goes_on_after_its_worker_died(stream: Streamed, client: Any, fleet: Fleet) -> None:
    sampling = {"max_tokens": 900, "temperature": 0.0}
    without = tensor("exclude_input_in_output", np.array([True]))
    whole = client.infer("tiny", [*prompt(), without], parameters=sampling).as_numpy("text_output")[0].decode()
    stream.client.async_stream_infer("tiny", prompt(), request_id="r", parameters=sampling)
    (busy,) = until(lambda: busy_workers(fleet), 30)
    fleet.workers[busy].kill()
    fleet.start_worker(busy)
    assert "".join(map(texts_of, stream.all_of("r")["r"])) == whole
    fleet.wait_for_workers(*fleet.workers)


def test_the_configuration_says_that_texts_come_in_pieces(client: Any) -> None:
    assert client.get_model_config("tiny").config.model_transaction_policy.decoupled
    assert not client.get_model_config(MODEL).config.model_transaction_policy.decoupled
