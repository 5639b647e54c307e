"""Names that a terminal or a log would not show as they are."""

import grpc
import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2

from tests.security.secured import SecuredFleet, hello

ODD = ["a\nb", "a\u200b", "\ufeffa", "a\x1b[31m", "a\x9b31m", "a\u202eb", "a\u2028b", "a\x7f"]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ODD)
def test_names_with_control_characters_are_rejected(secured: SecuredFleet, name: str) -> None:
    for field in ("kind", "model", "queue"):
        spec = task_pb2.TaskSpec(kind="echo", wait_for_worker=True)
        setattr(spec, field, name)
        batch = task_pb2.TaskBatch(spec=spec, inputs=[task_pb2.TaskInput(payload=b"x")])
        (result,) = secured.admin.call("TaskService/Submit", task_service_pb2.SubmitRequest(batches=[batch])).results
        assert result.rejection.code == INVALID.value[0], field
        assert field in result.rejection.message
    assert secured.admin.status("AdminService/PauseQueue", admin_pb.PauseQueueRequest(queue=name)) is INVALID
    worker = secured.as_role("worker")
    greetings = [hello(name), hello("plain", name), *[hello("plain") for _ in range(4)]]
    greetings[2].hello.capabilities[0].models.append(name)
    greetings[3].hello.version = name
    greetings[4].hello.labels["zone"] = name
    greetings[5].hello.device.device_id = name
    for first in greetings:
        stream = worker.open("WorkerService/Session", first)
        assert stream.end() is INVALID
