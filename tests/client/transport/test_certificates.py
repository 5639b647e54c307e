"""Calls that wait while certificates are renewed: those whose connection goes on, and those whose master returns."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import multigpu
import pytest
from multigpu.cli.security import authority
from multigpu.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc

from tests.client.scripted_master import OPTIONS, ScriptedMaster
from tests.waiting import until_async

LIMIT_S = 120.0


class TlsMaster(ScriptedMaster):
    """A ScriptedMaster with a certificate; clients trust the file `trusted`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        for name in ("old", "new"):
            authority.init(folder / name)
            authority.issue(folder / name, "master", "master", ["localhost", "127.0.0.1"])
        self._folder = folder
        self._authority = folder / "old"
        self.trusted = folder / "ca.crt"
        shutil.copy(self._authority / "ca.crt", self.trusted)
        self._failures = 0
        self.counts = 0
        self.unanswered_counts = 0  # of the calls to come

    async def start(self) -> "TlsMaster":
        self._server = grpc.aio.server(options=OPTIONS)
        task_service_pb2_grpc.add_TaskServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated
        pair = [(self._authority / name).read_bytes() for name in ("master.key", "master.crt")]
        credentials = grpc.ssl_server_credentials([(pair[0], pair[1])])
        self.port = self._server.add_secure_port(f"127.0.0.1:{self.port}", credentials)
        await self._server.start()
        return self

    async def Count(self, request: Any, context: Any) -> Any:  # noqa: N802  the method's name
        self.counts += 1
        if self.unanswered_counts:
            self.unanswered_counts -= 1
            await asyncio.Event().wait()
        if self._failures:
            self._failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        return task_service_pb2.CountResponse()

    async def renew_beside(self, client: multigpu.AsyncClient) -> None:
        """Other bytes, which serve as well; a unary call that fails once finds them."""
        self.trusted.write_bytes(self.trusted.read_bytes() + b"\n# renewed\n")
        self._failures = 1
        await client.count()

    async def return_with_another_authority(self) -> None:
        """Files made before do not serve any more."""
        await self.stop()
        self._authority = self._folder / "new"
        shutil.copy(self._authority / "ca.crt", self.trusted)

    def settle_one(self) -> None:
        self.watched = [task_pb2.Outcome(task_id=7, state=task_pb2.OUTCOME_STATE_SUCCEEDED)]
        self.gate.set()


@pytest.fixture(name="master")
async def master_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TlsMaster]:
    master = TlsMaster(tmp_path)
    monkeypatch.setenv("MGPU_TLS_CA", str(master.trusted))
    async with master:
        master.gate.clear()
        yield master


async def test_streams_go_on_when_the_channel_before_a_renewal_is_closed(
    master: TlsMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multigpu._transport.connection.UNARY_TIMEOUT_S", 0.1)
    async with multigpu.AsyncClient(master.address) as client:
        run = asyncio.create_task(client.run("echo", b"x"))
        watch = asyncio.ensure_future(anext(client.watch()))
        await until_async(lambda: master.inputs and master.watches)
        await master.renew_beside(client)
        await until_async(lambda: master.streams == master.watches == 2, LIMIT_S, "streams on the new channel")
        master.settle_one()
        assert await asyncio.wait_for(run, LIMIT_S) == b"x"
        assert (await asyncio.wait_for(watch, LIMIT_S))[0].task_id == 7


async def test_a_call_is_repeated_when_the_channel_before_a_renewal_is_closed(
    master: TlsMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multigpu._transport.connection.UNARY_TIMEOUT_S", 0.1)
    master.unanswered_counts = 1
    async with multigpu.AsyncClient(master.address) as client:
        unanswered = asyncio.create_task(client.count())
        await until_async(lambda: master.counts == 1)
        await master.renew_beside(client)
        assert (await asyncio.wait_for(unanswered, LIMIT_S)).queued == 0
    assert master.counts == 4


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a unary call"])
async def test_a_run_reconnects_with_renewed_certificates(
    master: TlsMaster, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    # The unary call has closed the old channel, and waits before it opens another.
    monkeypatch.setattr("multigpu._transport.connection.backoff_s", lambda _: 1.0)
    async with multigpu.AsyncClient(master.address, connect_timeout_s=LIMIT_S) as client:
        run = asyncio.create_task(client.run("echo", b"x"))
        await until_async(lambda: master.inputs)
        await master.return_with_another_authority()
        counts = [asyncio.create_task(client.count())] if beside else []
        await until_async(lambda: client._core.stream._failures)
        master.settle_one()
        await master.start()
        assert await asyncio.wait_for(run, LIMIT_S) == b"x"
        await asyncio.wait_for(asyncio.gather(*counts), LIMIT_S)


async def test_a_watch_reconnects_with_renewed_certificates(master: TlsMaster) -> None:
    async with multigpu.AsyncClient(master.address) as client:
        watch = asyncio.ensure_future(anext(client.watch()))
        await until_async(lambda: master.watches)
        await master.return_with_another_authority()
        master.settle_one()
        await master.start()
        assert (await asyncio.wait_for(watch, LIMIT_S))[0].task_id == 7


async def test_a_certificate_that_cannot_be_read_is_an_error_of_waiting_calls(master: TlsMaster) -> None:
    async with multigpu.AsyncClient(master.address) as client:
        run = asyncio.create_task(client.run("echo", b"x"))
        await until_async(lambda: master.inputs)
        connection = client._core.connection
        await master.return_with_another_authority()
        await until_async(lambda: client._core.stream._failures)
        master.trusted.write_bytes(master.trusted.read_bytes() + b"\n# renewed once more\n")
        connection.refresh()
        master.trusted.unlink()
        with pytest.raises(multigpu.AccessError, match="can't be read"):
            await asyncio.wait_for(run, LIMIT_S)
