"""Tokens of callers of the API of text-embeddings-inference."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from multigpu_gateway.tei import tei_pb2 as pb

from tests.gateway.conftest import GatewayProcess
from tests.gateway.tei.test_tei_grpc import failure, metadata, method
from tests.security.secured import SecuredFleet

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredFleet]:
    with SecuredFleet(tmp_path_factory.mktemp("secured")) as it:
        yield it


@pytest.fixture(scope="module")
def gateway(secured: SecuredFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), secured.fleet.address) as running:
        yield running


def call(gateway: GatewayProcess, method: str, path: str, token: str = "", body: Any = None) -> tuple[int, Any]:
    response, found = gateway.call(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
    return response.status, found


def test_the_masters_answer_has_teis_form(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    _, reader = secured.create("tei-reader", "read")
    for path in ("/embed", "/tei/m", "/tei/m/embed"):
        status, body = call(gateway, "POST", path, body={"inputs": "x"})
        assert (status, body["error_type"]) == (401, "Validation")
    status, body = call(gateway, "POST", "/tei/m/embed", reader, {"inputs": "x"})
    assert (status, body["error_type"]) == (403, "Validation")
    assert call(gateway, "GET", "/tei/m/info")[0] == 401
    assert call(gateway, "GET", "/tei/m/info", reader)[0] == 404


def test_the_clients_token_is_the_fleets(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    _, token = secured.create("tei-submitter", "submit")
    with pytest.raises(HfHubHTTPError, match="404") as caught:
        InferenceClient(model=f"{gateway.url}/tei/m", token=token).feature_extraction("x")
    assert caught.value.response.status_code == 404


def test_health_needs_no_token_and_tells_a_stranger_nothing_of_models(
    gateway: GatewayProcess, secured: SecuredFleet
) -> None:
    assert call(gateway, "GET", "/tei/m/health") == (200, {"status": "ok"})
    _, reader = secured.create("tei-prober", "read")
    status, body = call(gateway, "GET", "/tei/m/health", reader)
    assert (status, body["error_type"]) == (404, "Validation")


def test_the_master_decides_about_the_token_of_a_grpc_call(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    _, reader = secured.create("tei-grpc-reader", "read")
    request = pb.EmbedRequest(inputs="x")
    with grpc.insecure_channel(gateway.grpc) as channel:
        for token, code in (("", "UNAUTHENTICATED"), ("mgpu_x", "UNAUTHENTICATED"), (reader, "PERMISSION_DENIED")):
            headers = metadata("m") + ([("authorization", f"Bearer {token}")] if token else [])
            assert failure(method(channel, "Embed/Embed"), request, metadata=headers)[0] == code
            stream = method(channel, "Embed/EmbedStream")
            assert failure(stream, iter([request]), metadata=headers)[0] == code
        assert failure(method(channel, "Info/Info"), pb.InfoRequest(), metadata=headers)[0] == "NOT_FOUND"
