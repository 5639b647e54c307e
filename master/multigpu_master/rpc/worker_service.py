"""WorkerService: the worker's door."""

import itertools
from typing import Any

import grpc
import structlog
from multigpu.v1 import worker_service_pb2

from multigpu_master import wire, wire_devices, wire_models
from multigpu_master.core import events as ev
from multigpu_master.core.model import HEALTHY
from multigpu_master.driver import Driver, SessionOutbox
from multigpu_master.payloads import WRONG_KEY, Offer
from multigpu_master.rpc.registration import parse
from multigpu_master.rpc.status import refuse
from multigpu_master.rpc.streams import serve_stream
from multigpu_master.security.gate import CALLER

PROTOCOL_VERSION = 2
# Results taken over before the worker is told, if not by its next heartbeat.
TELL_TAKEN = 16
log = structlog.get_logger()


class WorkerService:
    """See protos/multigpu/v1/worker_service.proto."""

    def __init__(
        self, driver: Driver, version: str, heartbeat_interval_s: float, session_timeout_s: float, offer: Offer
    ) -> None:
        self._offer = offer
        self._driver = driver
        self._version = version
        self._heartbeat_interval_s = heartbeat_interval_s
        self._session_timeout_s = session_timeout_s
        self._sessions = itertools.count(1)

    async def Session(self, context: Any) -> None:
        if self._offer:
            await context.send_initial_metadata(self._offer)
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
        caller = CALLER.get()
        if caller is not None and not caller.may_be(info.worker_id):
            await refuse(
                context,
                grpc.StatusCode.PERMISSION_DENIED,
                f"the token is not for a worker called {info.worker_id!r}, but for {', '.join(caller.worker_ids)}; "
                "give the worker another --worker-id, or another token",
            )
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
            taker = _Taker(self._driver, session, outbox, context)
            await taker.take(first)
            numbering = _Numbering()

            async def on_message(data: bytes) -> None:
                await taker.take(await parse(worker_service_pb2.SessionRequest, data, context))

            await serve_stream(context, outbox, on_message, numbering.serialize)
        finally:
            self._driver.close_session(session)
            log.info("worker's session ended", worker_id=info.worker_id, session=session)


class _Taker:
    """What a worker's frames bring."""

    def __init__(self, driver: Driver, session: int, outbox: SessionOutbox, context: Any) -> None:
        self._driver = driver
        self._session = session
        self._outbox = outbox
        self._context = context
        self._results_taken = self._results_told = 0

    async def take(self, frame: Any) -> None:
        handle, session = self._driver.handle, self._session
        if frame.payload_key and not self._outbox.peer.show(frame.payload_key):
            await refuse(self._context, grpc.StatusCode.INVALID_ARGUMENT, WRONG_KEY)
        if frame.partials:
            partials = [ev.PartialOutput(p.lease_id, p.index, p.data) for p in frame.partials]
            handle(ev.Partials(session, partials))
        for batch in frame.report_batches:
            start_s = wire.seconds_of(batch.start_time) if batch.HasField("start_time") else 0.0
            finish_s = wire.seconds_of(batch.finish_time) if batch.HasField("finish_time") else 0.0
            handle(wire.reports_of(batch, session, start_s, finish_s, self._outbox.peer))
            self._results_taken += len(batch.result_places)
        # Nobody waits for this, so it need not be told each time.
        untold = self._results_taken - self._results_told
        if untold >= TELL_TAKEN or (untold and frame.HasField("heartbeat")):
            self._results_told = self._outbox.room_for(16).results_taken = self._results_taken
        if frame.HasField("heartbeat"):
            beat = frame.heartbeat
            try:
                catalog = wire_models.catalog(beat.catalog) if beat.HasField("catalog") else None
            except wire.InvalidTaskError as error:
                await refuse(self._context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            handle(
                ev.Heartbeat(
                    session,
                    [wire.held_lease(x) for x in beat.leases],
                    beat.last_frame,
                    wire.telemetry(beat.telemetry),
                    wire_models.residents(beat),
                    beat.draining,
                    wire.health(beat.health) if beat.HasField("health") else HEALTHY,
                    wire.embedding_cache(beat.embedding_cache) if beat.HasField("embedding_cache") else None,
                    wire_devices.mps(beat.mps) if beat.HasField("mps") else b"",
                    catalog,
                )
            )


class _Numbering:
    """Gives every frame the number of the last leases in it or before it."""

    def __init__(self) -> None:
        self._last = 0

    def serialize(self, frame: worker_service_pb2.SessionResponse) -> bytes:
        self._last = max(self._last, frame.frame)
        frame.frame = self._last
        return frame.SerializeToString()
