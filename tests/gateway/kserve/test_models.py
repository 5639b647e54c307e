"""What Triton's client asks about servers and models."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.kserve.test_infer import COUNTS, MODEL, X, scale_inputs, tensor, texts


def rejected(call: Any, *args: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **options)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def state_of(client: Any, name: str) -> str:
    states: dict[str, str] = {each.name: each.state for each in client.get_model_repository_index().models}
    return states[name]


def test_the_server(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    found = client.get_server_metadata()
    assert found.name == "multigpu"
    assert "model_repository" in found.extensions
    assert rejected(client.get_trace_settings)[0] == "UNIMPLEMENTED"
    assert rejected(client.get_system_shared_memory_status)[0] == "UNIMPLEMENTED"


def test_a_model_is_loaded_described_and_unloaded(client: Any) -> None:
    assert client.is_model_ready("scale")
    code, text = rejected(client.load_model, "scale", config="{}")
    assert (code, "'config' is not served" in text) == ("INVALID_ARGUMENT", True)
    code, text = rejected(client.load_model, "scale", config="{}", files={"file:1/model.onnx": b"x"})
    assert code == "INVALID_ARGUMENT"
    assert rejected(client.load_model, "nobody")[0] == "NOT_FOUND"
    client.load_model("scale")
    assert state_of(client, "scale") == "READY"
    found = client.get_model_metadata("scale")
    assert (found.name, found.platform, list(found.versions)) == ("scale", "onnx", [])
    inputs = [(each.name, each.datatype, list(each.shape)) for each in found.inputs]
    assert inputs == [("x", "FP32", [-1, 3]), ("counts", "INT64", [-1, 1])]
    assert [(each.name, each.datatype) for each in found.outputs] == [("y", "FP32")]
    config = client.get_model_config("scale").config
    assert (config.name, config.max_batch_size, config.input[0].data_type) == ("scale", 0, 11)
    assert list(config.input[1].dims) == [-1, 1]
    client.unload_model("scale")
    until(lambda: state_of(client, "scale") == "UNAVAILABLE", 20)
    assert rejected(client.unload_model, "nobody")[0] == "NOT_FOUND"


def test_models_of_texts_are_described(client: Any) -> None:
    found = client.get_model_metadata(MODEL)
    assert [(each.name, each.datatype, list(each.shape)) for each in found.inputs] == [("text", "BYTES", [-1])]
    assert [(each.name, each.datatype, list(each.shape)) for each in found.outputs] == [("embedding", "FP32", [-1, -1])]
    found = client.get_model_config("tiny").config
    assert [(each.name, each.optional) for each in found.input][:2] == [
        ("text_input", False),
        ("sampling_parameters", True),
    ]
    assert rejected(client.get_model_metadata, "nobody") == ("NOT_FOUND", "there is no model 'nobody'")
    assert rejected(client.is_model_ready, "nobody")[0] == "NOT_FOUND"


@pytest.mark.slow
def test_the_tensors_of_a_model_that_was_never_loaded_are_unknown(scale: Any, tmp_path: Any) -> None:
    flags = ["--models", f"other={scale}", "--artifacts-dir", str(tmp_path / "artifacts")]
    with (
        Fleet(tmp_path / "fleet", workers=1, worker_flags=flags) as fleet,
        GatewayProcess(tmp_path, fleet.address) as gateway,
        triton.InferenceServerClient(gateway.grpc) as client,
    ):
        code, text = rejected(client.get_model_metadata, "other")
        assert (code, "load it first (RepositoryModelLoad)" in text) == ("UNAVAILABLE", True)
        client.load_model("other")
        assert client.get_model_metadata("other").inputs
        (worker,) = fleet.workers
        until(lambda: list(tmp_path.glob("artifacts/models.measured/*.json")), 20)
        fleet.workers[worker].kill()
        client.unload_model("other")
        fleet.start_worker(worker)
        fleet.wait_for_workers(worker)
        assert state_of(client, "other") == "UNAVAILABLE"
        assert client.get_model_metadata("other").inputs, "kept over the worker's restart"
        fleet.master.kill()
        until(lambda: not client.is_server_ready(), 20)
        assert client.is_server_live()


def test_statistics_are_metrics_too(client: Any, gateway: GatewayProcess) -> None:
    client.infer("scale", scale_inputs())
    found = client.get_inference_statistics("scale").model_stats[0]
    lines = dict(line.rsplit(" ", 1) for line in gateway.call("GET", "/metrics")[1].splitlines())
    labels = '{model="scale",version=""}'
    for name, value in (
        ("request_success", found.inference_stats.success.count),
        ("request_failure", found.inference_stats.fail.count),
        ("count", found.inference_count),
        ("exec_count", found.execution_count),
        ("request_duration_us", found.inference_stats.success.ns // 1000),
        ("queue_duration_us", found.inference_stats.queue.ns // 1000),
        ("compute_infer_duration_us", found.inference_stats.compute_infer.ns // 1000),
    ):
        assert float(lines[f"nv_inference_{name}{labels}"]) == value


def test_statistics_count_requests_and_examples(client: Any) -> None:
    def counted() -> Any:
        return client.get_inference_statistics("scale").model_stats[0]

    before = counted()
    client.infer("scale", scale_inputs())
    client.infer("scale", scale_inputs())
    with pytest.raises(InferenceServerException):
        client.infer("scale", [tensor("x", X)])
    after = counted()
    assert after.inference_count - before.inference_count == 4
    assert after.execution_count - before.execution_count == 2
    stats, earlier = after.inference_stats, before.inference_stats
    assert (stats.success.count - earlier.success.count, stats.fail.count - earlier.fail.count) == (2, 1)
    assert stats.queue.count == stats.compute_infer.count == stats.success.count
    assert stats.compute_input.count == stats.compute_output.count == stats.success.count
    assert after.version == "1"
    assert stats.success.ns > stats.queue.ns + stats.compute_infer.ns - earlier.queue.ns - earlier.compute_infer.ns > 0
    assert after.last_inference > 1_700_000_000_000
    names = {each.name for each in client.get_inference_statistics().model_stats}
    assert {"scale", "tiny", MODEL} <= names
    assert rejected(client.get_inference_statistics, "nobody")[0] == "NOT_FOUND"


async def test_the_asyncio_client(gateway: GatewayProcess) -> None:
    async with triton_aio.InferenceServerClient(gateway.grpc) as client:
        assert await client.is_server_ready()
        answers = await asyncio.gather(*(client.infer("scale", scale_inputs()) for _ in range(20)))
        for answer in answers:
            np.testing.assert_array_equal(answer.as_numpy("y"), X * COUNTS)
        vectors = await client.infer(MODEL, [tensor("text", texts("a"))])
        assert vectors.as_numpy("embedding").shape == (1, 384)
    counted = gateway.call("GET", "/metrics")[1]
    assert 'mgpu_gateway_requests_total{route="/inference.GRPCInferenceService/ModelInfer",status="OK"}' in counted
