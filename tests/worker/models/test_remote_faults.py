"""The engine `remote` before a server that is away, full, slow or wrong: nothing is lost, and nothing ends twice."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import multigpu
import pytest
from multigpu.v1 import generate_pb2
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.repository.model import ModelFolderError, ModelSpec, Remote
from multigpu_worker.repository.scan import read_model

pytest.importorskip("httpx2", reason="the extra `remote` is not installed")

from multigpu_worker.engines.remote.calls import Generate
from multigpu_worker.engines.remote.engine import RemoteEngine
from multigpu_worker.engines.remote.server import RequestFailedError, TaskCancelledError

from tests.fleet import Fleet, until

Answer = Callable[["Handler", dict[str, Any]], None]


class Server(ThreadingHTTPServer):
    """Embeds a text as its length. `answers`: what comes in place of the next right answers."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answers: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        self.token = ""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def kill(self) -> int:
        """Ends it; returns its port."""
        self.shutdown()
        self.server_close()
        return self.server_port


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.send(200, {"data": [{"id": "m"}, {"id": "slow"}, {"id": "writer"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        if self.server.token and self.headers["authorization"] != f"Bearer {self.server.token}":
            self.send(401, {"error": "who are you?"})
        elif self.server.answers:
            self.server.answers.pop(0)(self, body)
        elif self.path == "/v1/embeddings":
            data = [{"index": n, "embedding": [float(len(text)), 1.0]} for n, text in enumerate(body["input"])]
            self.send(200, {"data": data, "usage": {"prompt_tokens": 1}})
        else:
            write_words(self, ["a ", "b ", "c"])

    def send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def write_words(handler: Handler, words: list[str], *, end: bool = True) -> None:
    handler.send_response(200)
    handler.send_header("connection", "close")
    handler.end_headers()
    for word in words:
        handler.wfile.write(f"data: {json.dumps({'choices': [{'text': word}]})}\n\n".encode())
    if end:
        usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
        handler.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
    handler.close_connection = True


def late(seconds: float, code: int) -> Answer:
    def answer(handler: Handler, _body: dict[str, Any]) -> None:
        time.sleep(seconds)
        handler.send(code, {})

    return answer


def status(code: int, headers: dict[str, str] | None = None) -> Answer:
    return lambda handler, _: handler.send(code, {"error": f"code {code}"}, headers)


def save_model(folder: Path, url: str, kind: str = "embed", rest: str = "") -> Path:
    folder.mkdir()
    text = f'kind = "{kind}"\nengine = "remote"\nconcurrency = 8\n[remote]\nurl = "{url}"\n{rest}'
    (folder / "model.toml").write_text(text)
    return folder


@contextmanager
def fleet_before(server: Server, folder: Path) -> Iterator[Fleet]:
    """A fleet whose worker sends the tasks of three models to this server."""
    token = folder / "token"
    token.write_text("secret\n")
    models = {
        "m": save_model(folder / "m", server.url, rest=f'timeout_s = 1.0\ntoken_file = "{token}"\n'),
        "slow": save_model(folder / "slow", server.url),
        "writer": save_model(folder / "writer", server.url, "generate"),
    }
    flags = ["--models", ",".join(f"{name}={path}" for name, path in models.items())]
    with Fleet(folder / "fleet", workers=1, worker_flags=flags) as running:
        yield running
        assert not running.faults()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Fleet]]:
    with Server() as server, fleet_before(server, tmp_path_factory.mktemp("shared")) as fleet:
        yield server, fleet
        server.shutdown()


@pytest.fixture
def server(shared: tuple[Server, Fleet]) -> Server:
    """It answers rightly, and was not asked yet."""
    server, _ = shared
    server.answers.clear()
    server.asked.clear()
    server.token = ""
    return server


@pytest.fixture
def fleet(shared: tuple[Server, Fleet]) -> Fleet:
    return shared[1]


def embed(client: multigpu.Client, text: str = "four", **options: Any) -> Any:
    return client.run("embed", [text], model="m", **options)


def test_tasks_wait_for_a_server_that_is_away_under_load(tmp_path: Path) -> None:
    """It is killed and comes back three times: all tasks succeed with their first attempt."""
    server = Server()
    with fleet_before(server, tmp_path) as fleet, fleet.client() as client:
        server.answers += [late(0.05, 503)] * 20
        texts = ["x" * n for n in range(1, 201)]
        handles = [client.submit("embed", [text], model="m", attempts_max=1) for text in texts]
        current, asked = server, server.asked
        for requests in (10, 60, 110):  # of 200 tasks, however many have ended meanwhile
            until(lambda least=requests: len(asked) > least, what="requests")  # type: ignore[misc]
            port = current.kill()
            time.sleep(0.5)
            current = Server(port)
            current.asked = asked
        outcomes = [handle.outcome() for handle in handles]
        assert [outcome.value() for outcome in outcomes] == [[[float(n), 1.0]] for n in range(1, 201)]
        assert {outcome.attempts for outcome in outcomes} == {1}
        until(lambda: "unavailable" in fleet.workers["w0"].log(), what="a warning")
        current.kill()


def test_the_state_of_a_server_is_shown_while_tasks_wait(fleet: Fleet, server: Server) -> None:
    with fleet.client() as client, multigpu.AdminClient(fleet.address) as admin:

        def state() -> str:
            (entry,) = admin.list_models("m")
            return entry.model.facts.get("state", "")

        embed(client)
        server.answers += [status(503)] * 1000
        handle = client.submit("embed", ["four"], model="m", attempts_max=1)
        until(lambda: state().startswith("unavailable: "), what="the state")
        assert "503" in state()
        server.answers.clear()
        assert handle.result() == [[4.0, 1.0]]
        until(lambda: state() == "answers", what="the state")


def test_a_full_server_is_asked_again_after_the_time_that_it_says(fleet: Fleet, server: Server) -> None:
    with fleet.client() as client:
        embed(client)
        server.answers += [status(429, {"retry-after": "1"}), status(502), status(504)]
        begun_s = time.monotonic()
        assert embed(client, attempts_max=1) == [[4.0, 1.0]]
        assert time.monotonic() - begun_s >= 1.0


@pytest.mark.parametrize(
    ("answer", "error", "attempts"),
    [
        (status(400), "BadInput", 1),
        (status(500), "RemoteError", 2),
        (late(1.5, 200), "RemoteTimeout", 2),
        (lambda handler, _: handler.send(200, {"data": []}), "RemoteError", 2),
        (lambda handler, _: handler.send(200, {"data": [{"index": 0, "embedding": "?"}]}), "RemoteError", 2),
        (lambda handler, _: handler.send(200, "text"), "RemoteError", 2),
    ],
)
def test_a_wrong_answer_fails_the_attempt(
    fleet: Fleet, server: Server, answer: Answer, error: str, attempts: int
) -> None:
    with fleet.client() as client:
        embed(client)
        server.answers += [answer] * 2
        outcome = client.submit("embed", ["x"], model="m", attempts_max=2).outcome()
        assert (outcome.error_type, outcome.attempts) == (error, attempts)


def test_the_token_is_sent_and_a_wrong_one_named(fleet: Fleet, server: Server) -> None:
    with fleet.client() as client:
        server.token = "secret"
        embed(client)
        server.token = "another"
        with pytest.raises(multigpu.TaskFailed, match=r"denies access \(401.*token_file"):
            embed(client)


def test_an_answer_that_breaks_off_goes_on_where_it_was(fleet: Fleet, server: Server) -> None:
    payload = generate_pb2.GeneratePayload(prompt="Once").SerializeToString()
    server.answers += [
        lambda handler, _: write_words(handler, ["a ", "b"], end=False),
        lambda handler, _: write_words(handler, ["a"], end=False),
    ]
    with fleet.client() as client:
        outcome = client.submit("generate", payload, model="writer", attempts_max=1).outcome()
        assert generate_pb2.GenerateResult.FromString(outcome.result).text == "a b c"
        chunks = [generate_pb2.GenerateChunk.FromString(part).text for part in outcome.partials]
        assert "".join(chunks) == "a b c", "no part was sent twice"
        assert len(server.asked) == 3

        server.answers += [
            lambda handler, _: write_words(handler, ["a ", "b"], end=False),
            lambda handler, _: write_words(handler, ["x ", "y"]),
        ]
        with pytest.raises(multigpu.TaskFailed, match="another text than before"):
            client.run("generate", payload, model="writer", attempts_max=3)


def test_a_cancelled_task_no_longer_waits_for_the_server(fleet: Fleet, server: Server) -> None:
    with fleet.client() as client:
        embed(client)
        server.answers += [status(503)] * 1000
        handle = client.submit("embed", ["x"], model="m")
        until(lambda: len(server.answers) < 999, what="a request")
        assert handle.cancel("changed my mind")
        time.sleep(0.5)
        server.answers.clear()
        assert embed(client) == [[4.0, 1.0]]
        assert Counter(str(body["input"]) for body in server.asked)["['four']"] == 2


@pytest.mark.parametrize("error", [RequestFailedError("RemoteError", "", retryable=True), TaskCancelledError()])
def test_the_text_of_a_failed_or_cancelled_attempt_is_not_kept(error: Exception) -> None:
    spec = ModelSpec(
        name="m", folder=Path("/m"), engine="remote", kind="generate", remote=Remote(url="http://127.0.0.1:1")
    )
    engine = RemoteEngine(EngineSettings(device="cpu", slots=1, threads=0, models={"m": spec}))

    def events(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"text": "a"}]}
        raise error

    call = engine._call = Generate(spec, SimpleNamespace(events=events))  # type: ignore[arg-type]
    payload = generate_pb2.GeneratePayload(prompt="Once").SerializeToString()
    item = SimpleNamespace(lease_id=1, task_id=1, payload=payload, partials=(), partials_received=0)
    reporter = MagicMock()
    reporter.cancelled.return_value = False
    engine.run(SimpleNamespace(items=[item], content_type="", parameters={}), None, reporter)  # type: ignore[arg-type]
    assert reporter.partial.called
    assert not call._sent


@pytest.mark.parametrize("model", ["slow", "writer"])
def test_cancelling_a_task_ends_its_request_and_no_other(fleet: Fleet, server: Server, model: str) -> None:
    closed, release = threading.Event(), threading.Event()

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if "cancelled" in str(body):
            assert not handler.rfile.read(1), "the worker closes the connection"
            closed.set()
            handler.close_connection = True
            return
        assert release.wait(60)
        if model == "writer":
            write_words(handler, ["a"])
        else:
            handler.send(200, {"data": [{"index": 0, "embedding": [1.0]}]})

    def submit(text: str) -> Any:
        if model == "writer":
            return client.submit("generate", generate_pb2.GeneratePayload(prompt=text).SerializeToString(), model=model)
        return client.submit("embed", [text], model=model)

    server.answers += [answer] * 4
    with fleet.client() as client:
        handles = [submit(text) for text in ("kept", "kept", "kept", "cancelled")]
        until(lambda: len(server.asked) == 4, what="the requests")
        handles[3].cancel("changed my mind")
        until(closed.is_set, what="the end of a request")
        release.set()
        assert all(handle.result() for handle in handles[:3])
        assert len(server.asked) == 4, "no request was sent twice"


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ('kind = "embed"\nengine = "remote"\n', "has engine = "),
        ('engine = "remote"\n[remote]\nurl = "http://x"\n', "its kind"),
        ('kind = "embed"\n[remote]\nurl = "http://x"\n', "has engine = "),
        ('kind = "embed"\nengine = "remote"\n[remote]\nurl = "x:80"\n', "not a URL"),
        (
            'kind = "classify"\nengine = "remote"\n[remote]\nurl = "http://x"\n',
            "runs embed, generate, infer and rerank",
        ),
        ('kind = "embed"\nengine = "remote"\n[remote]\nurl = "http://x"\napi = "soap"\n', "api"),
    ],
)
def test_a_model_toml_that_is_wrong_is_named(tmp_path: Path, toml: str, says: str) -> None:
    (tmp_path / "model.toml").write_text(toml)
    with pytest.raises(ModelFolderError, match=says):
        read_model(tmp_path, "m", None)
