"""WorkerService: the worker's door."""

import itertools
import time
from typing import Any

import grpc
import structlog
from multigpu.v1 import worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.workers.info import HEALTHY, EngineReport
from multigpu_master.driver import Driver
from multigpu_master.payloads.shared_files import WRONG_KEY, Offer
from multigpu_master.rpc import queries
from multigpu_master.rpc.registration import parse
from multigpu_master.rpc.status import count_of, reject
from multigpu_master.rpc.streams import serve_stream
from multigpu_master.security.auth import CALLER
from multigpu_master.wire import devices as wire_devices
from multigpu_master.wire import messages as wire
from multigpu_master.wire import models as wire_models
from multigpu_master.worker_streams import SessionOutbox

# A master serves workers of its own version and of the one before: it is upgraded first.
PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION = 2, 2
# Results taken over before the worker is told, if not by its next heartbeat.
TELL_TAKEN = 16
# Windows follow the pace, and no worker fills a larger one; and the reports that a hello may list again.
WINDOW_TASKS_MAX, REPORTED_MAX = 16_384, 8192
LEASES = "leases in one frame of a worker's session"
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
            await reject(context, grpc.StatusCode.FAILED_PRECONDITION, "the first frame of a session must carry hello")
        if not OLDEST_PROTOCOL_VERSION <= hello.protocol_version <= PROTOCOL_VERSION:
            older = "worker" if hello.protocol_version < PROTOCOL_VERSION else "master"
            await reject(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the worker speaks protocol {hello.protocol_version}, this master {PROTOCOL_VERSION}; "
                f"upgrade the {older} "
                f"(worker version {hello.version or 'unknown'}, master version {self._version})",
            )
        try:
            info = wire.worker_info(hello)
        except wire.InvalidTaskError as error:
            await reject(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        caller = CALLER.get()
        if caller is not None and not caller.may_be(info.worker_id):
            await reject(
                context,
                grpc.StatusCode.PERMISSION_DENIED,
                f"the token is not for a worker called {info.worker_id!r}, but for {', '.join(caller.worker_ids)}; "
                "give the worker another --worker-id, or another token",
            )
        # Each takes time of the event loop.
        leases_max = 2 * min(info.window_tasks, WINDOW_TASKS_MAX) + REPORTED_MAX
        if len(hello.leases) > leases_max:
            await count_of(context, len(hello.leases), leases_max, LEASES)
        session = next(self._sessions)
        outbox = self._driver.workers.open(session)
        welcome = outbox.room_for(256).welcome
        welcome.session_id = str(session)
        welcome.version = self._version
        welcome.incarnation = self._driver.incarnations.current
        welcome.heartbeat_interval.CopyFrom(wire.duration(self._heartbeat_interval_s))
        welcome.session_timeout.CopyFrom(wire.duration(self._session_timeout_s))
        try:
            held = wire.held_leases(hello, self._driver.proofs)
            ids_end = self._driver.incarnations.ids_end(hello.incarnation)
            commands = self._driver.handle(ev.Hello(session, info, held, ids_end))
            # A hello also lists leases that were reported of late: those that count are what it still holds.
            leases = sum(len(c.adopted) for c in commands if isinstance(c, ev.Welcome))
            log.info("worker joined", worker_id=info.worker_id, session=session, leases=leases)
            taker = _Taker(self._driver, session, outbox, context, leases_max)
            await taker.take(first)
            numbering = _Numbering()

            async def on_message(data: bytes) -> None:
                await taker.take(await parse(worker_service_pb2.SessionRequest, data, context))

            await serve_stream(context, outbox, on_message, numbering.serialize)
        finally:
            self._driver.workers.close(session)


class _Taker:
    """What a worker's frames bring."""

    def __init__(self, driver: Driver, session: int, outbox: SessionOutbox, context: Any, leases_max: int) -> None:
        self._leases_max = leases_max  # in one frame
        self._driver = driver
        self._session = session
        self._outbox = outbox
        self._context = context
        self._results_taken = self._results_told = 0

    async def take(self, frame: Any) -> None:
        handle, session = self._driver.handle, self._session
        if frame.payload_key and not self._outbox.peer.show(frame.payload_key):
            await reject(self._context, grpc.StatusCode.INVALID_ARGUMENT, WRONG_KEY)
        if frame.partials:
            partials = [ev.PartialOutput(p.lease_id, p.index, p.data, p.content_type) for p in frame.partials]
            handle(ev.Partials(session, partials))
        batches = frame.report_batches
        count = len(batches)
        for batch in batches:
            count += len(batch.succeeded_lease_ids) + len(batch.reports)
        if count > self._leases_max:
            await count_of(self._context, count, self._leases_max, LEASES)
        end_s = time.monotonic() + queries.SLICE_S
        for batch in batches:
            if time.monotonic() > end_s:
                end_s = await queries.pause()
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
            if len(beat.leases) > self._leases_max:
                await count_of(self._context, len(beat.leases), self._leases_max, LEASES)
            try:
                catalog = wire_models.catalog(beat.catalog) if beat.HasField("catalog") else None
            except wire.InvalidTaskError as error:
                await reject(self._context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            handle(
                ev.Heartbeat(
                    session,
                    [wire.held_lease(x) for x in beat.leases],
                    beat.last_frame,
                    wire.telemetry(beat.telemetry),
                    wire_models.residents(beat),
                    beat.draining,
                    wire.health(beat.health) if beat.HasField("health") else HEALTHY,
                    EngineReport(
                        embedding_cache=(
                            wire.embedding_cache(beat.embedding_cache) if beat.HasField("embedding_cache") else None
                        ),
                        mps=wire_devices.mps(beat.mps) if beat.HasField("mps") else b"",
                        handlers=wire_devices.handlers(beat.handlers) if beat.HasField("handlers") else b"",
                    ),
                    catalog,
                    beat.occupied_slots,
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
