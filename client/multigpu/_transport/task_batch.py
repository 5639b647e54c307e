"""A batch of tasks in a frame of the Run stream."""

from multigpu._transport.call import Call
from multigpu._transport.payloads import LARGE_BYTES, Reference
from multigpu._transport.protobuf import add_bytes, field
from multigpu.v1 import task_pb2, task_service_pb2

_BATCHES = task_service_pb2.RunRequest.BATCHES_FIELD_NUMBER
_INPUTS = task_pb2.TaskBatch.INPUTS_FIELD_NUMBER
_PAYLOADS = task_pb2.TaskBatch.PAYLOADS_FIELD_NUMBER
_PAYLOAD = task_pb2.TaskInput.PAYLOAD_FIELD_NUMBER


class TaskBatch:
    """Tasks of one spec, in the order of the wire: inputs; inputs with large payloads, serialized; and, as two columns,
    tasks that consist of a request_id and a payload.
    """

    def __init__(self, spec: task_pb2.TaskSpec) -> None:
        self._spec = spec
        self._message = task_pb2.TaskBatch()
        self._message.spec.CopyFrom(spec)
        self._large_inputs: list[bytes] = []
        self._request_ids: list[str] = []
        self._payloads: list[bytes] = []

    def add(self, call: Call, place: Reference | None) -> bool:
        """Adds a task, whose payload lies at `place` or goes with it. Returns False if the task does not fit: it has
        another spec, or its place is before tasks that the batch has.
        """
        if call.spec is not self._spec:
            return False
        if call.own is None and place is None and not call.partials_received:
            self._request_ids.append(call.request_id)
            self._payloads.append(call.payload)
            return True
        large = place is None and len(call.payload) >= LARGE_BYTES
        if self._payloads or (self._large_inputs and not large):
            return False
        own = dict(call.own or (), request_id=call.request_id, partials_received=call.partials_received)
        if large:
            given = task_pb2.TaskInput(**own).SerializeToString()
            self._large_inputs += field(_INPUTS, given, *field(_PAYLOAD, call.payload))
        elif place is None:
            self._message.inputs.add(payload=call.payload, **own)
        else:
            at = task_pb2.PayloadReference(segment=place.pin.name, offset=place.offset, size=place.size_bytes)
            self._message.inputs.add(payload_place=at, **own)
        return True

    def serialized(self) -> list[bytes]:
        """The batch as a field of a RunRequest."""
        message = self._message
        message.request_ids.extend(self._request_ids)
        payloads = add_bytes(message.payloads, _PAYLOADS, self._payloads)
        return field(_BATCHES, message.SerializeToString(), *self._large_inputs, *payloads)
