"""The operator's calls: one blocking connection to a master, deadlines on everything, errors in words.

Work with tasks goes through the SDK; what is here is for AdminService and for the reading half of TaskService, where a
stream, a window or a retry would only be in the way. Nothing is retried: a person at a prompt wants to know at once.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self

# Its own complaints, on stderr, say the same as our errors, only longer. Read when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import click
import grpc

from multigpu._transport.connection import unavailable
from multigpu._transport.credentials import Credentials
from multigpu.cli import show
from multigpu.cli.failures import Failure, NotFound, Unreachable, WrongUsage
from multigpu.cli.options import client_config
from multigpu.config.config import ClientConfig, ConfigError, load_client_config
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1.admin_service_pb2_grpc import AdminServiceStub
from multigpu.v1.task_service_pb2_grpc import TaskServiceStub

CALL_TIMEOUT_S = 15.0  # the master rejects after 10 s what its disk does not take
PAGE_SIZE_MAX = 1000
MESSAGE_BYTES_MAX = 64 * 1024 * 1024

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A master is a neighbour; a proxy in the environment is meant for the web.
    ("grpc.enable_http_proxy", 0),
    # Who polls for a master to appear should see it when it does.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
)


def wait_until_connected(address: str, credentials: Credentials) -> None:
    """Returns once a connection can be made. Reads no token."""
    try:
        with credentials.channel(address, CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result()
    except ConfigError as error:
        raise WrongUsage(str(error)) from error


class Master:
    """A connection to one master. Every method raises Failure with the exit code that fits."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """`credentials`: by default those of the settings in force."""
        self.address = address
        try:
            self.credentials = credentials or Credentials.of_client(_config())
            channel = self.credentials.channel(address, CHANNEL_OPTIONS)
            metadata = self.credentials.metadata(address)
        except ConfigError as error:
            raise WrongUsage(str(error)) from error
        self._channel = channel if metadata is None else grpc.intercept_channel(channel, WithMetadata(metadata))
        # Generated code has no types for stubs.
        self.admin: Any = _stub(AdminServiceStub, self._channel)
        self.tasks: Any = _stub(TaskServiceStub, self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, method: Callable[..., Any], request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One unary call: `master.call(master.admin.GetStats, GetStatsRequest())`."""
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            self._fail(error, timeout_s)

    def pages(self, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        """The answers of a List call, page by page; `request.page_token` is moved along."""
        while True:
            page = self.call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def newest_tasks(self, method: Callable[..., Any], request: Any, limit: int) -> list[task_pb2.Task]:
        """At most `limit` tasks of a List call; if there are more, a note says so."""
        request.page_size = min(limit, PAGE_SIZE_MAX)
        found: list[task_pb2.Task] = []
        for page in self.pages(method, request):
            found += page.tasks
            if len(found) >= limit:
                show.note_of_limit(more=len(found) > limit or bool(page.next_page_token), limit=limit)
                break
        return found[:limit]

    def list_workers(self) -> list[admin.Worker]:
        """Every worker that the master knows, by worker_id."""
        request = admin.ListWorkersRequest(page_size=PAGE_SIZE_MAX)
        return [worker for page in self.pages(self.admin.ListWorkers, request) for worker in page.workers]

    def connected_workers(self) -> list[admin.Worker]:
        """Those of `list_workers` that are connected."""
        return [worker for worker in self.list_workers() if worker.state == admin.WORKER_STATE_ACTIVE]

    def find_worker_id(self, prefix: str) -> str:
        """The id of the one worker whose id is, or begins with, `prefix`."""
        worker_ids = [worker.worker_id for worker in self.list_workers()]
        if prefix in worker_ids:
            return prefix
        found = [worker_id for worker_id in worker_ids if worker_id.startswith(prefix)]
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFound(f"{prefix!r} fits {len(found)} workers: {', '.join(found)}; write more of the id")
        known = ", ".join(worker_ids) or "none"
        raise NotFound(f"no worker's id begins with {prefix!r}; the master knows: {known}")

    def _fail(self, error: grpc.RpcError, timeout_s: float) -> NoReturn:
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAVAILABLE:
            raise Unreachable(unavailable(self.address, details, self.credentials)) from error
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            message = (
                f"the master at {self.address} did not answer within {timeout_s:g} s; is it stopped or overloaded?"
            )
            raise Unreachable(message) from error
        if code == grpc.StatusCode.UNIMPLEMENTED:
            message = (
                f"what listens at {self.address} does not know this call: it is no multigpu master, or an older one"
            )
            raise Failure(message) from error
        failure = NotFound if code == grpc.StatusCode.NOT_FOUND else Failure
        raise failure(details or f"the master answered {code.name}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Details(grpc.ClientCallDetails):  # type: ignore[misc]  # grpc has no types
    """What a call is made with, changed."""

    method: Any
    timeout: Any
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class WithMetadata(  # every call of ours has one request
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
):
    """Sends metadata with every call."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with(details), request)

    def _with(self, d: Any) -> Any:
        return _Details(
            method=d.method,
            timeout=d.timeout,
            metadata=(*(d.metadata or ()), *self._metadata),
            credentials=d.credentials,
            wait_for_ready=d.wait_for_ready,
            compression=d.compression,
        )


def _config() -> ClientConfig:
    context = click.get_current_context(silent=True)
    return client_config(None) if context is not None else load_client_config()


def _stub(stub_class: Callable[..., Any], channel: Any) -> Any:
    return stub_class(channel)
