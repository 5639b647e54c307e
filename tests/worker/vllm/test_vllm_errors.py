"""What a failed request to vLLM's server does to its task: the engine process must not be ended for it."""

import os
import signal
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

from multigpu_worker.engines.vllm import keeper
from multigpu_worker.engines.vllm.server import ANSWERED_TIMEOUT_S, GONE_TIMEOUT_S, VllmServer
from multigpu_worker.engines.vllm.streams import Streams, VllmError


class Fails(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(500)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...

    def address_string(self) -> str:
        return "client"


class FailsLater(Fails):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"error": {"message": "EngineCore encountered an issue"}}\n\n')


class Aborts(Fails):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"finish_reason": null, "token_ids": [5]}]}\n\n')
        self.wfile.write(b'data: {"choices": [{"finish_reason": "abort", "token_ids": []}]}\n\n')


class Server:
    def __init__(self, socket: Path) -> None:
        self.socket = str(socket)
        self.waits_s: list[float] = []

    def wait_gone(self, cancelled: Any, timeout_s: float) -> None:
        assert not cancelled()
        self.waits_s.append(timeout_s)


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


class Begun:
    """A sequence that wants more tokens."""

    def __init__(self) -> None:
        self.reporter, self.item, self.finish_reason = sequence().reporter, None, None
        self.request = SimpleNamespace(json_schema="", sampling=SimpleNamespace(logprobs=None))
        self.tokens: list[int] = []
        self.succeeded = False

    def take(self, choice: Any) -> None:
        self.tokens.append(choice.token)

    def end(self, reason: Any) -> None:
        self.finish_reason = reason

    def succeed(self) -> None:
        self.succeeded = True


@pytest.mark.parametrize(
    ("handler", "error"), [(Fails, "answers with 500"), (FailsLater, "EngineCore encountered an issue")]
)
def test_after_an_error_that_the_server_answers_with_the_task_waits_briefly_for_its_end(
    server: Server, streams: Streams, handler: type[Fails], error: str
) -> None:
    """The server answers so, too, when its engine has died and it is about to end: the task is not at fault."""
    with ThreadingUnixStreamServer(server.socket, handler) as answering:
        threading.Thread(target=answering.serve_forever, args=(0.05,)).start()
        try:
            with pytest.raises(VllmError, match=error):
                streams.run(sequence())
        finally:
            answering.shutdown()
    assert server.waits_s == [ANSWERED_TIMEOUT_S]


def test_an_answer_that_vllm_aborts_fails_so_that_the_next_attempt_goes_on(server: Server, streams: Streams) -> None:
    """vLLM aborts its answers when it is ended. Half an answer is no success."""
    answer = Begun()
    with ThreadingUnixStreamServer(server.socket, Aborts) as answering:
        threading.Thread(target=answering.serve_forever, args=(0.05,)).start()
        try:
            with pytest.raises(VllmError, match="before its end: abort"):
                streams.run(answer)  # type: ignore[arg-type]
        finally:
            answering.shutdown()
    assert (answer.tokens, answer.succeeded) == ([5], False)
    assert server.waits_s == [ANSWERED_TIMEOUT_S]


def test_after_an_error_of_the_connection_the_task_waits_for_the_end_of_the_server(
    server: Server, streams: Streams
) -> None:
    with pytest.raises(VllmError, match="ConnectError"):
        streams.run(sequence())
    assert server.waits_s == [GONE_TIMEOUT_S]


def test_a_cancelled_task_does_not_wait_for_the_end_of_the_server() -> None:
    server = VllmServer.__new__(VllmServer)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server._process:
        begun_s = time.monotonic()
        server.wait_gone(lambda: True, GONE_TIMEOUT_S)
        assert time.monotonic() - begun_s < GONE_TIMEOUT_S
        assert server._process.poll() is None


def test_the_keeper_ends_what_its_program_has_left_though_nobody_reads_its_output(tmp_path: Path) -> None:
    """As when the engine has ended, and the kernel has not sent the keeper its signal yet."""
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-I", keeper.__file__, str(os.getpid()), str(folder), "sh", "-c", "sleep 60 &"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
    assert process.returncode == -signal.SIGKILL, "as its whole process group"
    assert not folder.exists()
