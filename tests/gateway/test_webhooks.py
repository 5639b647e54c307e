"""Webhooks: every durable outcome reaches the receiver at least once and in order, whatever dies between."""

import asyncio
import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from multigpu import AdminClient
from multigpu.cli.security import authority
from multigpu.config.config import ConfigError, GatewayConfig
from multigpu_gateway import webhooks
from multigpu_gateway.webhooks import webhooks_of
from standardwebhooks import Webhook

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.rest.test_tasks import ended, submit
from tests.security.secured import SecuredFleet

FLEET = {"workers": 1}
MISSING = "outcomes are missing: webhooks go on with the oldest one that is kept"
SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"


class Receiver:
    """An HTTP server that verifies what it gets. `status`: its answer; 0: it hangs."""

    def __init__(self) -> None:
        self.status = 204
        self.attempts: list[str] = []
        self.taken: list[Any] = []
        self.wrong: list[str] = []
        self.port = 0
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        """The tasks whose outcomes it took, each once, in the order of the first time."""
        return list(dict.fromkeys(each["task_id"] for each in self.taken))

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        self.attempts.append(handler.headers["webhook-id"])
        try:
            outcome = Webhook(SECRET).verify(body, dict(handler.headers))
            assert handler.headers["webhook-id"].partition("-")[0] == outcome["task_id"]
            assert handler.headers["content-type"] == "application/json"
        except Exception as error:
            self.wrong.append(repr(error))
        if not self.status:
            self.released.wait(60)
            return
        if self.status < 300:
            self.taken.append(outcome)
        handler.send_response(self.status)
        handler.send_header("content-length", "0")
        handler.end_headers()

    @contextmanager
    def running(self, tls: ssl.SSLContext | None = None) -> Iterator[None]:
        """Serves, on the same port each time."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                if not stopped.is_set():
                    receiver.answer(self)
                self.close_connection |= stopped.is_set()

            def log_message(self, *_: object) -> None:
                pass

        stopped = threading.Event()
        with ThreadingHTTPServer(("127.0.0.1", self.port), Handler) as server:
            self.port = server.server_port
            if tls is not None:
                server.socket = tls.wrap_socket(server.socket, server_side=True)
            server.daemon_threads, server.block_on_close = True, False
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield
            finally:
                stopped.set()
                server.shutdown()
                thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    it = Receiver()
    with it.running():
        yield it
    it.released.set()
    assert not it.wrong


def files(folder: Path, url: str, **more: str) -> dict[str, Any]:
    secret = folder / "secret"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    settings = {"webhook_url": url, "webhook_secret_file": secret, "webhook_cursor_file": folder / "cursor", **more}
    return {name: str(value) for name, value in settings.items()}


def process(folder: Path, fleet: Fleet, receiver: Receiver, **more: str) -> GatewayProcess:
    settings = files(folder, receiver.url, **more)
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    return GatewayProcess(folder, fleet.address, *flags)


def run(gateway: GatewayProcess, count: int, queue: str) -> list[str]:
    """The ids of tasks that ended one after the other."""
    ids = [submit(gateway, kind="echo", payload={"n": n}, queue=queue) for n in range(count)]
    for task_id in ids:
        ended(gateway, task_id)
    return ids


def journal(gateway: GatewayProcess, queue: str, count: int) -> list[str]:
    """The tasks in the order of GET /v1/outcomes."""
    connection = gateway.connect()
    connection.request("GET", f"/v1/outcomes?queue={queue}")
    found: list[str] = []
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:])["task_id"])
            if len(found) == count:
                break
    connection.close()
    return found


@pytest.mark.slow
def test_outcomes_arrive_over_failures_hangs_and_kills(fleet: Fleet, tmp_path: Path, receiver: Receiver) -> None:
    queue = "hooks"
    with process(tmp_path, fleet, receiver, webhook_queue=queue) as gateway:
        run(gateway, 1, "other")
        run(gateway, 3, queue)
        until(lambda: len(receiver.ids) == 3, 20)
        assert receiver.taken[0]["result"] == {"n": 0}
        assert receiver.taken[0] == ended(gateway, receiver.ids[0])["outcome"]

        receiver.status = 500
        run(gateway, 3, queue)
        failed = until(lambda: receiver.attempts[3:] and receiver.attempts[3:], 20)
        until(lambda: len(receiver.attempts) >= 6, 20)
        assert set(receiver.attempts[3:]) == {failed[0]}  # the next one waits
        begin = time.monotonic()
        assert gateway.call("GET", "/v1/stats")[0].status == 200
        assert time.monotonic() - begin < 5
        assert len(receiver.ids) == 3
        gateway.daemon.kill()

        receiver.status = 0  # it hangs, and the gateway is killed meanwhile
        gateway.restart()
        tried = len(receiver.attempts)
        until(lambda: len(receiver.attempts) > tried, 20)
        assert receiver.attempts[-1] == failed[0]
        gateway.daemon.kill()
        receiver.status = 204
        gateway.restart()
        until(lambda: len(receiver.ids) == 6, 20)

        fleet.restart_master()
        fleet.wait_for_workers()
        run(gateway, 4, queue)
        until(lambda: len(receiver.ids) == 10, 30)
        assert receiver.ids == journal(gateway, queue, 10)
        assert "was not taken" in gateway.daemon.log_path.read_text()


@pytest.mark.slow
def test_a_receiver_that_is_away_gets_all_when_it_is_back(fleet: Fleet, tmp_path: Path) -> None:
    receiver, queue = Receiver(), "away"
    with receiver.running():
        gateway = process(tmp_path, fleet, receiver, webhook_queue=queue)
        run(gateway, 1, queue)
        until(lambda: len(receiver.ids) == 1, 20)
    with gateway:
        run(gateway, 3, queue)
        until(lambda: len(gateway.daemon.events("an outcome was not taken")) >= 2, 20)
        gateway.daemon.kill()
        gateway.restart()
        with receiver.running():
            until(lambda: len(receiver.ids) == 4, 30)
            assert receiver.ids == journal(gateway, queue, 4)
        # Stopping does not wait for the receiver.
        begin = time.monotonic()
        assert gateway.daemon.stop() == 0
        assert time.monotonic() - begin < 10
    assert not receiver.wrong


def test_the_outcome_of_a_requeued_task_has_another_id(fleet: Fleet, tmp_path: Path, receiver: Receiver) -> None:
    """A receiver that ignores the ids that it has had, as the standard says, ignored it."""
    with process(tmp_path, fleet, receiver, webhook_queue="again") as gateway, AdminClient(fleet.address) as admin:
        task_id = submit(gateway, kind="fail", payload=1, queue="again", attempts_max=1)
        until(lambda: len(receiver.taken) == 1, 20)
        admin.requeue_dead_letters([int(task_id)])
        until(lambda: len(receiver.taken) == 2, 20)
    assert receiver.ids == [task_id]
    assert len(set(receiver.attempts)) == 2


def test_gone_ends_webhooks_and_nothing_else(fleet: Fleet, tmp_path: Path, receiver: Receiver) -> None:
    receiver.status = 410
    with process(tmp_path, fleet, receiver, webhook_queue="gone") as gateway:
        run(gateway, 2, "gone")
        (event,) = until(
            lambda: gateway.daemon.events("webhooks are off until the next start: the receiver answered 410"), 20
        )
        assert event["level"] == "error"
        assert gateway.call("GET", "/v1/stats")[0].status == 200
        assert len(receiver.attempts) == 1


def test_an_expired_cursor_is_logged_and_the_oldest_outcome_follows(
    fleet: Fleet, tmp_path: Path, receiver: Receiver
) -> None:
    (tmp_path / "cursor").write_text("w.0123456789abcdef.5")
    with process(tmp_path, fleet, receiver, webhook_queue="expired") as gateway:
        ids = run(gateway, 2, "expired")
        until(lambda: len(receiver.ids) == 2, 20)
        assert sorted(receiver.ids) == sorted(ids)
        (event,) = [e for e in gateway.daemon.events(MISSING) if e["level"] == "error"]
        assert "journal" in event["reason"]


def test_a_hanging_receiver_fails_an_attempt(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 2.0)
    receiver.status = 0
    found = webhooks_of(GatewayConfig(**files(tmp_path, receiver.url)))
    assert found is not None

    async def send() -> str:
        async with httpx2.AsyncClient() as http:
            return await found._send(http, "1", b'{"task_id": "1"}')

    assert asyncio.run(send()) == "no answer within 2 s"
    assert receiver.attempts == ["1"]


async def test_a_certificate_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority.init(tmp_path / "certs")
    crt = authority.issue(tmp_path / "certs", "master", "hook", ["127.0.0.1"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(crt, crt.with_suffix(".key"))
    receiver = Receiver()
    with receiver.running(tls):
        url = receiver.url.replace("http:", "https:")
        found = webhooks_of(GatewayConfig(**files(tmp_path, url)))
        assert found is not None
        async with httpx2.AsyncClient() as http:
            assert "CERTIFICATE_VERIFY_FAILED" in await found._send(http, "1", b'{"task_id": "1"}')
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certs/ca.crt"))
        async with httpx2.AsyncClient() as http:
            assert await found._send(http, "1", b'{"task_id": "1"}') == ""
    assert receiver.attempts == ["1"]


def test_pauses_double_up_to_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = webhooks_of(GatewayConfig(**files(tmp_path, "https://hooks.example/")))
    assert found is not None
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def wait() -> None:
        for _ in range(9):
            await found._pause()

    asyncio.run(wait())
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.slow
def test_a_token_file_is_used(tmp_path: Path, receiver: Receiver) -> None:
    with SecuredFleet(tmp_path / "fleet") as secured:
        token = tmp_path / "token"
        token.write_text(secured.create("hooks", "read")[1])
        token.chmod(0o600)
        with process(tmp_path, secured.fleet, receiver, webhook_token_file=str(token)):
            with secured.fleet.client(token=secured.admin_token) as client:
                handle = client.submit("nobody.has.it", b"", wait_for_worker=True)
                client.cancel(handle.id)
            until(lambda: receiver.ids == [str(handle.id)], 20)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"webhook_url": ""}, "webhook_secret_file needs webhook_url"),
        ({"webhook_secret_file": ""}, "webhook_url needs webhook_secret_file and webhook_cursor_file"),
        ({"webhook_cursor_file": ""}, "webhook_url needs webhook_secret_file and webhook_cursor_file"),
        ({"webhook_url": "http://hooks.example/"}, "in the clear"),
        ({"webhook_url": "ftp://localhost/"}, "is not https://HOST/PATH"),
        ({"webhook_url": "http://localhost:x/"}, "webhook_url"),
        ({"webhook_cursor_file": "/nowhere/cursor"}, "can't be used"),
        ({"webhook_secret_file": "/nowhere/secret"}, "can't be read"),
        ({"webhook_token_file": "/nowhere/token"}, "the token in /nowhere/token can't be read"),
    ],
)
def test_a_wrong_setting_is_rejected(tmp_path: Path, change: dict[str, str], says: str) -> None:
    settings = files(tmp_path, "http://localhost:1/") | change
    with pytest.raises(ConfigError, match=says):
        webhooks_of(GatewayConfig(**settings))


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (SECRET, 0o604, "everybody on this host may read the secret"),
        ("secret", 0o600, "no secret of Standard Webhooks"),
        ("whsec_c2hvcnQ=", 0o600, "no secret of Standard Webhooks"),
        ("whsec_*", 0o600, "no secret of Standard Webhooks"),
    ],
)
def test_a_secret_that_is_none_or_readable_by_others_is_rejected(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    settings = files(tmp_path, "http://localhost:1/")
    secret = Path(settings["webhook_secret_file"])
    secret.write_text(text)
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        webhooks_of(GatewayConfig(**settings))
    assert not (tmp_path / "cursor").exists()
