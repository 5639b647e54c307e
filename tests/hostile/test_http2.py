"""HTTP/2 frames from peers without a token have no effect on other callers of a real master."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from random import Random

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from multigpu.daemon.grpc_server import STREAMS_MAX
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu_master.rpc.health_service import CALLS_MAX, WATCHES_MAX

from tests.fleet import until
from tests.hostile import http2
from tests.hostile.http2 import HEALTH, MIB, RUN, SUBMIT, WATCH, Peer, announced, drive, rss_bytes
from tests.security.secured import METHODS, SecuredFleet

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PATHS = [f"/{m.containing_service.full_name}/{m.name}" for m in METHODS.values()]
# Memory that all peers without a token may hold, and changes of resident memory without them.
HELD_MAX = 64 * MIB
NOISE = 32 * MIB


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredFleet]:
    with SecuredFleet(tmp_path_factory.mktemp("http2")) as it:
        yield it
        with deaf(it, WATCH, HEALTH):
            assert it.fleet.master.stop() == 0, "the master must not wait for a peer that reads nothing"


@pytest.fixture
def grown(secured: SecuredFleet) -> Callable[[], int]:
    """How much the master's memory has grown."""
    before = rss_bytes(secured.fleet.master.pid)
    return lambda: rss_bytes(secured.fleet.master.pid) - before


@pytest.fixture(autouse=True)
def _check(secured: SecuredFleet) -> Iterator[None]:
    """After each test the master serves, and its log has only lines of the product."""
    yield
    assert secured.fleet.master.alive, secured.fleet.master.log()[-3000:]
    assert secured.admin.probe() is grpc.StatusCode.OK
    assert until(lambda: watched(secured)) == health_pb2.HealthCheckResponse.SERVING
    foreign = [line for line in secured.fleet.master.log().splitlines() if not _is_ours(line)]
    assert not foreign, foreign[:5]


def _is_ours(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def health(secured: SecuredFleet, service: str = "") -> int:
    with grpc.insecure_channel(secured.fleet.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20).status)


def watched(secured: SecuredFleet, service: str = "") -> int | None:
    """The first state of a Watch by another caller; None: too many are open."""
    with grpc.insecure_channel(secured.fleet.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service), timeout=20)
        try:
            return int(next(call).status)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            return None


@contextlib.contextmanager
def deaf(secured: SecuredFleet, *paths: str) -> Iterator[Peer]:
    """A peer that makes calls with an empty message and reads no byte of a response."""
    with Peer(secured.fleet.address, window=0) as peer:
        for path in paths:
            peer.call(path, announced(0))
        drive([peer], 0.5, lambda: 0)
        yield peer


@pytest.mark.parametrize("path", [SUBMIT, RUN, HEALTH])
def test_compressed_messages_are_not_decompressed(secured: SecuredFleet, grown: Callable[[], int], path: str) -> None:
    packed = http2.bomb(60 * MIB)
    with Peer(secured.fleet.address) as peer:
        for _ in range(100):
            peer.call(path, packed, more=[(b"grpc-encoding", b"gzip")])
        assert drive([peer], 30, grown) < NOISE
        assert len(peer.ended) == 100


def test_a_compressed_call_is_unimplemented(secured: SecuredFleet) -> None:
    with grpc.insecure_channel(secured.fleet.address, compression=grpc.Compression.Gzip) as channel:
        caller = secured.caller(secured.admin_token)
        caller.channel = channel
        request = task_service_pb2.SubmitRequest()
        request.batches.add(spec=task_pb2.TaskSpec(kind="none")).inputs.add(payload=bytes(1000))
        assert caller.status("TaskService/Submit", request) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("path", [*PATHS, REFLECTION, "/no.such.Service/Method"])
def test_a_message_without_a_token_is_not_read(secured: SecuredFleet, grown: Callable[[], int], path: str) -> None:
    with Peer(secured.fleet.address) as peer:
        for _ in range(20):
            peer.call(path, announced(63 * MIB), zeros=63 * MIB - 1)
        assert drive([peer], 30, grown) < NOISE
        assert len(peer.ended) == 20
        assert peer.sent_bytes < 20 * MIB


@pytest.mark.parametrize("zeros", [63 * MIB - 1, 63 * MIB])
def test_health_requests_hold_little_together(secured: SecuredFleet, grown: Callable[[], int], zeros: int) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(secured.fleet.address)) for _ in range(4)]
        for peer in peers:
            for _ in range(50):
                peer.call(HEALTH, announced(63 * MIB), zeros)
        assert drive(peers, 30, grown) < HELD_MAX
        assert sum(len(peer.ended) for peer in peers) == 200


def test_health_answers_while_other_calls_wait(secured: SecuredFleet) -> None:
    with Peer(secured.fleet.address) as peer:
        for _ in range(200):
            peer.call(HEALTH)
            drive([peer], 0.005, lambda: 0)
            if peer.opened % 20 == 0:
                assert health(secured) == health_pb2.HealthCheckResponse.SERVING
        drive([peer], 10, lambda: 0)
        assert len(peer.ended) == 200


def test_a_large_health_request_is_rejected(secured: SecuredFleet) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health(secured, "x" * 5000)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unread_watch_delays_no_other_call(secured: SecuredFleet) -> None:
    with deaf(secured, WATCH, WATCH, HEALTH):
        assert watched(secured) == health_pb2.HealthCheckResponse.SERVING
        assert watched(secured, "nothing") == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.slow
@pytest.mark.parametrize(("path", "window"), [(WATCH, 65_535), (WATCH, 0), (HEALTH, 0)])
def test_open_health_calls_are_limited(secured: SecuredFleet, grown: Callable[[], int], path: str, window: int) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(secured.fleet.address, window)) for _ in range(2)]
        for peer in peers:
            for _ in range(2000):
                peer.call(path, announced(0))
        assert drive(peers, 3, grown) < HELD_MAX
        assert health(secured) == health_pb2.HealthCheckResponse.SERVING
        assert sum(len(peer.ended) for peer in peers) >= 4000 - len(peers) * CALLS_MAX


def test_streams_of_a_connection_are_limited(secured: SecuredFleet) -> None:
    with deaf(secured, WATCH) as peer:
        assert peer.streams_max == STREAMS_MAX


def test_watches_of_all_connections_are_limited(secured: SecuredFleet) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(WATCHES_MAX // CALLS_MAX):
            stack.enter_context(deaf(secured, *[WATCH] * CALLS_MAX))
        assert watched(secured) is None
        assert health(secured) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("path", [b"/x\xff/y", b"\xff", SUBMIT.encode() + b"\xc3"])
def test_an_undecodable_path_ends_one_stream_only(secured: SecuredFleet, path: bytes) -> None:
    stream = secured.admin.open("AdminService/WatchWorkers", None)
    stream.next()
    with Peer(secured.fleet.address) as peer:
        peer.call(path, announced(0))
        drive([peer], 10, lambda: 0)
        assert len(peer.ended) == 1
    assert stream.call.is_active()
    stream.close()


def test_the_text_of_a_goaway_is_not_written_to_the_log(secured: SecuredFleet) -> None:
    with Peer(secured.fleet.address) as peer:
        peer.call(HEALTH, announced(0))
        peer.send(http2.frame(http2.GOAWAY, 0, 0, bytes(7) + b"\2" + b'\n{"event": "forged by a peer"}\n\x1b[31mred'))
        drive([peer], 2, lambda: 0)
    assert health(secured)
    assert "forged by a peer" not in secured.fleet.master.log()


def test_undecodable_metadata_does_not_fill_the_log(secured: SecuredFleet) -> None:
    before = len(secured.fleet.master.log())
    began_s = time.monotonic()
    with Peer(secured.fleet.address) as peer:
        for _ in range(300):
            peer.call(SUBMIT, more=[(b"x-text", b"\xff\n\x1b" * 1000)])
        drive([peer], 30, lambda: 0)
        assert len(peer.ended) == 300
    lines_max = 2 * (2 + time.monotonic() - began_s)
    assert len(secured.fleet.master.log()) - before < 5000 * lines_max


def test_a_large_message_with_a_token_is_served(secured: SecuredFleet) -> None:
    inputs = [task_pb2.TaskInput(payload=bytes(31 * MIB))] * 2
    request = task_service_pb2.SubmitRequest()
    request.batches.add(spec=task_pb2.TaskSpec(kind="none", wait_for_worker=True), inputs=inputs)
    options = (("grpc.max_send_message_length", 64 * MIB), ("grpc.use_local_subchannel_pool", 1))
    caller = secured.caller(secured.admin_token)
    caller.channel = grpc.insecure_channel(secured.fleet.address, options=options)
    results = caller.call("TaskService/Submit", request).results
    task_ids = [result.task_id for result in results]
    assert all(task_ids), results
    caller.call("TaskService/Cancel", task_service_pb2.CancelRequest(task_ids=task_ids))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_malformed_calls_without_a_token_have_no_effect(
    secured: SecuredFleet, grown: Callable[[], int], seed: int
) -> None:
    random = Random(f"http2/{seed}")
    for _ in range(5):
        assert http2.odd_round(random, secured.fleet.address, [*PATHS, HEALTH, WATCH, REFLECTION], grown) < HELD_MAX
    until(lambda: health(secured))
