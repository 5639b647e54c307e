"""What a failed request to vLLM's server does to its task: the engine process must not be ended for it."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("httpx2", reason="the extra `remote` is not installed")

from multigpu_worker.engines.vllm.server import GONE_TIMEOUT_S, VllmServer
from multigpu_worker.engines.vllm.streams import Streams, VllmError


class Fails(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(500)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...

    def address_string(self) -> str:
        return "client"


class Server:
    def __init__(self, socket: Path) -> None:
        self.socket = str(socket)
        self.waits = 0

    def wait_gone(self, cancelled: Any) -> None:
        assert not cancelled()
        self.waits += 1


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "socket")


@pytest.fixture
def streams(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    monkeypatch.setattr(Streams, "_body", lambda *_: {})
    streams = Streams(server, "chat", frozenset(), 1)  # type: ignore[arg-type]
    yield streams
    streams.close()


def sequence() -> Any:
    reporter = SimpleNamespace(begin=lambda _: None, cancelled=lambda _: False, beat=lambda: None)
    request = SimpleNamespace(json_schema="")
    return SimpleNamespace(reporter=reporter, item=None, request=request, finish_reason=None)


def test_an_error_that_the_server_answers_with_fails_its_task_at_once(server: Server, streams: Streams) -> None:
    with ThreadingUnixStreamServer(server.socket, Fails) as answering:
        threading.Thread(target=answering.serve_forever, args=(0.05,)).start()
        try:
            with pytest.raises(VllmError, match="answers with 500"):
                streams.run(sequence())
        finally:
            answering.shutdown()
    assert server.waits == 0


def test_after_an_error_of_the_connection_the_task_waits_for_the_end_of_the_server(
    server: Server, streams: Streams
) -> None:
    with pytest.raises(VllmError, match="ConnectError"):
        streams.run(sequence())
    assert server.waits == 1


def test_a_cancelled_task_does_not_wait_for_the_end_of_the_server() -> None:
    server = VllmServer.__new__(VllmServer)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server._process:
        begun_s = time.monotonic()
        server.wait_gone(lambda: True)
        assert time.monotonic() - begun_s < GONE_TIMEOUT_S
        assert server._process.poll() is None
