"""Streams that end in two ways at once, or in an unusual way."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from multigpu_master.errors import CallError, InvalidArgumentError
from multigpu_master.journal.payload_files import Payloads
from multigpu_master.outbox import Outbox
from multigpu_master.rpc.serve_stream import serve_stream
from multigpu_master.wire.payloads import Peer


class _Context:
    async def read(self) -> bytes:
        return b"x"


class _Silent:
    async def read(self) -> bytes:
        await asyncio.sleep(600)
        return b"x"


async def test_a_stream_that_is_aborted_while_its_message_is_rejected_ends_once(tmp_path: Path) -> None:
    """A session is taken over while the master rejects a frame of its worker."""
    outbox: Outbox[Any] = Outbox(bytearray, Peer(Payloads(tmp_path, lambda _name: False)))

    async def on_message(_data: bytes) -> None:
        outbox.abort(CallError("taken over", grpc.StatusCode.ABORTED))
        raise InvalidArgumentError("no such thing")

    with pytest.raises(CallError, match="taken over") as ended:
        await serve_stream(_Context(), outbox, on_message, bytes)
    assert ended.value.code is grpc.StatusCode.ABORTED


async def test_a_stream_whose_frame_can_not_be_serialized_ends(tmp_path: Path) -> None:
    """It stayed open, and sent nothing any more."""
    outbox: Outbox[Any] = Outbox(bytearray, Peer(Payloads(tmp_path, lambda _name: False)))
    outbox.frame_for(1)

    async def on_message(_data: bytes) -> None:
        raise AssertionError

    def serialize(_frame: Any) -> bytes:
        raise MemoryError("no room for a frame")

    with pytest.raises(CallError, match="no room for a frame"):
        await asyncio.wait_for(serve_stream(_Silent(), outbox, on_message, serialize), 120)
