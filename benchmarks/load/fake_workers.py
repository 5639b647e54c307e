"""Fake workers, many to a process, for fleets larger than the machine.

    python -m benchmarks.load.fake_workers ADDRESS FIRST COUNT

Each has its own session, and uses the worker's connection, session and wire modules: hello, heartbeats at the
master's interval, leases, reports. There is no agent, engine or device behind them. Tasks of kind "echo" are answered
at once, and the sensors are constant.
"""

import asyncio
import os
import signal
import sys
import time

from multigpu.v1 import worker_service_pb2 as pb
from multigpu_worker.device.interface import DeviceInfo, Telemetry
from multigpu_worker.session import wire
from multigpu_worker.session.master_connection import MasterConnection, Metadata
from multigpu_worker.session.session import Report, ReportState, Session, SessionLimits

from benchmarks.relay import loop_runner

OFFERS = (("echo", ()),)
FRAME_BYTES_MAX = 4 << 20
TELEMETRY = Telemetry(memory_total_bytes=1 << 34, memory_used_bytes=1 << 30, utilization=0.5)
# They come one after the other, as hosts that boot do: so many a second in each process.
JOINS_A_SECOND = 100


class FakeWorker:
    """See the module. It is the StreamHandler of its connection."""

    def __init__(self, address: str, number: int) -> None:
        device = DeviceInfo(device_id=f"fake-{number}", name="fake", product="fake", memory_total_bytes=1 << 34)
        self.identity = wire.Identity(
            worker_id=f"fake-worker-{number}", host="fake", version="0", pid=os.getpid(), process=str(number),
            device=device, labels={}, slots=1, window_tasks=1024, window_bytes=64 << 20,
        )  # fmt: skip
        self.session = Session(SessionLimits())
        self.connection = MasterConnection(address, self)
        self._last_frame = 0
        self._heartbeat_s = 1.0
        self._heartbeat_due = False
        self._beat: asyncio.TimerHandle | None = None

    async def run(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self.connection.run()

    def hello(self) -> pb.SessionRequest:
        return wire.hello(self.identity, OFFERS, {}, self.session.held(hello=True))

    def connected(self, welcome: pb.SessionResponse, metadata: Metadata) -> None:
        del metadata  # it shares no files with the master
        self._heartbeat_s = wire.seconds_of(welcome.welcome.heartbeat_interval)
        self._last_frame = 0
        self.session.welcome(welcome.welcome.adopted_lease_ids)
        self._want_heartbeat()
        self.received(welcome)

    def _want_heartbeat(self) -> None:
        self._heartbeat_due = True
        self.connection.wake()
        self._beat = asyncio.get_running_loop().call_later(self._heartbeat_s, self._want_heartbeat)

    def received(self, response: pb.SessionResponse) -> None:
        self._last_frame = response.frame
        for batch in response.lease_batches:
            start_ns = time.time_ns()
            _, leases = wire.leases_of(batch)
            self.session.grant(leases)
            reports = [Report(lease, ReportState.SUCCEEDED, lease.payload) for lease in leases]
            self.session.report(start_ns, time.time_ns(), reports)
        for revocation in response.revocations:
            self.session.revoke(revocation.lease_id)
        if response.lease_batches:
            self.connection.wake()

    def next_frame(self) -> bytes | None:
        if self._heartbeat_due:
            self._heartbeat_due = False
            beat = wire.heartbeat(
                self.session.held(hello=False), last_frame=self._last_frame, telemetry=TELEMETRY,
                sample_ns=time.time_ns(), draining=False,
            )  # fmt: skip
            return beat.SerializeToString()
        if not self.session.has_unsent():
            return None
        return wire.request_of(self.session.take_frame(FRAME_BYTES_MAX, time.monotonic()))

    def disconnected(self, reason: str) -> None:
        if self._beat is not None:
            self._beat.cancel()
        self.session.stream_broken()


async def run(address: str, first: int, count: int) -> None:
    workers = [FakeWorker(address, number) for number in range(first, first + count)]
    running = asyncio.gather(*(worker.run(i / JOINS_A_SECOND) for i, worker in enumerate(workers)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        os._exit(0)  # a thousand channels need not be closed one by one


if __name__ == "__main__":
    loop_runner("uvloop")(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
