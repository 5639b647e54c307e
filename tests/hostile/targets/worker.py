"""The worker's targets: random frames from a master, and damaged frames from an engine.

The agent is real, without its processes. A *malicious* engine is outside of the threat model: a user's handler runs in
it with the rights of the agent, and could kill the agent. An engine with damaged memory, or that writes to the wrong
descriptor, is inside. Its frames are rejected with `FrameError`, which ends the engine.
"""

import asyncio
import contextlib
import marshal
import socket
import struct
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf.message import DecodeError
from multigpu.config.config import WorkerConfig
from multigpu.v1 import worker_service_pb2 as pb
from multigpu_worker.composition import compose
from multigpu_worker.device.cpu import CpuDevice
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.registry import KindInfo
from multigpu_worker.processes.batch import EngineBatch
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.blobs import BlobMemory
from multigpu_worker.repository.model import Scan
from multigpu_worker.session import wire
from multigpu_worker.session.batcher import Batcher, BatchLimits
from multigpu_worker.session.lease import Lease, Spec
from multigpu_worker.session.session import Session, SessionLimits

from tests.hostile.targets.base import Crash, Target, mute
from tests.hostile.targets.inputs import Maker, pack, unpack


def identity_of(device: CpuDevice) -> wire.Identity:
    return wire.Identity(
        worker_id="w", host="h", version="0", pid=1, process="p", device=device.info, labels={}, slots=1,
        window_tasks=64, window_bytes=1 << 20,
    )  # fmt: skip


class LocalAgent:
    """An agent whose link and engine are controlled by the test."""

    def __init__(self) -> None:
        mute()
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        device = CpuDevice()
        settings = EngineSettings(device="cpu", slots=1, threads=1, handlers=(), models={})
        self.agent = compose(WorkerConfig(), identity_of(device), device, settings, Scan)
        self.agent.pool.default.kinds = {"echo": KindInfo(kind="echo", one_by_one=True)}

    def close(self) -> None:
        self.loop.close()

    def session(self, data: bytes) -> None:
        """One session: the master's frames in order, with the agent's frames in between."""
        self.loop.run_until_complete(self._session(unpack(data)))

    async def _session(self, frames: list[bytes]) -> None:
        stream = self.agent.stream
        self.agent.dispatcher.session = Session(SessionLimits())
        self.agent.dispatcher.batcher = Batcher(BatchLimits(tasks_max=256, tokens_max=16_384), 1)
        stream.hello().SerializeToString()
        welcomed = False
        for data in frames:
            try:
                frame = pb.SessionResponse.FromString(data)
            except DecodeError:
                break  # gRPC ends the stream
            try:
                if not welcomed:
                    if not frame.HasField("welcome"):
                        break
                    welcomed = True
                    stream.connected(frame, ())
                else:
                    stream.received(frame)
            except wire.BadFrameError:
                break  # the link ends the stream
            for _ in range(100):
                if stream.next_frame() is None:
                    break
            else:
                raise Crash("the worker sends frames without end")
        if not 0.01 <= stream.heartbeat_s <= 60.0:
            raise Crash(f"the worker would send a heartbeat each {stream.heartbeat_s} s")
        stream.disconnected("the test ends the stream")


def session_frames(maker: Maker) -> bytes:
    frames = [maker.wire(pb.SessionResponse.DESCRIPTOR) for _ in range(maker.rng.choice((1, 2, 4)))]
    if maker.rng.random() < 0.8:
        welcome = maker.message(pb.Welcome.DESCRIPTOR)
        frames.insert(0, pb.SessionResponse(welcome=welcome).SerializeToString())
    return pack(frames)


def _value(rng: Random, depth: int = 0) -> object:
    """A random value of an engine's message."""
    if depth < 4 and rng.random() < 0.4:
        many = [_value(rng, depth + 1) for _ in range(rng.randrange(5))]
        return rng.choice((tuple, list))(many)
    words: list[object] = ["", "reports", "ready", "loaded", "load_failed", "self_test", "echo", b"", b"x"]
    return rng.choice([0, 1, 2, -1, 2**63, 2**70, None, True, 0.5, float("nan"), {}, {1: 2}, *words])


def _engine_frame(maker: Maker) -> bytes:
    """One or two frames, valid or not, with or without blobs, and with stray bytes in between."""
    rng = maker.rng
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(200))
    fields: list[object] = [
        "reports", rng.choice((1, 7)), 0, 0, [(1, b"r", "")], [], [], [], [], rng.random() < 0.5, 0, {"hits": 1},
    ]  # fmt: skip
    for _ in range(rng.choice((0, 0, 1, 3))):
        fields[rng.randrange(len(fields))] = _value(rng)
    message = tuple(fields) if rng.random() < 0.8 else _value(rng)
    body = marshal.dumps(cast("Any", message)) + b"mgpu"
    blobs = rng.choice((0, 0, 0, 1, 2))
    table = b"".join(struct.pack("<QQ", rng.choice((0, 5, 2**63)), rng.choice((0, 2**64 - 1))) for _ in range(blobs))
    head = struct.pack("<III", frames._check(len(body), blobs), len(body), blobs)
    data = (head + table + body) * rng.choice((1, 2))
    if rng.random() < 0.5:  # a handler printed to the wrong descriptor
        at = rng.randrange(len(data))
        data = data[:at] + rng.choice((b"hello\n", rng.randbytes(rng.randrange(1, 40)))) + data[at:]
    if rng.random() < 0.2:  # it died while writing
        data = data[: rng.randrange(len(data))]
    return data


class Wire:
    """The socket between an agent and an engine."""

    def __init__(self) -> None:
        self._local = LocalAgent()  # not shared: a value of a wrong type may stay in it
        self._memory = BlobMemory.create()

    def feed(self, data: bytes) -> None:
        agent = self._local.agent
        process = agent.pool.default
        session = agent.dispatcher.session = Session(SessionLimits())
        lease = Lease(1, 1, 1, Spec(kind="echo"), b"")
        session.leases[1] = lease
        process.batches = {1: EngineBatch(1, {1: lease}, True, lease.spec)}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            channel = SimpleNamespace(send=lambda *_: None)
            process.child = cast("Any", SimpleNamespace(channel=channel, ready=False, killed=False, kill=lambda: None))
            decoder = frames.Decoder(self._memory.up)
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(frames.FrameError, EOFError):
                while True:
                    for message, blobs in decoder.feed(ours):
                        process.apply_frame(message, blobs)
        process.child = None
        if 1 in process.batches and 1 in session.leases and 1 not in process.batches[1].leases:
            raise Crash("a lease was lost: its task would wait for ever")


def targets(local_agent: LocalAgent) -> list[Target]:
    return [
        Target(name="worker Session, from the master", make=session_frames, feed=local_agent.session),
        Target(name="worker ipc, from the engine", make=_engine_frame, feed=Wire().feed),
    ]
