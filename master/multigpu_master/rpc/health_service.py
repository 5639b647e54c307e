"""grpc.health.v1, which needs no token. A peer that does not read its responses can't delay other peers, and can keep
at most CALLS_MAX calls open in a TCP connection.

gRPC can't end a stream whose peer does not read the response: the stream stays open until the connection ends. So a
call counts as open until gRPC has sent the last response of the call.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from multigpu_master.errors import CallError, ExhaustedError, NotFoundError

NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
RESPONSE = health_pb2.HealthCheckResponse
CALLS_MAX = 16  # open calls of one connection, Watch streams included
ALL_CALLS_MAX = 2048  # open calls of all connections, Watch streams included
WATCHES_MAX = 64  # open Watch streams of all connections


class Health:
    """The serving states, by name of a service or worker. The methods send responses with `context.write` and return
    nothing, so that `_count` also covers the sending.
    """

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._calls: Counter[str] = Counter()
        self._watches = 0
        self._stopping = False

    def set(self, name: str, state: int) -> None:
        """Sets the state of a name. SERVICE_UNKNOWN removes the name. Does nothing after `stop`."""
        if self._stopping or self._states.get(name, RESPONSE.SERVICE_UNKNOWN) == state:
            return
        if state == RESPONSE.SERVICE_UNKNOWN:
            self._states.pop(name, None)
        else:
            self._states[name] = state
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Sets every name to NOT_SERVING. Later changes are ignored."""
        for name in list(self._states):
            self.set(name, RESPONSE.NOT_SERVING)
        self._stopping = True

    async def Check(self, request: Any, context: Any) -> None:
        if request.service not in self._states:
            raise NotFoundError(f"no service or worker {request.service!r} is known")
        with self._count(context.peer()):
            await context.write(RESPONSE(status=self._states[request.service]))

    async def List(self, _request: Any, context: Any) -> None:
        """Not served: callers without a token must not see the names of workers."""
        raise CallError("List is not served: call Check with a name", grpc.StatusCode.UNIMPLEMENTED)

    async def Watch(self, request: Any, context: Any) -> None:
        if self._watches >= WATCHES_MAX:
            text = f"{WATCHES_MAX} Watch streams are open already: use Check, or try again when one has ended"
            raise ExhaustedError(text)
        sent = None
        with self._count(context.peer()):
            self._watches += 1
            try:
                while True:
                    changed, state = self._changed, self._states.get(request.service, RESPONSE.SERVICE_UNKNOWN)
                    if state != sent:
                        await context.write(RESPONSE(status=state))
                        sent = state
                    await changed.wait()
            finally:
                self._watches -= 1

    @contextlib.contextmanager
    def _count(self, peer: str) -> Iterator[None]:
        """Counts the call while it is open. Raises ExhaustedError if too many calls are open."""
        is_tcp = not peer.startswith("unix:")  # all connections of a Unix socket have one peer name
        if (is_tcp and self._calls[peer] >= CALLS_MAX) or self._calls.total() >= ALL_CALLS_MAX:
            raise ExhaustedError(
                f"too many health calls are open: the limits are {CALLS_MAX} in one connection and {ALL_CALLS_MAX} in "
                "all connections. Read the responses of the open calls, then try again"
            )
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]
