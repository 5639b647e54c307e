"""A server with scripted answers to unary calls of AdminService and TaskService, for tests of mgpuctl."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_service_pb2 as service
from multigpu.v1.admin_service_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from multigpu.v1.task_service_pb2_grpc import TaskServiceServicer, add_TaskServiceServicer_to_server


class RejectionError(Exception):
    """An error as the answer."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code = code
        self.details = details


class UnaryMaster:
    """Records every request. `answers["ListWorkers"]` is a message, a RejectionError, or a function of the request
    that returns one of them.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.requests: list[tuple[str, Any]] = []
        self.address = ""

    def asked(self, method: str) -> list[Any]:
        return [request for name, request in self.requests if name == method]

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append((method, request))
        answer = self.answers.get(method)
        if callable(answer):
            answer = answer(request)
        if answer is None:
            answer = RejectionError(grpc.StatusCode.UNIMPLEMENTED, f"the script has no answer to {method}")
        if isinstance(answer, RejectionError):
            context.abort(answer.code, answer.details)
        return answer


def _servicer(script: UnaryMaster, base: type, module: Any, service: str) -> Any:
    def method(name: str) -> Any:
        return lambda _, request, context: script.answer(name, request, context)

    unary = [m.name for m in module.DESCRIPTOR.services_by_name[service].methods if not m.server_streaming]
    return type(f"Scripted{service}", (base,), {name: method(name) for name in unary})()


@contextmanager
def unary_master() -> Iterator[UnaryMaster]:
    script = UnaryMaster()
    server = grpc.server(ThreadPoolExecutor(2))
    admin_servicer = _servicer(script, AdminServiceServicer, admin, "AdminService")
    add: Any = add_AdminServiceServicer_to_server
    add(admin_servicer, server)
    task_servicer = _servicer(script, TaskServiceServicer, service, "TaskService")
    add = add_TaskServiceServicer_to_server
    add(task_servicer, server)
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield script
    finally:
        server.stop(None).wait()
