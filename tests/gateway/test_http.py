"""The gateway's HTTP: what is no right request gets its status, and harms nobody."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess

FLEET = {"workers": 1}


def test_health_says_whether_the_master_answers(gateway: GatewayProcess, fleet: Fleet, tmp_path: Path) -> None:
    response, body = gateway.call("GET", "/health")
    assert (response.status, body) == (200, {"status": "ok"})
    with GatewayProcess(tmp_path, "127.0.0.1:1") as alone:
        response, body = alone.call("GET", "/health")
        assert response.status == 503
        assert "no master at 127.0.0.1:1" in body["error"]["message"]
        assert response.getheader("retry-after") == "1"


def test_metrics_count_requests(gateway: GatewayProcess) -> None:
    gateway.call("GET", "/nothing")
    _, text = gateway.call("GET", "/metrics")
    assert 'mgpu_gateway_requests_total{route="other",status="404"}' in text
    assert "mgpu_gateway_open_requests 1.0" in text


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/nothing", None, 404, "there is no /nothing"),
        ("GET", "/v1/embeddings", None, 405, "/v1/embeddings takes POST, not GET"),
        ("POST", "/v1/models", None, 405, "/v1/models takes GET, not POST"),
        ("POST", "/v1/embeddings", b"", 400, "the body is empty"),
        ("POST", "/v1/embeddings", b"{", 400, "not valid JSON"),
        ("POST", "/v1/embeddings", b"[]", 400, "Expected `object`, got `array`"),
        ("POST", "/v1/embeddings", b'{"input": "\xff", "model": "m"}', 400, "not valid JSON"),
        ("POST", "/v1/embeddings", b'{"input": ' + b"[" * 100_000, 400, ""),
        ("POST", "/v1/embeddings", b'{"input": "\\ud800", "model": "m"}', 400, "not valid JSON"),
        ("POST", "/v1/embeddings", b'{"input": "x"}', 400, "missing required field `model`"),
        ("POST", "/v1/embeddings", b'{"input": 1e999, "model": "m"}', 400, ""),
        ("POST", "/v1/chat/completions", b'{"model": "m", "messages": [{}]}', 400, "messages[0]: Object missing"),
        ("GET", f"/v1/batches?limit={'9' * 5000}", None, 400, "1 to 100"),
    ],
)
def test_wrong_requests_get_their_status(
    gateway: GatewayProcess, method: str, path: str, body: bytes | None, status: int, says: str
) -> None:
    response, found = gateway.call(method, path, body)
    assert response.status == status
    assert says in found["error"]["message"]
    assert found["error"]["type"] == "not_found_error" if status == 404 else "invalid_request_error"


def test_head_and_the_methods_of_a_path(gateway: GatewayProcess) -> None:
    """A HEAD is a GET without its body; a 405 has Allow (RFC 9110)."""
    response, body = gateway.call("HEAD", "/v1/stats")
    assert (response.status, body) == (200, "")
    assert int(response.headers["content-length"]) > 0
    assert gateway.call("POST", "/v1/tasks/1")[0].headers["allow"] == "GET, DELETE"
    assert gateway.call("HEAD", "/v1/embeddings")[0].headers["allow"] == "POST"


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200)])
def test_pages_of_other_sites_change_nothing(gateway: GatewayProcess, site: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": site}
    assert gateway.call("POST", "/multigpu/gpu/test", {"gpu_ids": [0]}, headers=headers)[0].status == status
    assert gateway.call("GET", "/v1/workers", headers=headers)[0].status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:80", 200), ("a.localhost", 200), ("[::1]:80", 200), ("10.0.0.1", 200), ("evil.example:80", 403)],
)
def test_a_page_whose_name_leads_to_this_host_reads_nothing(gateway: GatewayProcess, host: str, status: int) -> None:
    """A browser takes such a page and the gateway for one site (DNS rebinding)."""
    headers = {"Host": host, "Authorization": "Bearer any"}  # a page can send what it likes to its own site
    for method, path, sent in (("GET", "/v1/workers", None), ("POST", "/embed", {"inputs": []}), ("GET", "/", None)):
        response, body = gateway.call(method, path, sent, headers)
        assert (response.status == 403) == (status == 403)
        assert status == 200 or "--require-tokens" in str(body)


def test_a_missing_field_is_named_and_a_compressed_body_is_no_json(gateway: GatewayProcess) -> None:
    _, body = gateway.call("POST", "/v1/embeddings", {"input": "x"})
    assert body["error"]["param"] == "model"
    response, body = gateway.call("POST", "/v1/embeddings", b"\x1f\x8b", {"Content-Encoding": "gzip"})
    assert (response.status, body["error"]["message"]) == (415, "the body is compressed: send it as it is")


@pytest.mark.parametrize("value", ["Basic x", "Bearer", "Bearer ", "Bearer \u00e9", "x"])
def test_a_header_that_is_no_token_is_unauthorized(gateway: GatewayProcess, value: str) -> None:
    response, body = gateway.call("GET", "/v1/models", headers={"Authorization": value})
    assert response.status == 401
    assert response.getheader("www-authenticate") == "Bearer"
    assert "Authorization: Bearer TOKEN" in body["error"]["message"]


def test_a_body_has_a_limit(fleet: Fleet, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, fleet.address, "--body-bytes-max", "4096") as small:
        large = json.dumps({"input": "x" * 5000, "model": "m"}).encode()
        response, body = small.call("POST", "/v1/embeddings", large)
        assert response.status == 413
        assert "the limit is 4,096 bytes" in body["error"]["message"]
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = talk(small, head + b"%x\r\n%s\r\n" % (len(large), large))
        assert answer.startswith(b"HTTP/1.1 413 ")


def talk(gateway: GatewayProcess, data: bytes, timeout_s: float = 20.0) -> bytes:
    """What the gateway answers to these bytes, until it has sent a whole answer or closes."""
    host, _, port = gateway.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while b"\r\n\r\n" not in answer and (part := connection.recv(65_536)):
                answer += part
        except ConnectionError:
            pass
        return answer


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", b"HTTP/1.1 400 "),  # TLS
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"y" * 100_000, b""),  # headers without an end
        (b"GET /" + b"y" * 100_000, b""),
        (
            b"GET /health HTTP/1.1\r\nHost: ::\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"HTTP/1.1 400 ",
        ),
        (b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", b"HTTP/1.1 400 "),
    ],
)
def test_what_is_no_http_is_rejected_and_harms_nobody(gateway: GatewayProcess, data: bytes, begins: bytes) -> None:
    answer = talk(gateway, data)
    assert answer.startswith(begins)
    assert begins or not answer
    assert gateway.call("GET", "/health")[0].status == 200


def test_a_peer_that_leaves_in_the_middle_of_a_body_harms_nobody(gateway: GatewayProcess) -> None:
    host, _, port = gateway.address.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: ::\r\nContent-Length: 100\r\n\r\n{")
    until(lambda: 'route="/v1/embeddings",status="499"' in gateway.call("GET", "/metrics")[1], 10)
    assert "mgpu_gateway_open_requests 1.0" in gateway.call("GET", "/metrics")[1]


def test_requests_of_one_connection_are_answered_in_order(gateway: GatewayProcess) -> None:
    host, _, port = gateway.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while answer.count(b"HTTP/1.1 ") < 2:
            part = connection.recv(65_536)
            assert part
            answer += part
    assert answer.index(b"HTTP/1.1 200 ") < answer.index(b"HTTP/1.1 404 ")


def rejected(*flags: str) -> str:
    argv = [sys.executable, "-m", "multigpu_gateway.main", "--master", "127.0.0.1:1", "--grpc", "", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 2
    return done.stderr


def test_other_hosts_are_not_served_in_the_clear() -> None:
    assert "0.0.0.0:0 can be reached from other hosts" in rejected("--http", "0.0.0.0:0")
    assert "http_tls_cert and http_tls_key go together" in rejected("--http-tls-cert", "x")
    assert "can't serve HTTP at" in rejected(
        "--http-tls-cert", "/nope", "--http-tls-key", "/nope", "--http", "127.0.0.1:0"
    )


def test_a_port_in_use_is_named(gateway: GatewayProcess) -> None:
    assert f"can't serve HTTP at {gateway.address}" in rejected("--http", gateway.address)


def test_a_stop_lets_a_request_end(fleet: Fleet, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, fleet.address) as stopped:
        host, _, port = stopped.address.rpartition(":")
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{")
            time.sleep(0.3)
            stopped.daemon.process.terminate()
            time.sleep(0.3)
            connection.sendall(b"}")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 400 ")
        assert stopped.daemon.process.wait(120) == 0


def test_any_number_of_gateways_serve_a_fleet_and_one_that_is_killed_loses_nothing(
    gateway: GatewayProcess, fleet: Fleet, tmp_path: Path
) -> None:
    other = GatewayProcess(tmp_path, fleet.address)
    assert other.call("GET", "/v1/models") and gateway.call("GET", "/v1/models")
    other.daemon.kill()
    assert gateway.call("GET", "/health")[0].status == 200


def test_a_stop_ends_requests_that_wait_after_its_time(fleet: Fleet, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, fleet.address, "--stop-timeout-s", "1") as stopped:
        host, _, port = stopped.address.rpartition(":")
        with fleet.client() as client, socket.create_connection((host, int(port)), 20) as connection:
            waiting = client.submit("sleep", b"600")
            connection.sendall(f"GET /v1/tasks/{waiting.id}?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            until(lambda: "mgpu_gateway_open_requests 2.0" in stopped.call("GET", "/metrics")[1], 10)
            assert stopped.daemon.stop() == 0
            assert connection.recv(65_536).startswith(b"HTTP/1.1 503 ")
            waiting.cancel()


def test_headers_are_limited_while_another_request_is_served(gateway: GatewayProcess, fleet: Fleet) -> None:
    host, _, port = gateway.address.rpartition(":")
    with fleet.client() as client, socket.create_connection((host, int(port)), 20) as connection:
        waiting = client.submit("sleep", b"600")
        connection.sendall(f"GET /v1/tasks/{waiting.id}?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        until(lambda: "mgpu_gateway_open_requests 2.0" in gateway.call("GET", "/metrics")[1], 10)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"y" * 300_000)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(65_536) == b""
        waiting.cancel()
