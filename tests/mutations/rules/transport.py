"""What a peer without a token must not do to a master, tried on one in this process: its memory is ours."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from multigpu.config.config import MasterConfig
from multigpu_master.clock import Clock
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.rpc.health_service import CALLS_MAX, WATCHES_MAX
from multigpu_master.server import Master

from tests.hostile.http2 import HEALTH, MIB, SUBMIT, WATCH, Peer, announced, bomb, drive, rss_bytes

HELD_MAX = 64 * MIB


def check(_seed: int) -> None:
    """AssertionError: peers without a token hold too much of the master's memory, or end its service."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_attacked(Path(folder)))


async def _attacked(folder: Path) -> None:
    config = MasterConfig(listen="127.0.0.1:0", data_dir=folder, require_tokens=True)
    master = Master(config, SqliteJournal(folder, size_max_bytes=1 << 30), Clock())
    await master.start()
    try:
        before = rss_bytes(os.getpid())
        await asyncio.to_thread(_attack, master.address, lambda: rss_bytes(os.getpid()) - before)
        assert not master.stopped.is_set(), "a peer without a token ended the master"
    finally:
        await master.stop()


def _attack(address: str, grown: Callable[[], int]) -> None:
    calls: dict[str, tuple[str | bytes, bytes, int, list[tuple[bytes, bytes]]]] = {
        "a compressed message": (HEALTH, bomb(60 * MIB), 0, [(b"grpc-encoding", b"gzip")]),
        "a message without a token": (SUBMIT, announced(63 * MIB), 63 * MIB - 1, []),
        "a health request": (HEALTH, announced(63 * MIB), 63 * MIB - 1, []),
        "a path that is no text": (b"/x\xff/y", b"", 0, []),
    }
    for name, (path, begin, zeros, more) in calls.items():
        with Peer(address) as peer:
            for _ in range(10):
                peer.call(path, begin, zeros, more)
            held = drive([peer], 10, grown)
            assert held < HELD_MAX, f"{name}: too much is held"
            assert len(peer.ended) == 10, f"{name}: not every call ended"
    with contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(Peer(address, window=0)) for _ in range(10)]
        for peer in deaf:
            for _ in range(100):
                peer.call(WATCH, announced(0))
        drive(deaf[:1], 1, grown)
        assert len(deaf[0].ended) >= 100 - CALLS_MAX, "a connection has too many calls of health open"
        drive(deaf, 2, grown)
        assert sum(len(peer.ended) for peer in deaf) >= 1000 - WATCHES_MAX, "too many Watch streams of health are open"
