"""Streams that end in two ways at once."""

from typing import Any

import grpc
import pytest
from multigpu_master.errors import CallError, InvalidArgumentError
from multigpu_master.outbox import Outbox, serve_stream


class _Context:
    async def read(self) -> bytes:
        return b"x"


async def test_a_stream_that_is_aborted_while_its_message_is_rejected_ends_once() -> None:
    """A session is taken over while the master rejects a frame of its worker."""
    outbox: Outbox[Any] = Outbox(bytearray, None)  # type: ignore[arg-type]  # no large payloads

    async def on_message(_data: bytes) -> None:
        outbox.abort(CallError("taken over", grpc.StatusCode.ABORTED))
        raise InvalidArgumentError("no such thing")

    with pytest.raises(CallError, match="taken over") as ended:
        await serve_stream(_Context(), outbox, on_message, bytes)
    assert ended.value.code is grpc.StatusCode.ABORTED
