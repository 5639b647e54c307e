"""LocalClient and AsyncLocalClient: the clients on a connection that leads to handlers in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NoReturn

import grpc.aio

from multigpu._async.client import AsyncClient
from multigpu._calls.blocking import BlockingCore
from multigpu._calls.core import Core
from multigpu._sync.client import Client
from multigpu._transport.connection import UNARY_TIMEOUT_S, Connection
from multigpu.errors import InvalidRequestError
from multigpu.testing._master import LocalMaster
from multigpu.testing._tasks import Send
from multigpu.v1 import task_service_pb2


class LocalClient(Client):
    """A Client that runs the registered handlers in this process, as a worker with `slots` slots would.

    Arguments are checked, values encoded, exceptions retried and tasks batched by the code that workers run. Retries
    follow at once. What concerns several workers has no effect: queues, priorities, labels and time limits of tasks.
    `device`: what `context().device` is. A class is instantiated for its first task, once for each client; leaving the
    `with` block calls its `close`. Calls other than those of handlers raise UnplaceableError or InvalidRequestError.
    """

    def __init__(self, *, slots: int = 1, device: str = "cpu", timeout: float | None = None) -> None:
        self._core = BlockingCore({}, None, timeout, 0.0, {}, LocalConnection(slots, device))
        self.master = self._core.master


class AsyncLocalClient(AsyncClient):
    """As LocalClient, for programs with an event loop."""

    def __init__(self, *, slots: int = 1, device: str = "cpu", timeout: float | None = None) -> None:
        self._core = Core({}, None, timeout, 0.0, {}, LocalConnection(slots, device))
        self.master = self._core.master


class LocalConnection(Connection):
    """Leads to a LocalMaster in place of a channel."""

    def __init__(self, slots: int, device: str) -> None:
        if not (isinstance(slots, int) and slots >= 1):
            raise ValueError(f"slots={slots!r}: give a whole number, 1 or more")
        super().__init__("local", 0.0)
        self._local = LocalMaster(slots, device)

    @property
    def stub(self) -> NoReturn:
        raise _unsupported("it has no stream of the outcomes of other clients")

    async def unary(
        self, method: str, request: Any, timeout_s: float = UNARY_TIMEOUT_S, *, service: str = "stub"
    ) -> Any:
        self.check()
        if service != "stub":
            raise _unsupported(f"it has no workers or queues to administer (AdminService.{method})")
        return await self._local.unary(method, request)

    def open_run(self) -> Any:
        self.check()
        return LocalStream(self._local)

    async def ready(self, timeout_s: float | None) -> bool:
        return True

    async def close(self) -> None:
        if not self.closed:
            await super().close()
            await self._local.close()


class LocalStream:
    """The Run stream, as RunStream uses one of gRPC."""

    def __init__(self, master: LocalMaster) -> None:
        self._master = master
        self._responses: deque[task_service_pb2.RunResponse] = deque()
        self._woken = asyncio.Event()
        self._cancelled = False
        self._send: Send = self._put

    def _put(self, response: task_service_pb2.RunResponse) -> None:
        self._responses.append(response)
        self._woken.set()

    async def initial_metadata(self) -> tuple[()]:
        return ()

    async def write(self, frame: bytes) -> None:
        self._master.receive(task_service_pb2.RunRequest.FromString(frame), self._send)

    async def read(self) -> Any:
        while not (self._responses or self._cancelled):
            self._woken.clear()
            await self._woken.wait()
        if self._cancelled:
            return grpc.aio.EOF
        response = self._responses.popleft()
        return response, response.ByteSize()

    def cancel(self) -> None:
        self._cancelled = True
        self._woken.set()

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return ""


def _unsupported(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"LocalClient runs handlers only: {why}; test this with the fixture multigpu_fleet")
