"""Counting the fields of a message before parsing."""

from hypothesis import given
from hypothesis import strategies as st
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb
from multigpu_master.core.model import Task
from multigpu_master.rpc.requests import more_fields_than
from multigpu_master.wire.specs import SpecReader
from multigpu_master.wire.tasks import request_ids_of, tasks_of

RUN = task_service_pb2.RunRequest.DESCRIPTOR


def test_fields_of_nested_messages_count_and_bytes_do_not() -> None:
    inputs = [task_pb2.TaskInput(payload=b"\x12\x00" * 5000)] * 3  # 3 fields of the batch, with one field each
    spec = task_pb2.TaskSpec(kind="echo", parameters={"a": "b"}, priority=2)  # 1, with 3; the entry has 2
    frame = task_service_pb2.RunRequest(outcomes_only=True, batches=[task_pb2.TaskBatch(spec=spec, inputs=inputs)])
    fields = 2 + 3 * 2 + 1 + 3 + 2
    data = frame.SerializeToString()
    assert not more_fields_than(fields, RUN, data)
    assert more_fields_than(fields - 1, RUN, data)


def test_a_message_with_an_error_hides_no_other() -> None:
    """A parser reads all messages before it."""
    many = task_service_pb2.RunRequest(batches=[task_pb2.TaskBatch(inputs=[task_pb2.TaskInput()] * 1000)])
    batches = task_service_pb2.RunRequest.BATCHES_FIELD_NUMBER << 3 | 2
    for wrong in (b"\x07", b"\x80"):
        assert more_fields_than(900, RUN, many.SerializeToString() + bytes([batches, 1]) + wrong)


def test_fixed_width_numbers_and_times() -> None:
    leases = [worker_pb.HeldLease(lease_id=1 << 50, task_id=300, attempt=1, proof=7)] * 10
    frame = worker_pb.SessionRequest(heartbeat=worker_pb.Heartbeat(leases=leases, last_frame=1 << 40))
    data = frame.SerializeToString()
    assert not more_fields_than(1 + 1 + 10 * 5, worker_pb.SessionRequest.DESCRIPTOR, data)
    assert more_fields_than(1 + 1 + 10 * 5 - 1, worker_pb.SessionRequest.DESCRIPTOR, data)


def test_an_endless_varint_is_left_to_the_parser() -> None:
    """Reading it to its end would take hours."""
    assert not more_fields_than(5, RUN, b"\x80" * (60 << 20))


@given(st.binary(max_size=200), st.integers(min_value=0, max_value=20))
def test_any_bytes_are_counted_or_left_to_the_parser(data: bytes, count_max: int) -> None:
    assert more_fields_than(count_max, RUN, data) in (True, False)
    assert not more_fields_than(len(data), RUN, data)


def test_a_column_of_payloads_needs_no_request_ids() -> None:
    """Such tasks were left out of the answer, and lost."""
    batch = task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind="k"), payloads=[b"x", b"y"])
    batch.inputs.add(request_id="first", payload=b"z")
    tasks = tasks_of(SpecReader().read(batch.spec), batch, 1000)
    assert request_ids_of(batch) == ["first", "", ""]
    assert [(t.request_id, t.payload) for t in tasks if isinstance(t, Task)] == [
        ("first", b"z"),
        ("", b"x"),
        ("", b"y"),
    ]
