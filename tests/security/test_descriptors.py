"""A real master with few file descriptors, and peers without a token who take all that they get."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu_master.server import DESCRIPTORS_KEPT

from tests.fleet import until
from tests.security.house import House

LIMIT = 600
MIB = 1 << 20


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """Its soft limit is lower than its hard one."""
    it = House(tmp_path / "few", prefix=("prlimit", f"--nofile={LIMIT // 2}:{LIMIT}"))
    try:
        yield it
    finally:
        it.close()


def descriptors(house: House) -> int:
    return len(list(Path(f"/proc/{house.fleet.master.pid}/fd").iterdir()))


@contextlib.contextmanager
def crowd(house: House, size: int) -> Iterator[None]:
    """Connections that say nothing."""
    host, _, port = house.fleet.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(size):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        yield


def test_idle_connections_leave_the_journal_and_the_audit_their_descriptors(house: House) -> None:
    assert house.fleet.master.events("master ready")[0]["descriptors"] == LIMIT
    house.admin.submit("q", b"first")
    with crowd(house, 2 * LIMIT):
        until(lambda: descriptors(house) > LIMIT - DESCRIPTORS_KEPT, what="the connections")
        for _ in range(3):
            (result,) = house.admin.submit("q", bytes(MIB))
            assert result.task_id, result
        house.create("in-a-crowd", "read")
        assert "in-a-crowd" in (house.fleet.data_dir / "audit.log").read_text()
        assert descriptors(house) < LIMIT - DESCRIPTORS_KEPT // 2
    until(lambda: descriptors(house) < LIMIT // 4, what="their end")
    assert house.caller(house.admin_token).call("AdminService/GetStats", admin_pb.GetStatsRequest())
    assert house.fleet.master.stop() == 0
