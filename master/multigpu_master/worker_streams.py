"""Puts the core's commands for workers into the outboxes of their sessions."""

import asyncio
from collections.abc import Callable

import grpc
from multigpu._transport.protobuf import Frame
from multigpu.v1 import worker_service_pb2
from multigpu.v1.admin_service_pb2 import WorkerRejection

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.errors import CallError
from multigpu_master.ids import LeaseProofs
from multigpu_master.journal.payload_files import Payloads
from multigpu_master.outbox import FRAME_BYTES, Outbox
from multigpu_master.wire import payloads as payload_messages
from multigpu_master.wire.leases import extra_bytes, lease_batch
from multigpu_master.wire.models import fill_desired
from multigpu_master.wire.specs import SpecReader
from multigpu_master.wire.times import set_time

SessionFrame = Frame[worker_service_pb2.SessionResponse]
SessionOutbox = Outbox[SessionFrame]
# Estimated sizes on the wire: a lease without its payload, a lease_id, any other small message.
LEASE_BYTES, LEASE_ID_BYTES, MESSAGE_BYTES = 40, 10, 64


class WorkerStreams:
    """The outboxes of the sessions that have a stream. `handle` feeds an event to the core."""

    def __init__(
        self, handle: Callable[[ev.Event], object], fleet: Fleet, specs: SpecReader, proofs: LeaseProofs,
        payloads: Payloads,
    ) -> None:  # fmt: skip
        self._handle = handle
        self._fleet = fleet
        self._specs = specs
        self._proofs = proofs
        self._payloads = payloads
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[int, SessionOutbox] = {}
        self.stopping = False  # the master ends all streams
        # Why the master ended sessions whose streams are not closed yet.
        self.end_reasons: dict[int, str] = {}
        # The last rejection of each worker_id's hello, the oldest first. WorkerService fills it.
        self.rejections: dict[str, WorkerRejection] = {}

    def __len__(self) -> int:
        return len(self._outboxes)

    def open(self, session: int, process: str) -> SessionOutbox:
        """Makes the outbox of a session. `process`: the name of the worker's process, from its hello."""
        outbox = SessionOutbox(_new_frame, payload_messages.Peer(self._payloads))
        outbox.peer_name = process
        self._outboxes[session] = outbox
        return outbox

    def has_other_process(self, worker_id: str, process: str) -> bool:
        """Whether a process other than `process` has an open stream with this worker_id."""
        worker = self._fleet.workers.get(worker_id)
        outbox = self._outboxes.get(worker.session) if worker is not None else None
        return outbox is not None and outbox.peer_name != process

    def close(self, session: int) -> None:
        """Removes the outbox, and tells the core that the session is closed; but not while the master stops, because
        the core would take the worker for lost and charge the attempts that run there.
        """
        self._outboxes.pop(session, None)
        if not self.stopping:
            self._handle(ev.SessionClosed(session))
        self.end_reasons.pop(session, None)

    def _message(self, session: int, size: int) -> worker_service_pb2.SessionResponse:
        """The message to which the caller adds about `size` bytes. If the session has no stream, returns a new one that
        nobody sends.
        """
        outbox = self._outboxes.get(session)
        return (outbox.frame_for(size) if outbox is not None else _new_frame()).message

    def reload_handlers(self, session: int) -> None:
        """Tells a worker to reload its handlers; does nothing if the session has ended."""
        self._message(session, MESSAGE_BYTES).reload_handlers = True

    def dispatch(self, command: ev.Dispatch) -> None:
        """Sends leases in parts. All leases of a part have the same spec. A part has at most FRAME_BYTES, or one lease
        that is larger.
        """
        outbox = self._outboxes.get(command.session)
        if outbox is None:
            return
        part: list[Lease] = []
        spec = command.leases[0].task.spec
        part_bytes = len(spec.wire)
        for lease in command.leases:
            task = lease.task
            size = len(task.payload) + LEASE_BYTES + (extra_bytes(task.extra) if task.extra is not None else 0)
            if task.spec is not spec or (part and part_bytes + size > FRAME_BYTES):
                # Heartbeats acknowledge the highest number that came. A worker that acknowledges dispatch N must have
                # all leases of N. So only the last part has the number N; the earlier parts have N - 1.
                self._put_leases(command.session, outbox, part, part_bytes, command.number - 1)
                part, spec = [], task.spec
                part_bytes = len(spec.wire)
            part.append(lease)
            part_bytes += size
        self._put_leases(command.session, outbox, part, part_bytes, command.number)

    def _put_leases(self, session: int, outbox: SessionOutbox, leases: list[Lease], size: int, number: int) -> None:
        """Adds a part of a dispatch, of `size` bytes. Leases whose payloads can't be read are reported as
        failed, or as returned if a later read may succeed.
        """
        payloads_by_lease_id: dict[int, bytes] | None = None
        if payload_messages.may_have_large(size):
            leases, payloads_by_lease_id, lost = payload_messages.read_payloads(leases, outbox.peer)
            if lost:
                self._loop.call_soon(self._handle, ev.Reports(session, failures=lost, by_master=True))
        # Even if no lease is left, the frame carries the number of the dispatch, which the worker acknowledges.
        frame = outbox.frame_for(size if leases else MESSAGE_BYTES, max(1, len(leases)))
        frame.message.frame = number
        if leases:
            frame.parts += lease_batch(self._specs, self._proofs, leases, payloads_by_lease_id)

    def welcome(self, command: ev.Welcome) -> None:
        self._message(command.session, MESSAGE_BYTES).welcome.adopted_lease_ids.extend(command.adopted)

    def revoke(self, command: ev.Revoke) -> None:
        for lease_id in command.lease_ids:
            self._message(command.session, MESSAGE_BYTES).revocations.add(lease_id=lease_id, reason=command.reason)

    def recall(self, command: ev.Recall) -> None:
        message = self._message(command.session, LEASE_ID_BYTES * len(command.lease_ids))
        message.recalled_lease_ids.extend(command.lease_ids)

    def send_desired_state(self, command: ev.SendDesiredState) -> None:
        """Sends the state that the worker should have: its mode, the checks of its device, and its models."""
        worker = self._fleet.sessions.get(command.session)
        if worker is None:
            return
        desired = self._message(command.session, MESSAGE_BYTES).desired
        desired.Clear()  # the frame may have an earlier state
        if worker.draining:
            desired.mode = worker_service_pb2.WORKER_MODE_DRAINING
            if worker.drain_deadline_s is not None:
                set_time(desired.drain_deadline, worker.drain_deadline_s)
        else:
            desired.mode = worker_service_pb2.WORKER_MODE_ACTIVE
        desired.check, desired.check_at_once = worker.requested_check, worker.check_at_once
        fill_desired(desired, worker)

    def end(self, command: ev.EndSession) -> None:
        """Ends the stream of a session at once. ABORTED tells the worker that a newer session has replaced it."""
        outbox = self._outboxes.get(command.session)
        if outbox is not None:
            self.end_reasons[command.session] = command.reason
            code = grpc.StatusCode.ABORTED if command.taken_over else grpc.StatusCode.UNAVAILABLE
            outbox.abort(CallError(command.reason, code))


def _new_frame() -> SessionFrame:
    return Frame(worker_service_pb2.SessionResponse())
