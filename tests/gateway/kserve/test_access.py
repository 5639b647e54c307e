"""Tokens, TLS and the rules for other hosts, by Triton's own client; and frames that no client sends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.gateway.conftest import GatewayProcess
from tests.gateway.kserve.test_infer import scale_inputs
from tests.gateway.test_http import rejected
from tests.hostile.http2 import Peer, announced, drive
from tests.security.secured import SecuredFleet


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredFleet]:
    with SecuredFleet(tmp_path_factory.mktemp("secured")) as it:
        yield it


@pytest.fixture(scope="module")
def gateway(secured: SecuredFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    # What the gateway's own environment holds is for nobody who calls it.
    env = {"MGPU_TOKEN": secured.admin_token}
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), secured.fleet.address, env=env) as running:
        yield running


def code_of(call: Any, *args: Any, **options: Any) -> str:
    """How a call ends."""
    try:
        call(*args, **options)
    except InferenceServerException as error:
        return str(error.status()).removeprefix("StatusCode.")
    return "OK"


def codes(gateway: GatewayProcess, token: str) -> tuple[str, str]:
    """How the calls to list models and to run one end."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with triton.InferenceServerClient(gateway.grpc) as client:
        assert client.is_server_ready()
        listing = code_of(client.get_model_repository_index, headers=headers)
        return listing, code_of(client.infer, "m", scale_inputs(), headers=headers)


def test_the_master_decides_about_the_callers_token(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    assert codes(gateway, "") == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert codes(gateway, "mgpu_x") == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    token_id, reader = secured.create("kserve-reader", "read")
    assert codes(gateway, reader) == ("OK", "PERMISSION_DENIED")
    # Before a fleet without a connected worker the task would wait for one.
    secured.start_worker("kserve-worker")
    _, submitter = secured.create("kserve-submitter", "submit")
    assert codes(gateway, submitter) == ("OK", "NOT_FOUND")
    _, worker = secured.create("kserve-other-worker", "worker")
    assert codes(gateway, worker) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
    _, night = secured.create("kserve-night", "submit", queues=["night"])
    assert codes(gateway, night)[1] == "PERMISSION_DENIED"
    secured.revoke(token_id)
    assert codes(gateway, reader)[0] == "UNAUTHENTICATED"


def test_tls(secured: SecuredFleet, tmp_path: Path) -> None:
    from multigpu.cli.security import authority

    folder = tmp_path / "certs"
    authority.init(folder)
    crt = authority.issue(folder, "master", "gateway", ["127.0.0.1"])
    flags = ["--http-tls-cert", str(crt), "--http-tls-key", str(crt.with_suffix(".key"))]
    with GatewayProcess(tmp_path, secured.fleet.address, *flags) as running:
        roots = str(folder / "ca.crt")
        with triton.InferenceServerClient(running.grpc, ssl=True, root_certificates=roots) as client:
            assert client.is_server_ready()
        with triton.InferenceServerClient(running.grpc) as client:
            assert code_of(client.is_server_live) == "UNAVAILABLE"


def test_other_hosts_are_not_served_in_the_clear(gateway: GatewayProcess) -> None:
    here = ("--http", "127.0.0.1:0")
    assert "0.0.0.0:0 can be reached from other hosts" in rejected(*here, "--grpc", "0.0.0.0:0")
    assert f"can't serve gRPC at {gateway.grpc}" in rejected(*here, "--grpc", gateway.grpc)


def test_grpc_can_be_off(secured: SecuredFleet, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, secured.fleet.address, "--grpc", "") as running:
        assert running.grpc == ""
        assert running.call("GET", "/health")[0].status == 200


def test_an_undecodable_path_ends_one_call_only(gateway: GatewayProcess) -> None:
    with triton.InferenceServerClient(gateway.grpc) as client:
        assert client.is_server_live()
        with Peer(gateway.grpc) as peer:
            peer.call(b"/x\xff/y", announced(0))
            drive([peer], 10, lambda: 0)
            assert len(peer.ended) == 1
        assert client.is_server_live()


def test_a_request_larger_than_the_limit_is_rejected(secured: SecuredFleet, tmp_path: Path) -> None:
    with (
        GatewayProcess(tmp_path, secured.fleet.address, "--body-bytes-max", "4KiB") as running,
        triton.InferenceServerClient(running.grpc) as client,
    ):
        assert code_of(client.is_model_ready, "x" * 5000) == "RESOURCE_EXHAUSTED"
        assert client.is_server_live()
