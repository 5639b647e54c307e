"""Answers of server-sent events: when they begin, and how they end."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from multigpu_gateway import http
from multigpu_gateway.errors import DisconnectedError, HttpError
from multigpu_gateway.events import event, send_events


class Caller:
    """A caller that has sent its request, and hangs up when it is told to."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        scope = {"method": "GET", "path": "/", "query_string": b"", "headers": []}
        self.request = http.Request(scope, self._receive, self._send, body_bytes_max=1, timeout_s=1)

    async def _receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.sent[1:])

    async def take(self, events: AsyncGenerator[bytes, None]) -> None:
        await send_events(self.request, events, lambda error: event(error.message), b"end")


async def events(*waits_s: float, fails: Exception | None = None) -> AsyncGenerator[bytes, None]:
    for number, wait_s in enumerate(waits_s):
        await asyncio.sleep(wait_s)
        yield event(number)
    if fails is not None:
        raise fails


async def test_events_are_sent_as_they_come() -> None:
    caller = Caller()
    await caller.take(events(0, 0))
    assert caller.sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in caller.sent[0]["headers"]
    assert caller.body == b"data: 0\n\ndata: 1\n\nend"
    assert caller.sent[-1]["more_body"] is False


async def valid_without_events() -> AsyncGenerator[bytes, None]:
    yield b""
    await asyncio.sleep(600)


async def late() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(0.2)
    raise HttpError(404, "nobody has it")
    yield b""


async def test_head_gets_the_headers_of_a_valid_stream_at_once() -> None:
    caller = Caller()
    caller.request.method = "HEAD"
    await caller.take(valid_without_events())
    assert (caller.sent[0]["status"], caller.body, caller.sent[-1]["more_body"]) == (200, b"", False)


async def test_head_of_an_invalid_stream_has_the_status_of_get() -> None:
    caller = Caller()
    caller.request.method = "HEAD"
    with pytest.raises(HttpError, match="wrong"):
        await caller.take(events(fails=HttpError(404, "wrong")))
    assert caller.sent == []


async def test_head_of_a_stream_that_ends_without_events_has_no_body() -> None:
    caller = Caller()
    caller.request.method = "HEAD"
    await caller.take(events())
    assert (caller.sent[0]["status"], caller.body, caller.sent[-1]["more_body"]) == (200, b"", False)


async def test_head_of_a_late_stream_that_fails_has_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEARTBEAT_S", 0.05)
    caller = Caller()
    caller.request.method = "HEAD"
    await caller.take(late())
    assert (caller.sent[0]["status"], caller.body, caller.sent[-1]["more_body"]) == (200, b"", False)


async def test_a_valid_stream_without_events_begins_at_once() -> None:
    caller = Caller()
    taking = asyncio.ensure_future(caller.take(valid_without_events()))
    await asyncio.sleep(0.1)
    assert [each["type"] for each in caller.sent] == ["http.response.start"]
    caller.gone.set()
    with pytest.raises(DisconnectedError):
        await taking


async def test_a_late_stream_begins_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEARTBEAT_S", 0.05)
    caller = Caller()
    await caller.take(events(0.2, 0.2))
    before, _, after = caller.body.partition(b"data: 0\n\n")
    between, _, end = after.partition(b"data: 1\n\n")
    assert set(before.split(b"\n\n")) == set(between.split(b"\n\n")) == {b": waiting", b""}
    assert end == b"end"


async def test_an_error_before_the_first_event_has_its_status() -> None:
    caller = Caller()
    with pytest.raises(HttpError, match="wrong"):
        await caller.take(events(fails=HttpError(400, "wrong")))
    assert caller.sent == []


async def test_an_error_after_it_is_an_event() -> None:
    caller = Caller()
    await caller.take(events(0, fails=HttpError(400, "wrong")))
    assert caller.body == b'data: 0\n\ndata: "wrong"\n\nend'


async def test_an_error_of_a_late_stream_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEARTBEAT_S", 0.05)
    caller = Caller()
    await caller.take(late())
    assert caller.body.endswith(b'data: "nobody has it"\n\nend')


async def test_a_hang_up_closes_the_events() -> None:
    caller = Caller()
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield event("again")
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    taking = asyncio.ensure_future(caller.take(endless()))
    await asyncio.sleep(0.1)
    caller.gone.set()
    with pytest.raises(DisconnectedError):
        await taking
    assert closed.is_set()


async def test_a_disconnect_as_the_block_ends_does_not_cancel_what_follows() -> None:
    caller = Caller()
    async with caller.request.while_connected():
        await asyncio.sleep(0)  # now the disconnect is awaited
        asyncio.get_running_loop().call_soon(caller.gone.set)
        await caller.gone.wait()
    await asyncio.sleep(0)
