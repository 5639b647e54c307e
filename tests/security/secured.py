"""A real master that requires tokens, and callers with any token."""

import contextlib
import queue
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2, worker_service_pb2

from tests.fleet import Daemon, Fleet, until

SERVICES = {
    service.name: service
    for pb in (task_service_pb2, worker_service_pb2, admin_pb)
    for service in pb.DESCRIPTOR.services_by_name.values()
}
METHODS: dict[str, MethodDescriptor] = {
    f"{service.name}/{method.name}": method for service in SERVICES.values() for method in service.methods
}
PROTOCOL = 2


def metadata(token: str | None) -> Any:
    return None if token is None else (("authorization", f"Bearer {token}"),)


class Caller:
    """A caller with this channel and token."""

    def __init__(self, channel: grpc.Channel, token: str | None = None) -> None:
        self.channel = channel
        self.metadata = metadata(token)

    def stub(self, name: str) -> Any:
        """What makes calls of "Service/Method"."""
        method = METHODS[name]
        kind = "stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary"
        return getattr(self.channel, "_".join(kind))(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    def call(self, name: str, request: Any = None) -> Any:
        """The response of "Service/Method"; the iterator of a stream. Raises RpcError."""
        method = METHODS[name]
        given = GetMessageClass(method.input_type)() if request is None else request
        return self.stub(name)(
            iter(request or ()) if method.client_streaming else given, metadata=self.metadata, timeout=20
        )

    def open(self, name: str, *requests: Any) -> "Stream":
        return Stream(self, name, requests)

    def status(self, name: str, request: Any = None) -> grpc.StatusCode:
        """How a call ends; OK for a stream with a first message."""
        try:
            answer = self.call(name, request)
            if METHODS[name].server_streaming:
                with contextlib.suppress(StopIteration):
                    next(answer)
                answer.cancel()
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK

    def probe(self) -> grpc.StatusCode:
        """How a call ends that readers and administrators may make."""
        return self.status("AdminService/GetStats")

    def submit(self, queue: str, *payloads: bytes, request_ids: tuple[str, ...] = (), kind: str = "none") -> Any:
        """The results of Submit, for a kind that no worker serves: the tasks wait."""
        names = request_ids or ("",) * len(payloads)
        inputs = [task_pb2.TaskInput(payload=p, request_id=r) for p, r in zip(payloads, names, strict=True)]
        spec = task_pb2.TaskSpec(kind=kind, queue=queue, wait_for_worker=True)
        request = task_service_pb2.SubmitRequest(batches=[task_pb2.TaskBatch(spec=spec, inputs=inputs)])
        return self.call("TaskService/Submit", request).results


class Stream:
    """A call that stays open: sends `requests`, and more with `send`."""

    def __init__(self, caller: Caller, name: str, requests: tuple[Any, ...]) -> None:
        self._up: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for request in requests:
            self.send(request)
        if METHODS[name].client_streaming:
            self.call = caller.stub(name)(iter(self._up.get, None), metadata=caller.metadata, timeout=20)
        else:
            self.call = caller.call(name, requests[0] if requests else None)

    def send(self, request: Any) -> None:
        self._up.put(request)

    def next(self) -> Any:
        return next(self.call)

    def end(self) -> grpc.StatusCode:
        """How the master ends it."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        finally:
            self._up.put(None)
        return grpc.StatusCode.OK

    def close(self) -> None:
        self._up.put(None)
        self.call.cancel()


class SecuredFleet:
    """A master with --require-tokens on loopback, without TLS."""

    def __init__(self, folder: Path, *flags: str, **more: Any) -> None:
        self.fleet = Fleet(folder, workers=0, master_flags=["--require-tokens", *flags], **more)
        self.fleet.start_master()
        self.admin_token = (self.fleet.data_dir / "admin.token").read_text().strip()
        self.admin = self.caller(self.admin_token)

    def caller(self, token: str | None = None) -> Caller:
        return Caller(
            grpc.insecure_channel(self.fleet.address, options=(("grpc.use_local_subchannel_pool", 1),)), token
        )

    def create(self, name: str, *roles: str, ttl_s: float = 0, **more: Any) -> tuple[str, str]:
        """A new token: its id and its text."""
        request = admin_pb.CreateTokenRequest(name=name, roles=[f"ROLE_{r.upper()}" for r in roles], **more)
        if ttl_s:
            request.ttl.FromNanoseconds(int(ttl_s * 1e9))
        answer = self.admin.call("AdminService/CreateToken", request)
        return answer.token.token_id, answer.secret

    def as_role(self, *roles: str, **more: Any) -> Caller:
        return self.caller(self.create("-".join(roles), *roles, **more)[1])

    def revoke(self, token_id: str) -> None:
        self.admin.call("AdminService/RevokeToken", admin_pb.RevokeTokenRequest(token_id=token_id))

    def tokens(self) -> Any:
        return self.admin.call("AdminService/ListTokens").tokens

    def start_worker(self, name: str, *flags: str, token: str = "") -> Daemon:
        """A connected real worker with a token in a file; by default one for this worker only."""
        path = self.fleet.folder / f"{name}.token"
        path.touch(0o600)
        path.write_text(token or self.create(name, "worker", worker_ids=[name])[1])
        worker = self.fleet.start_worker(name, "--token-file", str(path), *flags)

        def joined() -> bool:
            assert worker.alive, f"worker {name} ended with {worker.process.returncode}: {worker.log()}"
            return name in self.active()

        until(joined, what=f"worker {name}")
        return worker

    def active(self) -> set[str]:
        """The workers that are connected."""
        workers = self.admin.call("AdminService/ListWorkers", admin_pb.ListWorkersRequest()).workers
        return {w.worker_id for w in workers if w.state == admin_pb.WORKER_STATE_ACTIVE}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.fleet.close()


def hello(worker_id: str, *kinds: str) -> worker_service_pb2.SessionRequest:
    """A worker's first frame."""
    request = worker_service_pb2.SessionRequest()
    request.hello.worker_id = worker_id
    request.hello.protocol_version = PROTOCOL
    request.hello.window_tasks, request.hello.window_bytes, request.hello.slots = 8, 1 << 20, 1
    for kind in kinds or ("echo",):
        request.hello.capabilities.add(kind=kind)
    return request


def run_request(queue: str, *request_ids: str, kind: str = "none", payload: bytes = b"x") -> Any:
    """A frame of a Run stream."""
    spec = task_pb2.TaskSpec(kind=kind, queue=queue, wait_for_worker=True)
    batch = task_pb2.TaskBatch(spec=spec)
    for request_id in request_ids:
        batch.inputs.add(request_id=request_id, payload=payload)
    return task_service_pb2.RunRequest(batches=[batch])
