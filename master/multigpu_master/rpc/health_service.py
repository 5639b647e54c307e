"""grpc.health.v1, which needs no token. A peer that does not read responses delays no other, and holds few streams.

gRPC cannot end a stream whose peer has no room for the response: it stays open until the connection ends. So calls
count as open until the peer has taken their last response.
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
# Open calls of one connection; open calls and Watch streams of all connections.
CALLS_MAX = 16
ALL_CALLS_MAX = 2048
WATCHES_MAX = 64


class Health:
    """The serving state of each name. The methods write their responses."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._calls: Counter[str] = Counter()
        self._watches = 0
        self._stopping = False

    def set(self, name: str, state: int) -> None:
        """SERVICE_UNKNOWN removes the name. Ignored after `stop`."""
        if self._stopping:
            return
        if state == RESPONSE.SERVICE_UNKNOWN:
            self._states.pop(name, None)
        else:
            self._states[name] = state
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Sets every name to NOT_SERVING, for good."""
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
        raise CallError("List is not served: Check takes a name", grpc.StatusCode.UNIMPLEMENTED)

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
        """Counts the call while it is open. ExhaustedError: there are too many."""
        if self._calls[peer] >= CALLS_MAX or self._calls.total() >= ALL_CALLS_MAX:
            raise ExhaustedError(
                f"too many health calls are open, at most {CALLS_MAX} of a connection and {ALL_CALLS_MAX} in all: read "
                "their responses, then try again"
            )
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]
