"""The limits of a connection, with a server in the process of the test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from multigpu.config.config import GatewayConfig
from multigpu_gateway import server
from multigpu_gateway.app import Gateway
from multigpu_gateway.errors import HttpError
from multigpu_gateway.routes import Route
from multigpu_gateway.server import HttpServer

BODY = bytes(64 << 20)  # more than the kernel takes for a reader that reads nothing
Reader = asyncio.StreamReader


@asynccontextmanager
async def serving(finished: asyncio.Event) -> AsyncIterator[Reader]:
    """A connection that has asked for BODY. `finished`: set when it was sent, or can't be."""

    async def answer(_scope: Any, _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": BODY, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        finished.set()

    running = HttpServer(GatewayConfig(http="127.0.0.1:0"), answer)
    serve = asyncio.create_task(running.serve())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        yield reader
        writer.close()
    finally:
        running.stop()
        await serve


async def test_a_reader_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept its request, and one of the connections that there may be, until it closed it."""
    monkeypatch.setattr(server, "READER_TIMEOUT_S", 0.2)
    finished = asyncio.Event()
    async with serving(finished) as reader:
        async with asyncio.timeout(120):
            await finished.wait()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(len(BODY))


async def test_a_slow_reader_gets_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READER_TIMEOUT_S", 2.0)
    finished = asyncio.Event()
    async with serving(finished) as reader:
        taken = 0
        for _ in range(24):
            taken += len(await reader.readexactly(1 << 20))
            await asyncio.sleep(0.15)
        assert not finished.is_set()
        assert taken + len(await reader.read()) >= len(BODY)
        assert finished.is_set()


async def test_an_answer_that_breaks_off_counts_for_its_route_and_status() -> None:
    """It counted as a disconnect of the client, of no route, and was logged as an error of the server."""

    async def parts() -> AsyncIterator[bytes]:
        yield b"x"
        raise HttpError(503, "the master restarts")

    async def serve(request: Any, _pair: Any) -> None:
        await request.respond_parts(parts(), b"text/plain")

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    gateway = Gateway(GatewayConfig(master="127.0.0.1:1"))
    gateway._routes = {"/x": Route({"GET": serve}, lambda _: {})}
    scope = {"type": "http", "method": "GET", "path": "/x", "query_string": b"", "headers": []}
    await gateway(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
    await gateway.close()
    assert sent[-1]["more_body"]  # so the server closes the connection
    assert 'mgpu_gateway_requests_total{route="/x",status="503"} 1.0' in gateway.metrics.text().decode()
