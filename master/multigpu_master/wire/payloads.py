"""Large payloads and results on the wire: references for peers that share the payload directory, bytes for others."""

from collections import deque
from collections.abc import Iterable, Sequence, Sized

from multigpu._transport.payloads import LARGE_BYTES, Reference, is_transient
from multigpu._transport.protobuf import tag, varint
from multigpu.v1 import task_pb2, worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, TaskError
from multigpu_master.core.workers.sessions import PAYLOAD_NOT_READABLE
from multigpu_master.journal.payload_files import BadReferenceError, Payloads
from multigpu_master.journal.protocol import LargeBody

_RESULT_TAG = tag(task_pb2.Outcome.RESULT_FIELD_NUMBER)
_RESULT_PLACE_TAG = tag(task_pb2.Outcome.RESULT_PLACE_FIELD_NUMBER)
# Code 14 is UNAVAILABLE; the retry_delay_s is 1.0.
OUTCOME_NOT_READABLE = ev.Rejection(14, "the task has ended, but its outcome cannot be read now; try again", 1.0)


class Peer:
    """The peer of a stream. It shares the payload directory once it has sent the directory's key."""

    def __init__(self, payloads: Payloads) -> None:
        self.shares = False
        self._payloads = payloads
        self._lent: deque[Reference] = deque()
        self._lent_bytes = 0
        self._released = 0

    def check_key(self, key: bytes) -> bool:
        """Checks a key that the peer sent. Returns True if it is right, or if the peer sent the right key before."""
        self.shares = self.shares or self._payloads.shared_with(key)
        return self.shares

    def resolve(self, at: task_pb2.PayloadReference, crc: int = -1) -> Reference:
        """Validates a reference. Raises BadReferenceError if it is invalid or the peer does not share the directory."""
        if not self.shares:
            raise BadReferenceError("references are for peers that share the directory: send the payload_key")
        return self._payloads.resolve(at.segment, at.offset, at.size, crc)

    def lend(self, reference: Reference, bytes_max: int) -> bool:
        """Keeps the file of a reference until the peer has read it, and returns True. Returns False if the caller must
        send the bytes: the peer does not share the directory, or its unread references would exceed `bytes_max`.
        """
        if not self.shares or self._lent_bytes + len(reference) > bytes_max:
            return False
        self._lent.append(reference)
        self._lent_bytes += len(reference)
        return True

    def release_read(self, count: int) -> None:
        """Releases the references that the peer has read: the first `count` of the stream."""
        while self._released < count and self._lent:
            self._lent_bytes -= len(self._lent.popleft())
            self._released += 1

    def release_all(self) -> None:
        """Releases all references, and lends no more. Called at the end of the stream, because a reference cycle could
        keep the Reference objects, and so the files, for longer.
        """
        self.shares = False
        self._lent.clear()


def payload_of(given: task_pb2.TaskInput, peer: Peer | None) -> Reference:
    """Returns the payload that an input refers to. Raises BadReferenceError if it is invalid, or `peer` is None."""
    if peer is None:
        raise BadReferenceError("only a Run stream can refer to payloads; send the payload inline")
    return peer.resolve(given.payload_place, given.payload_crc32 if given.HasField("payload_crc32") else -1)


def outcome_body(own: bytes, shared: bytes, result: bytes | Reference) -> LargeBody:
    """Returns a serialized Outcome with a large result as its last field. `own` and `shared`: the serialized fields of
    this task, and the fields that it has in common with other tasks.
    """
    return LargeBody(b"".join((own, shared, _RESULT_TAG, varint(len(result)))), result)


def outcome_by_reference(body: LargeBody, reference: Reference) -> bytes:
    """Returns the serialized Outcome of `body` with a reference in place of the result."""
    place = task_pb2.PayloadReference(
        segment=reference.pin.name, offset=reference.offset, size=reference.size_bytes
    ).SerializeToString()
    return b"".join((body.without_result(), _RESULT_PLACE_TAG, varint(len(place)), place))


def outcome_without_result(body: LargeBody, error: Exception) -> bytes:
    """Returns the serialized Outcome of `body` in the state RESULT_MISSING, with the error in place of the result.
    Raises `error` if it is transient.
    """
    if is_transient(error):
        raise error
    lost = task_pb2.Outcome()
    lost.state = task_pb2.OUTCOME_STATE_RESULT_MISSING  # parsers keep the last value of a field
    lost.error.type, lost.error.message = "ResultLost", f"the task ended, but its result can't be read: {error}"
    return body.without_result() + lost.SerializeToString()


def read_payloads(leases: Sequence[Lease], peer: Peer) -> tuple[list[Lease], dict[int, bytes], list[ev.Failure]]:
    """Returns the leases whose payloads the peer can get, the bytes of their large payloads by lease_id (none if the
    peer shares the directory), and the failures of the other leases. A lease whose payload can't be read for a
    transient reason, such as a lack of memory, counts as returned.
    """
    kept: list[Lease] = []
    payloads_by_lease_id: dict[int, bytes] = {}
    failures = []
    for lease in leases:
        payload = lease.task.payload
        if isinstance(payload, Reference) and not peer.shares:
            try:
                payloads_by_lease_id[lease.lease_id] = payload.read()
            except (OSError, MemoryError) as error:
                if is_transient(error):
                    why = TaskError(PAYLOAD_NOT_READABLE, f"the payload can't be read now: {error!r}")
                    failures.append(ev.Failure(lease.lease_id, why, returned=True))
                else:
                    why = TaskError("PayloadLost", f"the payload is gone: {error}")
                    failures.append(ev.Failure(lease.lease_id, why))
                continue
        kept.append(lease)
    return kept, payloads_by_lease_id, failures


def lease_payloads(
    batch: worker_service_pb2.LeaseBatch, leases: Sequence[Lease], payloads_by_lease_id: dict[int, bytes]
) -> list[bytes]:
    """Returns the payload of each lease. A large payload that is not in `payloads_by_lease_id` is empty, and the batch
    gets a reference to it. The batch's other extras must be filled already.
    """
    payloads: list[bytes] = []
    extras = {extra.index: extra for extra in batch.extras}
    for index, lease in enumerate(leases):
        payload = lease.task.payload
        if isinstance(payload, bytes):
            payloads.append(payload)
            continue
        assert isinstance(payload, Reference)
        payloads.append(payloads_by_lease_id.get(lease.lease_id, b""))
        if lease.lease_id not in payloads_by_lease_id:
            at = (extras.get(index) or batch.extras.add(index=index)).payload_place
            at.segment, at.offset, at.size = payload.pin.name, payload.offset, payload.size_bytes
    return payloads


def resolve_results(
    batch: worker_service_pb2.ReportBatch, results: list[bytes | Reference], peer: Peer
) -> dict[int, ev.Failure]:
    """Puts the results that the batch carries by reference into `results`. Returns failures for invalid references, by
    index.
    """
    failures: dict[int, ev.Failure] = {}
    for result in batch.result_places:
        index = result.index
        if index >= len(results):
            continue  # there is no such lease
        try:
            results[index] = peer.resolve(result.at)
        except BadReferenceError as error:
            failures[index] = ev.Failure(batch.succeeded_lease_ids[index], TaskError("ResultLost", str(error)))
    return failures


def checked_value(value: bytes | Sized) -> bytes | Reference:
    """Returns the payload or result unchanged, for the type checker: in the core its type is Sized."""
    assert isinstance(value, (bytes, Reference))
    return value


def memory_bytes(values: Iterable[bytes | Sized]) -> int:
    """Returns how many bytes the values have in memory. Values in payload files count as 0."""
    return sum([0 if isinstance(getattr(v, "tail", v), Reference) else len(v) for v in values])


def may_have_large(size_bytes: int) -> bool:
    """Returns whether payloads or results of this total size may include a large one."""
    return size_bytes >= LARGE_BYTES
