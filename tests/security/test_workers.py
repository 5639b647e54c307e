"""Workers: ids, tokens and code."""

import grpc
import multigpu
import pytest
from multigpu import errors

from tests.fleet import until
from tests.security.secured import SecuredFleet, hello


def test_a_worker_cannot_take_anothers_id(secured: SecuredFleet) -> None:
    until(lambda: not secured.active(), what="the workers of other tests to go")
    own = secured.as_role("worker", worker_ids=["box-1", "gpu2-*"])
    victim = secured.as_role("worker").open("WorkerService/Session", hello("box-2"))
    victim.next()
    for worker_id in ("box-2", "box-11", "gpu2", "gpu20-x", "*", "BOX-1"):
        assert own.open("WorkerService/Session", hello(worker_id)).end() is grpc.StatusCode.PERMISSION_DENIED
    assert secured.active() == {"box-2"}  # and keeps its session
    for worker_id in ("box-1", "gpu2-", "gpu2-cuda:0"):
        stream = own.open("WorkerService/Session", hello(worker_id))
        assert stream.next().HasField("welcome")
        stream.close()
    victim.close()


def test_a_worker_reconnects_with_a_new_token(secured: SecuredFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    token_id, token = secured.create("first", "worker", worker_ids=["real"])
    worker = secured.start_worker("real", token=token)
    monkeypatch.setenv("MGPU_TOKEN", secured.create("client", "submit")[1])
    with multigpu.Client(secured.fleet.address) as client:
        assert client.run("echo", b"1") == b"1"
        secured.revoke(token_id)
        until(lambda: "real" not in secured.active(), what="the worker to lose its session")
        waiting = client.submit("echo", b"2").id
        until(lambda: "UNAUTHENTICATED" in worker.log(), what="the worker to say why")
        assert worker.alive
        (secured.fleet.folder / "real.token").write_text(secured.create("second", "worker", worker_ids=["real"])[1])
        until(lambda: "real" in secured.active(), what="the worker with its new token")
        outcome = client.get(waiting, wait_s=20).outcome
        assert outcome is not None and outcome.value() == b"2"
    worker.stop()
    assert token not in worker.log()


def test_a_client_cannot_load_code(secured: SecuredFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind or a model is only a name that a worker serves."""
    worker = secured.start_worker("loader")
    monkeypatch.setenv("MGPU_TOKEN", secured.create("coder", "submit")[1])
    with multigpu.Client(secured.fleet.address) as client:
        for kind in ("os.system", "os:system", "antigravity", "../../echo", "/bin/sh", "echo\n"):
            with pytest.raises(errors.RejectedError):
                client.run(kind, b"x")
        for model in ("/etc", "../../etc", "https://example.org/model"):
            with pytest.raises(errors.RejectedError):
                client.run("embed", b"x", model=model)
        assert client.run("echo", b"1") == b"1"
    worker.stop()


def test_the_sdk_explains_token_failures(secured: SecuredFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def tries() -> list[str]:
        messages = []
        with multigpu.Client(secured.fleet.address, connect_timeout_s=5) as client:
            for attempt in (lambda: client.run("echo", b""), lambda: client.get(1), lambda: next(client.watch())):
                with pytest.raises(errors.AccessError) as caught:
                    attempt()
                messages.append(str(caught.value))
        return messages

    monkeypatch.delenv("MGPU_TOKEN", raising=False)
    assert all("token_file" in text for text in tries())
    monkeypatch.setenv("MGPU_TOKEN", "mgpu_wrong")
    assert all("not valid here" in text for text in tries())
    monkeypatch.setenv("MGPU_TOKEN", secured.create("w", "worker")[1])
    assert all("requires a token with the role" in text for text in tries())
    monkeypatch.delenv("MGPU_TOKEN")
    monkeypatch.setenv("MGPU_TOKEN_FILE", "/nowhere/token")
    assert all("/nowhere/token can't be read" in text for text in tries())


def test_a_revoked_client_gets_an_error_and_uses_a_new_token_at_once(
    secured: SecuredFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_id, token = secured.create("c1", "submit")
    path = secured.fleet.folder / "client.token"
    path.touch(0o600)
    path.write_text(token + "\n")
    monkeypatch.delenv("MGPU_TOKEN", raising=False)
    monkeypatch.setenv("MGPU_TOKEN_FILE", str(path))
    worker = secured.start_worker("again")
    with multigpu.Client(secured.fleet.address) as client:
        assert client.run("echo", b"1", wait_for_worker=True) == b"1"
        path.chmod(0o644)
        with pytest.raises(errors.AccessError, match="chmod"):
            client.submit("echo", b"x")
        path.chmod(0o600)
        secured.revoke(token_id)
        with pytest.raises(errors.AccessError):
            client.run("echo", b"2")
        path.write_text(secured.create("c2", "submit")[1])
        assert client.run("echo", b"3") == b"3"
    worker.stop()
