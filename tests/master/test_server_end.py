"""The master ends if its gRPC server ends with an internal error."""

import asyncio
from pathlib import Path

import pytest
from grpc._cython import cygrpc
from multigpu.config.config import MasterConfig
from multigpu_master.clock import Clock
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.rpc import transport
from multigpu_master.server import Master

from tests.hostile.http2 import Peer, drive


async def test_the_master_ends_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # gRPC's own server core fails on a path that is not UTF-8.
    own = cygrpc.AioServer._make_request_call_future
    monkeypatch.setattr(transport._Core, "_make_request_call_future", own)
    config = MasterConfig(listen="127.0.0.1:0", data_dir=tmp_path)
    master = Master(config, SqliteJournal(tmp_path, size_max_bytes=1 << 30), Clock())
    await master.start()
    await asyncio.to_thread(_send_a_path_that_is_no_text, master.address)
    async with asyncio.timeout(30):
        await master.stopped.wait()
    assert master.fatal is not None
    assert "gRPC server" in master.fatal
    await master.stop()


def _send_a_path_that_is_no_text(address: str) -> None:
    with Peer(address) as peer:
        peer.call(b"/x\xff/y")
        drive([peer], 5, lambda: 0)
