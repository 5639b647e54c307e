"""Builds the frames for the master and applies the frames from it. session/master_connection.py has the gRPC stream."""

import asyncio
import dataclasses
import time

import structlog
from multigpu.v1 import model_pb2
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.device.sampler import Sampler
from multigpu_worker.dispatcher import Dispatcher
from multigpu_worker.health_monitor import HealthMonitor
from multigpu_worker.models.loader import ModelLoader
from multigpu_worker.models.messages import LEFT_OUT, Offers, fitting, model_messages, residency_messages
from multigpu_worker.models.model_sizes import slots_max
from multigpu_worker.mps.control import MpsStatus
from multigpu_worker.processes.pool import EnginePool
from multigpu_worker.processes.reload import HandlersReload
from multigpu_worker.session import wire
from multigpu_worker.session.master_connection import Metadata
from multigpu_worker.session.payload_sharing import Sharing

log = structlog.get_logger()

FRAME_BYTES_MAX = 4 << 20
HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 0.01, 60.0


@dataclasses.dataclass(slots=True, kw_only=True)
class MasterStream:
    """Called by MasterConnection on the event loop."""

    master: str
    identity: wire.Identity
    dispatcher: Dispatcher
    pool: EnginePool
    loader: ModelLoader
    health_monitor: HealthMonitor
    sampler: Sampler
    sharing: Sharing
    handlers: HandlersReload
    # Why the worker runs without MPS.
    mps_off: MpsStatus | None
    draining: bool = False
    # Set when a session begins: its heartbeat interval may differ from that of the session before.
    welcomed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    heartbeat_s: float = 1.0
    _last_frame: int = 0
    # The last logged text about models that did not fit into a hello or catalog; empty: all fitted.
    _left_out: str = ""
    # The master must be sent the key of the directory for large payloads.
    _key_due: bool = False

    def hello(self) -> pb.SessionRequest:
        self.pool.update_running()
        self.loader.changed = False
        # A model may run more tasks at once than the default process: the larger number is announced.
        slots = max(self.identity.slots, slots_max(self.loader.routes))
        session = self.dispatcher.session
        offers, models = self._catalog()
        return wire.hello(
            dataclasses.replace(self.identity, slots=slots),
            offers,
            self.dispatcher.concurrency(),
            session.held(hello=True),
            models=models,
            model_memory_bytes=self.loader.limit_bytes,
            incarnation=session.incarnation,
        )

    def connected(self, welcome: pb.SessionResponse, metadata: Metadata) -> None:
        content = welcome.welcome
        self._key_due = self.sharing.begin(metadata)
        self.pool.share()
        self.heartbeat_s = wire.seconds_of(content.heartbeat_interval) or 1.0
        self.heartbeat_s = min(max(self.heartbeat_s, HEARTBEAT_MIN_S), HEARTBEAT_MAX_S)
        self.pool.cancel(self.dispatcher.session.welcome(content.adopted_lease_ids, content.incarnation))
        log.info("session begins", master=self.master, session_id=content.session_id, master_version=content.version)
        self.dispatcher.want_heartbeat()
        self.welcomed.set()
        self.received(welcome)

    def received(self, response: pb.SessionResponse) -> None:
        self._last_frame = response.frame
        if response.results_taken:
            self.sharing.taken(response.results_taken)
        for batch in response.lease_batches:
            spec, leases = wire.leases_of(batch, self.sharing.path)
            if any(lease.lease_id in self.dispatcher.session.leases for lease in leases):
                raise wire.BadFrameError("it grants a lease that we hold")
            self.dispatcher.grant(spec, leases)
        if response.revocations:
            self.dispatcher.revoke([revocation.lease_id for revocation in response.revocations])
        if response.recalled_lease_ids:
            self.dispatcher.recall(response.recalled_lease_ids)
        if response.reload_handlers:
            self.handlers.want()
        if response.HasField("desired"):
            self.health_monitor.checks_requested(response.desired.check, at_once=response.desired.check_at_once)
            self.loader.set_desired(response.desired.pinned_models, response.desired.unwanted_models)
        if response.lease_batches and self.health_monitor.health.unusable:  # granted before the master knew the health
            self.dispatcher.give_back("the device can't be used", running=self.health_monitor.health.barred)
        elif response.lease_batches:
            self.dispatcher.pump()

    def next_frame(self) -> bytes | None:
        # A heartbeat that is due goes first: it must list every lease whose report has not been sent yet.
        session = self.dispatcher.session
        if session.heartbeat_due:
            return self._heartbeat().SerializeToString()
        reports = None
        if session.has_unsent():
            reports = wire.request_of(session.take_frame(FRAME_BYTES_MAX, time.monotonic()), self.sharing.lend)
        else:
            self.dispatcher.settled.set()
        self.dispatcher.resume_if_drained()
        return reports

    def _heartbeat(self) -> pb.SessionRequest:
        self.pool.update_running()
        sample = self.sampler.latest
        request = wire.heartbeat(
            self.dispatcher.session.held(hello=False),
            last_frame=self._last_frame,
            telemetry=None if sample is None else sample.telemetry,
            sample_ns=0 if sample is None else sample.time_ns,
            models=residency_messages(self.loader.routes),
            catalog=self._catalog_change(),
            embedding_cache=self.pool.embedding_cache(),
            draining=self.draining,
            mps=self.mps_off if self.pool.mps is None else self.pool.mps.status,
            health=wire.health_message(self.health_monitor.health, self.health_monitor.checks_passed),
            handlers=self.handlers.message(),
            occupied_slots=self.pool.occupied,
        )
        if self._key_due and self.sharing.directory is not None:  # before any result of the session
            self._key_due = False
            request.payload_key = self.sharing.directory.key
        return request

    def _catalog_change(self) -> pb.Catalog | None:
        """The worker's offers; None: they have not changed since they were last sent in this session."""
        if not self.loader.changed:
            return None
        self.loader.changed = False
        return self._catalog_message()

    def _catalog_message(self) -> pb.Catalog:
        offers, models = self._catalog()
        return wire.catalog_message(offers, self.dispatcher.concurrency(), models)

    def _catalog(self) -> tuple[Offers, list[model_pb2.Model]]:
        """The offers and models that fit into a message."""
        offers, models = fitting(self.dispatcher.offers(), model_messages(self.loader.routes))
        left_out = next((model.error for model in models if model.name == LEFT_OUT), "")
        if left_out and left_out != self._left_out:
            log.warning("some models are left out", reason=left_out)
        self._left_out = left_out
        return offers, models

    def disconnected(self, reason: str) -> None:
        session = self.dispatcher.session
        if not self.dispatcher.stopped:
            log.warning("session broke", reason=reason, leases=len(session.leases))
        self.pool.cancel(session.stream_broken())
