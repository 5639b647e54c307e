"""Names that a terminal or a log would not show as they are: rejected where they come in."""

import grpc
import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2

from tests.security.house import House, hello

ODD = ["a\nb", "a\u200b", "\ufeffa", "a\x1b[31m", "a\x9b31m", "a\u202eb", "a\u2028b", "a\x7f"]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ODD)
def test_names_with_control_characters_are_rejected(house: House, name: str) -> None:
    for field in ("kind", "model", "queue"):
        spec = task_pb2.TaskSpec(kind="echo", wait_for_worker=True)
        setattr(spec, field, name)
        batch = task_pb2.TaskBatch(spec=spec, inputs=[task_pb2.TaskInput(payload=b"x")])
        (result,) = house.admin.call("TaskService/Submit", task_service_pb2.SubmitRequest(batches=[batch])).results
        assert result.rejection.code == INVALID.value[0], field
        assert field in result.rejection.message
    assert house.admin.status("AdminService/PauseQueue", admin_pb.PauseQueueRequest(queue=name)) is INVALID
    worker = house.as_role("worker")
    with_model = hello("plain")
    with_model.hello.capabilities[0].models.append(name)
    for first in (hello(name), hello("plain", name), with_model):
        stream = worker.open("WorkerService/Session", first)
        assert stream.end() is INVALID
