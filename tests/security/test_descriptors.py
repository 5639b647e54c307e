"""A real master with few file descriptors, and peers without a token that take them."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu_master.server import DESCRIPTORS_KEPT

from tests.fleet import until
from tests.security.secured import SecuredFleet

LIMIT = 600
MIB = 1 << 20


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredFleet]:
    """Its soft limit is lower than its hard limit."""
    with SecuredFleet(tmp_path / "few", prefix=("prlimit", f"--nofile={LIMIT // 2}:{LIMIT}")) as it:
        yield it


def descriptors(secured: SecuredFleet) -> int:
    return len(list(Path(f"/proc/{secured.fleet.master.pid}/fd").iterdir()))


@contextlib.contextmanager
def idle_connections(secured: SecuredFleet, size: int) -> Iterator[None]:
    """Connections that send nothing."""
    host, _, port = secured.fleet.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(size):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        yield


def test_idle_connections_leave_descriptors_to_the_journal_and_the_audit_log(secured: SecuredFleet) -> None:
    assert secured.fleet.master.events("master ready")[0]["descriptors"] == LIMIT
    secured.admin.submit("q", b"first")
    with idle_connections(secured, 2 * LIMIT):
        until(lambda: descriptors(secured) > LIMIT - DESCRIPTORS_KEPT, what="the connections")
        for _ in range(3):
            (result,) = secured.admin.submit("q", bytes(MIB))
            assert result.task_id, result
        secured.create("meanwhile", "read")
        assert "meanwhile" in (secured.fleet.data_dir / "audit.log").read_text()
        assert descriptors(secured) < LIMIT - DESCRIPTORS_KEPT // 2
    until(lambda: descriptors(secured) < LIMIT // 4, what="their end")
    assert secured.caller(secured.admin_token).call("AdminService/GetStats", admin_pb.GetStatsRequest())
    assert secured.fleet.master.stop() == 0
