"""Tokens: the gateway hands the caller's to the master, which decides. TLS."""

import ssl
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import until
from tests.gateway.conftest import GatewayProcess
from tests.security.secured import SecuredFleet

EMBED = {"input": "x", "model": "m"}


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


def status(gateway: GatewayProcess, method: str, path: str, token: str = "", body: Any = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    response, found = gateway.call(method, path, body, headers)
    return response.status, found


def test_the_caller_needs_a_token_of_the_right_role(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    found, body = status(gateway, "GET", "/v1/models")
    assert (found, body["error"]["type"], body["error"]["code"]) == (401, "authentication_error", "invalid_api_key")
    assert status(gateway, "GET", "/v1/models", "mgpu_000000000000_" + "0" * 64)[0] == 401
    assert status(gateway, "POST", "/v1/embeddings", "mgpu_x", EMBED)[0] == 401
    _, reader = secured.create("gateway-reader", "read")
    assert status(gateway, "GET", "/v1/models", reader)[0] == 200
    found, body = status(gateway, "POST", "/v1/embeddings", reader, EMBED)
    assert (found, body["error"]["type"]) == (403, "permission_error")
    _, worker = secured.create("gateway-worker", "worker")
    assert status(gateway, "GET", "/v1/models", worker)[0] == 403
    assert status(gateway, "GET", "/health") == (200, {"status": "ok"})


def test_an_upload_of_no_submitter_is_rejected_before_it_is_received(
    gateway: GatewayProcess, secured: SecuredFleet
) -> None:
    _, reader = secured.create("gateway-uploader", "read")
    for authorization, status in ({}, 401), ({"Authorization": f"Bearer {reader}"}, 403):
        headers = {"Content-Type": "multipart/form-data; boundary=x", **authorization}
        response, _ = gateway.call("POST", "/v1/files", b"--x\r\nContent-Disposition: form-data; name=", headers)
        assert response.status == status, "and not 400: the body has no end"


def test_a_proxy_may_keep_its_name_in_host(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    """On loopback other names are rejected only before a master that asks nobody for a token."""
    _, reader = secured.create("gateway-proxy", "read")
    headers = {"Host": "gpu.example", "Authorization": f"Bearer {reader}"}
    assert gateway.call("GET", "/v1/models", headers=headers)[0].status == 200


def test_a_token_is_for_its_queues(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    _, token = secured.create("gateway-night", "submit", queues=["night"])
    found, body = status(gateway, "POST", "/v1/embeddings", token, EMBED)
    assert found == 403
    assert "the token is not for the queue 'default'" in body["error"]["message"]


def test_a_revoked_token_is_rejected_at_once(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    token_id, token = secured.create("gateway-leaver", "read")
    assert status(gateway, "GET", "/v1/models", token)[0] == 200
    secured.revoke(token_id)
    assert status(gateway, "GET", "/v1/models", token)[0] == 401


def test_https(secured: SecuredFleet, tmp_path: Path) -> None:
    from multigpu.cli.security import authority

    folder = tmp_path / "certs"
    authority.init(folder)
    crt = authority.issue(folder, "master", "gateway", ["127.0.0.1"])
    flags = ["--http-tls-cert", str(crt), "--http-tls-key", str(crt.with_suffix(".key"))]
    with GatewayProcess(tmp_path, secured.fleet.address, *flags) as running:
        host, _, port = running.address.rpartition(":")
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        connection = HTTPSConnection(host, int(port), context=context, timeout=20)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_other_hosts_are_served_only_before_a_master_that_asks_for_tokens(
    secured: SecuredFleet, tmp_path: Path
) -> None:
    from multigpu.cli.security import authority

    from tests.fleet import Daemon, Fleet

    folder = tmp_path / "certs"
    authority.init(folder)
    crt = authority.issue(folder, "master", "gateway", ["127.0.0.1"])
    flags = ["--http", "0.0.0.0:0", "--grpc", "127.0.0.1:0"]
    flags += ["--http-tls-cert", str(crt), "--http-tls-key", str(crt.with_suffix(".key"))]
    with Fleet(tmp_path / "open", workers=0) as fleet:
        argv = ["--master", fleet.address, *flags]
        rejected = Daemon("multigpu_gateway.main", argv, tmp_path / "rejected.log", {})
        assert rejected.process.wait(60) == 2
        assert "asks nobody for a token" in rejected.log()
    let = Daemon("multigpu_gateway.main", ["--master", secured.fleet.address, *flags], tmp_path / "let.log", {})
    until(lambda: let.events("serving") or not let.alive, 60)
    assert let.stop() == 0
