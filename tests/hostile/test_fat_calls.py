"""The master's memory during calls with large headers, and after rejected calls with large requests."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from multigpu.daemon.grpc_server import METADATA_BYTES_MAX
from multigpu.v1 import task_pb2, task_service_pb2

from tests.hostile import http2
from tests.hostile.http2 import HEALTH, MIB, SUBMIT, Peer, announced, drive, rss_bytes
from tests.security.secured import METHODS, Caller, SecuredFleet, hello

TINY = [(b"a", b"")] * 3000
ENTRY_BYTES, REFERENCES = 100, 15_000
# Until a client acknowledges the server's settings, gRPC accepts large headers. This limits the master's memory for the
# waiting calls and one burst of new ones; further bursts must not add to it. Without limits, each takes gigabytes.
UNACKNOWLEDGED_MAX = 2048 * MIB
LARGE = 20 * MIB
CALLS = 20


@pytest.fixture
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredFleet]:
    with SecuredFleet(tmp_path_factory.mktemp("fat")) as it:
        it.admin.status("AdminService/GetStats")
        yield it
        assert it.fleet.master.alive, it.fleet.master.log()[-3000:]


@pytest.fixture
def grown(secured: SecuredFleet) -> Callable[[], int]:
    before = rss_bytes(secured.fleet.master.pid)
    return lambda: rss_bytes(secured.fleet.master.pid) - before


def _burst(peer: Peer, path: str, calls: int, *, tiny: bool) -> None:
    peer.remember(path.encode(), ENTRY_BYTES)
    block = http2.header_block(path.encode(), TINY) if tiny else http2.referring_block(path.encode(), REFERENCES)
    for _ in range(calls):
        peer.open(block, http2.END_STREAM)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("path", [SUBMIT, HEALTH, "/no.such.Service/Method"])
def test_large_headers_are_rejected(secured: SecuredFleet, grown: Callable[[], int], path: str, tiny: bool) -> None:
    with Peer(secured.fleet.address) as peer:
        peer.call(path, announced(0))
        drive([peer], 0.5, grown)  # the settings are acknowledged
        _burst(peer, path, 400, tiny=tiny)
        assert drive([peer], 20, grown) < 64 * MIB
        assert len(peer.ended) >= 400


@pytest.mark.slow
def test_large_headers_before_the_settings_are_acknowledged_are_bounded(
    secured: SecuredFleet, grown: Callable[[], int]
) -> None:
    peaks = []
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(Peer(secured.fleet.address, acknowledges=False)) for _ in range(2)]
            for peer in peers:
                _burst(peer, SUBMIT, 1000, tiny=False)
            peaks.append(drive(peers, 4, grown))
    assert max(peaks) < UNACKNOWLEDGED_MAX, [peak // MIB for peak in peaks]


@pytest.mark.slow
def test_open_health_calls_hold_no_large_headers(secured: SecuredFleet, grown: Callable[[], int]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            peer = stack.enter_context(Peer(secured.fleet.address, window=0))
            peer.call(HEALTH, announced(0))
            drive([peer], 0.2, grown)
            for _ in range(15):
                peer.call(HEALTH, announced(0), more=[(b"x", b"b" * 100)] * (METADATA_BYTES_MAX // 140))
            drive([peer], 0.5, grown)
        assert grown() < 64 * MIB


def _request(name: str) -> object:
    large = "x" * LARGE
    spec = task_pb2.TaskSpec(kind="echo", queue="day")
    inputs = [task_pb2.TaskInput(payload=large.encode())]
    greeting = hello("w1")
    greeting.hello.labels["x"] = large
    return {
        "Get": task_service_pb2.GetRequest(request_id=large),
        "List": task_service_pb2.ListRequest(page_token=large),
        "Cancel": task_service_pb2.CancelRequest(reason=large),
        "Submit": task_service_pb2.SubmitRequest(batches=[task_pb2.TaskBatch(spec=spec, inputs=inputs)]),
        "Run": [task_service_pb2.RunRequest(payload_key=large.encode())],
        "Run ids": [task_service_pb2.RunRequest(cancel_request_ids=["x" * 100] * 200_000)],
        "Session": [greeting],
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Get", "List", "Cancel", "Submit", "Run", "Run ids", "Session"])
def test_a_rejected_call_keeps_no_request(secured: SecuredFleet, name: str) -> None:
    caller: Caller = secured.as_role(
        "worker" if name == "Session" else "submit", queues=["night"] * (name != "Session")
    )
    request, method = _request(name), name.removesuffix(" ids")
    service = "WorkerService" if name == "Session" else "TaskService"
    assert f"{service}/{method}" in METHODS
    grown = 0
    for number in range(CALLS + 2):
        caller.status(f"{service}/{method}", request)
        if number == 1:
            grown = rss_bytes(secured.fleet.master.pid)
    time.sleep(0.5)
    assert rss_bytes(secured.fleet.master.pid) - grown < 4 * LARGE
