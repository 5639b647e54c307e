"""Calls while the stream breaks, or the master restarts or is away; closing clients."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import multigpu
import pytest
from multigpu import AsyncClient
from multigpu.v1 import task_service_pb2

from tests.client.scripted_master import ScriptedMaster, ThreadedMaster
from tests.waiting import until_async


async def test_a_restarted_master_is_invisible(master: ScriptedMaster, client: AsyncClient) -> None:
    assert await client.run("echo", 0) == 0
    master.gate.clear()
    waiting = [asyncio.create_task(client.run("echo", i)) for i in range(100)]
    await until_async(lambda: len(master.inputs) == 101)
    await master.stop()
    await until_async(lambda: client._core.stream._failures)
    master.gate.set()
    await master.start()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 120) == list(range(100))
    assert await client.get(1) is not None


async def test_a_call_made_while_the_master_is_away_waits_for_it(master: ScriptedMaster, client: AsyncClient) -> None:
    assert await client.run("echo", 0) == 0
    await master.stop()
    run = asyncio.create_task(client.run("echo", 1))
    submit = asyncio.create_task(client.submit("echo", 2))
    await until_async(lambda: client._core.stream._failures)
    await master.start()
    assert await asyncio.wait_for(run, 120) == 1
    assert (await asyncio.wait_for(submit, 120)).id > 0


async def test_a_connected_master_that_has_not_answered_yet_is_waited_for() -> None:
    """Its first answer takes longer than `connect_timeout_s`, and the stream breaks before."""
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address, connect_timeout_s=0.3) as client:
        master.gate.clear()
        run = asyncio.create_task(client.run("echo", b"x"))
        await until_async(lambda: master.inputs)
        since = asyncio.get_running_loop().time()
        await until_async(lambda: asyncio.get_running_loop().time() > since + 0.4)
        await master.stop()
        master.gate.set()
        await master.start()
        assert await asyncio.wait_for(run, 120) == b"x"


async def test_one_attempt_to_connect_may_take_the_whole_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy that accepts at once and takes its time to reach the master."""
    monkeypatch.setattr("multigpu._transport.connection._ATTEMPT_S", 0.1)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_master, to_master = await asyncio.open_connection("127.0.0.1", master.port)
        await asyncio.gather(forward(reader, to_master, 0), forward(from_master, writer, 1.6))

    async with ScriptedMaster() as master:
        proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
        address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with multigpu.AsyncClient(address, connect_timeout_s=20) as client:
            assert await client.run("echo", b"x") == b"x"
        proxy.close()


async def test_closing_flushes_cancellations_first() -> None:
    async with ScriptedMaster() as master:
        async with multigpu.AsyncClient(master.address) as client:
            master.gate.clear()
            runs = [asyncio.create_task(client.run("echo", i)) for i in range(10)]
            await until_async(lambda: len(master.inputs) == 10)
            for run in runs:
                run.cancel()
            await asyncio.wait(runs)
        assert sorted(master.cancelled) == sorted(task.request_id for task in master.inputs)


async def test_an_address_without_a_master_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    client = multigpu.AsyncClient("127.0.0.1:1", connect_timeout_s=0.4)
    begin = asyncio.get_running_loop().time()
    with pytest.raises(multigpu.UnavailableError, match="mgpuctl up"):
        await client.run("echo", b"")
    with pytest.raises(multigpu.UnavailableError, match="mgpuctl up"):
        await client.count()
    with pytest.raises(multigpu.UnavailableError, match="mgpuctl up"):
        await anext(client.watch())
    with pytest.raises(multigpu.UnavailableError, match="mgpuctl up"):  # no item is at fault
        [each async for each in client.map("echo", [b"a", b"b"], return_exceptions=True)]
    with pytest.raises(multigpu.UnavailableError, match="mgpuctl up"):  # and again, not at once for having failed
        await client.run("echo", b"")
    assert asyncio.get_running_loop().time() - begin < 20
    await client.close()
    warnings = {record.getMessage().partition(" (")[0] for record in caplog.records if record.name == "multigpu"}
    assert warnings == {"master 127.0.0.1:1: it can't be reached"}


async def test_a_call_that_the_server_drops_is_repeated() -> None:
    dropped = 0

    class Dropping(ScriptedMaster):
        async def Count(self, request: Any, context: Any) -> Any:  # noqa: N802  the method's name
            nonlocal dropped
            dropped += 1
            if dropped < 3:
                await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
            return task_service_pb2.CountResponse()

    async with Dropping() as master, multigpu.AsyncClient(master.address) as client:
        await client.count()
        assert dropped == 3


async def test_another_server_at_the_address_is_an_error() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with multigpu.AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(multigpu.TransportError, match="no multigpu master"):
            await client.run("echo", b"")
        with pytest.raises(multigpu.TransportError, match="no multigpu master"):
            await client.submit("echo", b"")
    await server.stop(None)


@pytest.mark.parametrize("status", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL])
async def test_a_stream_that_always_fails_ends_in_an_error(
    status: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multigpu._transport.connection._BACKOFF_MAX_S", 0.02)
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address) as client:
        master.stream_status = status
        # A write at the end of the stream makes gRPC report an INTERNAL error in place of the master's status.
        with pytest.raises(multigpu.MultigpuError, match=r"scripted status|Internal error from Core"):
            await asyncio.wait_for(client.run("echo", b""), 120)
        if status is grpc.StatusCode.INVALID_ARGUMENT:  # about the call: it is not repeated
            assert master.streams < 8
        else:
            assert 8 <= master.streams <= 10
        master.stream_status = grpc.StatusCode.OK
        assert await client.run("echo", 1) == 1


async def test_closing_ends_pending_calls() -> None:
    async with ScriptedMaster() as master:
        client = multigpu.AsyncClient(master.address)
        master.gate.clear()
        run = asyncio.create_task(client.run("echo", b""))
        await until_async(lambda: master.inputs)
        await client.close()
        with pytest.raises(multigpu.ClientClosedError):
            await run
        with pytest.raises(multigpu.ClientClosedError):
            await client.run("echo", b"")
        with pytest.raises(multigpu.ClientClosedError):
            await client.count()
        await client.close()


async def test_closing_while_the_master_is_away() -> None:
    async with ScriptedMaster() as master:
        client = multigpu.AsyncClient(master.address)
        assert await client.run("echo", 1) == 1
        await master.stop()
        run = asyncio.create_task(client.run("echo", b""))
        await until_async(lambda: client._core.stream._failures)
        await asyncio.wait_for(client.close(), 120)
        with pytest.raises(multigpu.ClientClosedError):
            await run


async def test_closing_ends_calls_that_wait_for_the_window() -> None:
    async with ScriptedMaster() as master:
        client = multigpu.AsyncClient(master.address, max_in_flight=2)
        master.gate.clear()
        runs = [asyncio.create_task(client.run("echo", i)) for i in range(6)]
        await until_async(lambda: len(master.inputs) == 2)
        await client.close()
        results = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 120)
        assert [type(result) for result in results] == [multigpu.ClientClosedError] * 6


@pytest.mark.parametrize("name", ["run", "stream", "map", "submit", "get", "watch"])
def test_a_call_from_another_event_loop_raises_there(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def first(item: Any) -> Any:
        return await anext(item)

    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: client.run("echo", 1),
        "stream": lambda: first(client.stream("echo", 1)),
        "map": lambda: first(client.map("echo", [1])),
        "submit": lambda: client.submit("echo", 1),
        "get": lambda: client.get(1),
        "watch": lambda: first(client.watch()),
    }

    async def use() -> None:
        assert await client.run("echo", 1) == 1

    async def misuse() -> None:
        await calls[name]()

    with ThreadedMaster() as master:
        client = multigpu.AsyncClient(master.address)
        with asyncio.Runner() as runner:
            runner.run(use())
            with pytest.raises(multigpu.ClientClosedError, match="another event loop; make one for each"):
                asyncio.run(misuse())
            runner.run(use())  # the loop that it belongs to still has it
            runner.run(client.close())
        client = multigpu.AsyncClient(master.address)
        asyncio.run(use())
        with pytest.raises(multigpu.ClientClosedError, match="another event loop; make one for each"):
            asyncio.run(misuse())
    assert not [each for each in caplog.records if each.name == "multigpu"]  # gRPC may log something
