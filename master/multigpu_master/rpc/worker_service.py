"""WorkerService: the sessions of workers."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import grpc
import structlog
from multigpu._transport.names import escaped
from multigpu.v1 import worker_service_pb2
from multigpu.v1.admin_service_pb2 import WorkerRejection

from multigpu_master.core import events as ev
from multigpu_master.core.workers.info import WorkerInfo
from multigpu_master.driver import Driver
from multigpu_master.errors import (
    CallError,
    DeniedError,
    InvalidArgumentError,
    InvalidMessageError,
    PreconditionError,
    call_error,
)
from multigpu_master.journal.payload_files import WRONG_KEY, InitialMetadata
from multigpu_master.rpc import queries
from multigpu_master.rpc.requests import check_count, parse
from multigpu_master.rpc.serve_stream import serve_stream
from multigpu_master.security.auth import current_caller
from multigpu_master.wire.leases import held_leases, partial_outputs, reports_of
from multigpu_master.wire.times import duration, seconds_of, timestamp
from multigpu_master.wire.validation import NAME_BYTES_MAX
from multigpu_master.wire.workers import check_hello_size, heartbeat, worker_info
from multigpu_master.worker_streams import SessionFrame, SessionOutbox

PROTOCOL_VERSION = 2
# The master acknowledges results received by reference once there are this many, or at the worker's next heartbeat.
ACKNOWLEDGE_RESULTS = 16
# A frame names at most 2 * min(window_tasks, WINDOW_TASKS_MAX) + REPORTED_MAX leases: a hello also lists recently
# reported leases.
WINDOW_TASKS_MAX, REPORTED_MAX = 16_384, 8192
IN_USE = (
    "another process has a session as worker {worker_id!r}; stop one of them, or give each its own --worker-id. If the "
    "other's host lost power, the other session ends within session_timeout_s"
)
PROCESS_CHARS_MAX, REJECTIONS_MAX = 64, 100  # length of hello.process; rejections that GetStats lists
# While more bytes wait to be sent to a worker than UNSENT_BYTES plus twice its window (at most
# UNSENT_WINDOWS_BYTES_MAX), the master reads no frames from the worker, because a heartbeat may cause revocations that
# are larger than the heartbeat. So the session of a worker that reads nothing times out.
UNSENT_BYTES, UNSENT_WINDOWS_BYTES_MAX = 64 << 20, 1 << 30
LEASES_IN_FRAME = "leases in one frame of a worker's session"
log = structlog.get_logger()


class WorkerService:
    """See protos/multigpu/v1/worker_service.proto."""

    def __init__(
        self,
        driver: Driver,
        version: str,
        heartbeat_interval_s: float,
        session_timeout_s: float,
        payload_metadata: InitialMetadata,
    ) -> None:
        self._payload_metadata = payload_metadata
        self._driver = driver
        self._version = version
        self._heartbeat_interval_s = heartbeat_interval_s
        self._session_timeout_s = session_timeout_s
        self._sessions = itertools.count(1)

    async def Session(self, context: Any) -> None:
        if self._payload_metadata:
            await context.send_initial_metadata(self._payload_metadata)
        data = await context.read()
        if data is grpc.aio.EOF:
            return
        first = parse(worker_service_pb2.SessionRequest, data)
        try:
            await self._serve(first, context)
        except (CallError, InvalidMessageError) as error:
            failure = call_error(error, "Session")
            if failure.code not in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE):  # they end valid sessions
                worker_id, rejections = escaped(first.hello.worker_id)[:NAME_BYTES_MAX], self._driver.workers.rejections
                seen = {"worker_id": worker_id, "peer": context.peer(), "reason": str(failure)}
                log.warning("worker rejected", pid=first.hello.pid, **seen)
                rejections.pop(worker_id, None)
                rejections[worker_id] = WorkerRejection(reject_time=timestamp(time.time()), **seen)
                if len(rejections) > REJECTIONS_MAX:
                    del rejections[next(iter(rejections))]
            raise failure from None

    async def _serve(self, first: Any, context: Any) -> None:
        info = self._check_hello(first)
        hello = first.hello
        leases_max = 2 * min(info.window_tasks, WINDOW_TASKS_MAX) + REPORTED_MAX
        check_count(len(hello.leases), leases_max, LEASES_IN_FRAME)
        check_count(len(hello.process), PROCESS_CHARS_MAX, "characters in process")
        if self._driver.workers.has_other_process(info.worker_id, hello.process):
            raise CallError(IN_USE.format(worker_id=info.worker_id), grpc.StatusCode.ALREADY_EXISTS)
        caller = current_caller()
        token_id = caller.token_id if caller is not None else ""
        session = next(self._sessions)
        outbox = self._driver.workers.open(session, hello.process)
        self._fill_welcome(outbox.frame_for(256).message.welcome, session)
        try:
            held = held_leases(hello, self._driver.proofs)
            ids_end = self._driver.incarnations.ids_end(hello.incarnation)
            commands = self._driver.handle(ev.Hello(session, info, held, ids_end, token_id))
            # Count adopted leases only: a hello also lists recently reported leases, which the worker no longer holds.
            leases = sum(len(c.adopted) for c in commands if isinstance(c, ev.Welcome))
            self._driver.workers.rejections.pop(info.worker_id, None)
            log.info("worker joined", worker_id=info.worker_id, session=session, leases=leases)
            reader = SessionReader(self._driver, session, outbox, leases_max)
            await reader.read(first)

            async def on_message(data: bytes) -> None:
                await reader.read(parse(worker_service_pb2.SessionRequest, data))
                await outbox.wait_below(unsent_max)

            last_number = 0
            unsent_max = UNSENT_BYTES + min(2 * info.window_bytes, UNSENT_WINDOWS_BYTES_MAX)

            def serialize(frame: SessionFrame) -> bytes:
                """Serializes a frame. A frame without leases gets the number of the last frame with leases."""
                nonlocal last_number
                last_number = frame.message.frame = max(last_number, frame.message.frame)
                return frame.serialize()

            await serve_stream(context, outbox, on_message, serialize)
        finally:
            self._driver.workers.close(session)

    def _check_hello(self, first: Any) -> WorkerInfo:
        """Returns the worker's description. Raises CallError or InvalidMessageError if the worker may not join."""
        hello = first.hello
        if not first.HasField("hello"):
            raise PreconditionError("the first frame of a session must carry hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            older = "worker" if hello.protocol_version < PROTOCOL_VERSION else "master"
            raise PreconditionError(
                f"the worker speaks protocol {hello.protocol_version}, this master {PROTOCOL_VERSION}; upgrade the "
                f"{older} (worker version {hello.version or 'unknown'}, master version {self._version})"
            )
        check_hello_size(hello)
        info = worker_info(hello)
        caller = current_caller()
        if caller is not None and not caller.may_use_worker_id(info.worker_id):
            names = ", ".join(caller.worker_ids)
            raise DeniedError(
                f"the token is not for a worker called {info.worker_id!r}, but for {names}; "
                "give the worker another --worker-id, or another token"
            )
        return info

    def _fill_welcome(self, welcome: worker_service_pb2.Welcome, session: int) -> None:
        welcome.session_id = str(session)
        welcome.version = self._version
        welcome.incarnation = self._driver.incarnations.current
        welcome.heartbeat_interval.CopyFrom(duration(self._heartbeat_interval_s))
        welcome.session_timeout.CopyFrom(duration(self._session_timeout_s))


class SessionReader:
    """Turns a worker's frames into events."""

    def __init__(self, driver: Driver, session: int, outbox: SessionOutbox, leases_max: int) -> None:
        self._leases_max = leases_max  # in one frame
        self._driver = driver
        self._session = session
        self._outbox = outbox
        self._results_taken = self._results_acknowledged = 0  # counts of results received by reference

    async def read(self, frame: Any) -> None:
        handle, session = self._driver.handle, self._session
        if frame.payload_key and not self._outbox.peer.check_key(frame.payload_key):
            raise InvalidArgumentError(WRONG_KEY)
        if frame.partials:
            handle(ev.Partials(session, partial_outputs(frame.partials)))
        await self._read_reports(frame.report_batches)
        # A worker keeps the files of results until the master acknowledges the results. Nothing else waits for an
        # acknowledgement, so it may come late.
        unacknowledged = self._results_taken - self._results_acknowledged
        if unacknowledged >= ACKNOWLEDGE_RESULTS or (unacknowledged and frame.HasField("heartbeat")):
            self._results_acknowledged = self._results_taken
            self._outbox.frame_for(16).message.results_taken = self._results_taken
        if frame.HasField("heartbeat"):
            check_count(len(frame.heartbeat.leases), self._leases_max, LEASES_IN_FRAME)
            handle(heartbeat(frame.heartbeat, session))

    async def _read_reports(self, batches: Sequence[worker_service_pb2.ReportBatch]) -> None:
        count = len(batches)
        for batch in batches:
            count += len(batch.succeeded_lease_ids) + len(batch.reports)
        check_count(count, self._leases_max, LEASES_IN_FRAME)
        async for batch in queries.pausing(batches):
            start_s = seconds_of(batch.start_time) if batch.HasField("start_time") else 0.0
            finish_s = seconds_of(batch.finish_time) if batch.HasField("finish_time") else 0.0
            self._driver.handle(reports_of(batch, self._session, start_s, finish_s, self._outbox.peer))
            self._results_taken += len(batch.result_places)
