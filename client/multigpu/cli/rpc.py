"""Calls of mgpuctl to a master: one blocking connection, a deadline for each call, errors as Failures.

Commands use it for AdminService, and to read and cancel tasks; they submit tasks through the SDK. Calls are not
retried, so that a person at a prompt sees an error at once.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, TypeVar

# gRPC would log the errors that mgpuctl prints. It reads the variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import click
import grpc

from multigpu._transport.connection import unavailable
from multigpu._transport.credentials import Credentials
from multigpu.cli import show
from multigpu.cli.failures import Failure, NotFound, Unreachable, WrongUsage
from multigpu.cli.options import client_config, master_option
from multigpu.config import config
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1.admin_service_pb2_grpc import AdminServiceStub
from multigpu.v1.task_service_pb2_grpc import TaskServiceStub

CALL_TIMEOUT_S = 15.0  # more than the 10 s after which the master rejects a call that finds no disk space
COMPLETION_TIMEOUT_S = 1.0
PAGE_SIZE_MAX = 1000
MESSAGE_BYTES_MAX = 64 * 1024 * 1024

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Ignore http_proxy and https_proxy: they are meant for web pages.
    ("grpc.enable_http_proxy", 0),
    # So that a command that waits for a master connects soon after the master starts.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
)

F = TypeVar("F", bound=Callable[..., Any])


def wait_until_connected(address: str, credentials: Credentials) -> None:
    """Returns when a connection to the address succeeds. Needs no token."""
    try:
        with credentials.channel(address, CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result()
    except config.ConfigError as error:
        raise WrongUsage(str(error)) from error


class Master:
    """A connection to one master. Its methods raise Failure or a subclass, which has the exit code."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """`credentials`: by default those of the current settings."""
        self.address = address
        try:
            self.credentials = credentials or Credentials.of_client(_config())
            self._channel = self.credentials.channel(address, CHANNEL_OPTIONS)
            self._metadata = self.credentials.metadata(address)
        except config.ConfigError as error:
            raise WrongUsage(str(error)) from error
        # Generated code has no types for stubs.
        self.admin: Any = AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.tasks: Any = TaskServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, method: Callable[..., Any], request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One unary call: `master.call(master.admin.GetStats, GetStatsRequest())`."""
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            self._fail(error, timeout_s)

    def first(self, method: Callable[..., Any], request: Any) -> Any:
        """The first message of a stream."""
        try:
            stream = method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
            message = next(stream)
        except grpc.RpcError as error:
            self._fail(error, CALL_TIMEOUT_S)
        stream.cancel()
        return message

    def pages(self, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        """The responses of a List call, one for each page. Changes `request.page_token`."""
        while True:
            page = self.call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def newest_tasks(self, method: Callable[..., Any], request: Any, limit: int) -> list[task_pb2.Task]:
        """The newest `limit` tasks of a List call. If there are more, prints a note to stderr."""
        request.page_size = min(limit, PAGE_SIZE_MAX)
        found: list[task_pb2.Task] = []
        for page in self.pages(method, request):
            found += page.tasks
            if len(found) >= limit:
                if len(found) > limit or page.next_page_token:
                    show.note(f"only the newest {limit:,}; --limit shows more")
                break
        return found[:limit]

    def list_workers(self) -> list[admin.Worker]:
        """Every worker that the master knows, sorted by worker_id."""
        request = admin.ListWorkersRequest(page_size=PAGE_SIZE_MAX)
        return [worker for page in self.pages(self.admin.ListWorkers, request) for worker in page.workers]

    def connected_workers(self) -> list[admin.Worker]:
        return [worker for worker in self.list_workers() if worker.state == admin.WORKER_STATE_ACTIVE]

    def list_queues(self) -> list[admin.Queue]:
        request = admin.ListQueuesRequest(page_size=PAGE_SIZE_MAX)
        return [queue for page in self.pages(self.admin.ListQueues, request) for queue in page.queues]

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
            raise Unreachable(
                f"the master at {self.address} did not answer within {timeout_s:g} s; is it stopped or overloaded?"
            ) from error
        if code == grpc.StatusCode.UNIMPLEMENTED:
            raise Failure(
                f"the server at {self.address} does not know this call: it is no multigpu master, or an older one"
            ) from error
        failure = NotFound if code == grpc.StatusCode.NOT_FOUND else Failure
        raise failure(details or f"the master answered {code.name}") from error


def connected(command: F) -> F:
    """Adds `--master` to a command, and calls the command with the connection as `master`."""

    @functools.wraps(command)
    def with_connection(*args: Any, address: str, **kwargs: Any) -> Any:
        with Master(address) as master:
            return command(*args, master=master, **kwargs)

    return master_option(with_connection)  # type: ignore[return-value]  # as in master_option


def complete_worker_id(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Worker ids for the shell's completion; none if the master does not answer quickly."""
    master_flag = context.params.get("master") or context.find_root().params.get("master")
    try:
        address = config.load(config.ClientConfig, flags={"master": master_flag}).config.master
        with Master(address) as master:
            request = admin.ListWorkersRequest(page_size=PAGE_SIZE_MAX)
            answer = master.call(master.admin.ListWorkers, request, timeout_s=COMPLETION_TIMEOUT_S)
    except (Failure, config.ConfigError):
        return []
    return [worker.worker_id for worker in answer.workers if worker.worker_id.startswith(incomplete)]


workers_argument = click.argument(
    "worker_ids", metavar="WORKER...", nargs=-1, required=True, shell_complete=complete_worker_id
)


def _config() -> config.ClientConfig:
    context = click.get_current_context(silent=True)
    return client_config(None) if context is not None else config.load_client_config()
