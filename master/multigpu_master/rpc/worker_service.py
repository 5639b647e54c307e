"""WorkerService: the worker's door."""

import itertools
from typing import Any

import grpc
import structlog
from multigpu.v1 import worker_service_pb2

from multigpu_master import wire
from multigpu_master.core import events as ev
from multigpu_master.driver import Driver
from multigpu_master.rpc.registration import parse
from multigpu_master.rpc.status import refuse
from multigpu_master.rpc.streams import serve_stream

PROTOCOL_VERSION = 1
log = structlog.get_logger()


class WorkerService:
    """See protos/multigpu/v1/worker_service.proto."""

    def __init__(self, driver: Driver, version: str, heartbeat_interval_s: float, session_timeout_s: float) -> None:
        self._driver = driver
        self._version = version
        self._heartbeat_interval_s = heartbeat_interval_s
        self._session_timeout_s = session_timeout_s
        self._sessions = itertools.count(1)

    async def Session(self, context: Any) -> None:
        data = await context.read()
        if data is grpc.aio.EOF:
            return
        first = await parse(worker_service_pb2.SessionRequest, data, context)
        hello = first.hello
        if not first.HasField("hello"):
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "the first frame of a session must carry hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            older = "worker" if hello.protocol_version < PROTOCOL_VERSION else "master"
            await refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the worker speaks protocol {hello.protocol_version}, this master {PROTOCOL_VERSION}; "
                f"upgrade the {older} "
                f"(worker version {hello.version or 'unknown'}, master version {self._version})",
            )
        try:
            info = wire.worker_info(hello)
        except wire.InvalidTaskError as error:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        session = next(self._sessions)
        outbox = self._driver.open_session(session)
        welcome = outbox.room_for(256).welcome
        welcome.session_id = str(session)
        welcome.version = self._version
        welcome.heartbeat_interval.CopyFrom(wire.duration(self._heartbeat_interval_s))
        welcome.session_timeout.CopyFrom(wire.duration(self._session_timeout_s))
        log.info("worker joined", worker_id=info.worker_id, session=session, leases=len(hello.leases))
        try:
            self._driver.handle(ev.Hello(session, info, [wire.held_lease(x) for x in hello.leases]))
            await self._take(first, session)
            numbering = _Numbering()

            async def on_message(data: bytes) -> None:
                await self._take(await parse(worker_service_pb2.SessionRequest, data, context), session)

            await serve_stream(context, outbox, on_message, numbering.number)
        finally:
            self._driver.close_session(session)
            log.info("worker's session ended", worker_id=info.worker_id, session=session)

    async def _take(self, frame: Any, session: int) -> None:
        handle = self._driver.handle
        if frame.partials:
            partials = [ev.PartialOutput(p.lease_id, p.index, p.data) for p in frame.partials]
            handle(ev.Partials(session, partials))
        for batch in frame.report_batches:
            start_s = wire.seconds_of(batch.start_time) if batch.HasField("start_time") else 0.0
            finish_s = wire.seconds_of(batch.finish_time) if batch.HasField("finish_time") else 0.0
            handle(ev.Reports(session, wire.reports_of(batch), start_s, finish_s))
        if frame.HasField("heartbeat"):
            beat = frame.heartbeat
            handle(
                ev.Heartbeat(
                    session,
                    [wire.held_lease(x) for x in beat.leases],
                    beat.last_frame,
                    wire.telemetry(beat.telemetry),
                    tuple(sorted(beat.resident_models)),
                    beat.draining,
                )
            )


class _Numbering:
    """Gives every frame the number of the last leases in it or before it."""

    def __init__(self) -> None:
        self._last = 0

    def number(self, frame: Any) -> None:
        self._last = max(self._last, frame.frame)
        frame.frame = self._last
