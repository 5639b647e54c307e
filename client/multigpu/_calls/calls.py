"""From the arguments of a client's method to calls: request_ids, specs, payloads, and a Call for each way to wait."""

import asyncio
import base64
import itertools
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from multigpu._calls.mapping import MakeCall, MapBuffer, MapCall
from multigpu._calls.streaming import Part
from multigpu._transport.connection import MESSAGE_BYTES_MAX
from multigpu._transport.encoding import RAW, encode
from multigpu._transport.payloads import LARGE_BYTES
from multigpu._transport.run_state import Answer, Call
from multigpu.errors import INVALID_ARGUMENT, InvalidTaskError, Outcome
from multigpu.options import Input, SpecCache, WrongInput, own_fields
from multigpu.v1 import task_pb2

C = TypeVar("C", bound=Call)
# The rest of a message is for the spec.
_PAYLOAD_BYTES_MAX = MESSAGE_BYTES_MAX - (1 << 20)


class RequestIds:
    """Makes request_ids: 60 random bits of the client, then a counter, so that they sort in order of creation.

    Safe to call from several threads.
    """

    def __init__(self) -> None:
        self._prefix = base64.b32encode(secrets.token_bytes(8)).decode().lower()[:12]
        self._next = itertools.count(1).__next__

    def new(self) -> str:
        return f"{self._prefix}{self._next():09x}"


class FutureCall(Call):
    """A call whose answer one coroutine awaits."""

    __slots__ = ("future",)

    def __init__(self, spec: task_pb2.TaskSpec, payload: bytes, request_id: str, own: dict[str, Any] | None) -> None:
        super().__init__(spec, payload, request_id, own)
        # An error is a result too: asyncio complains of exceptions that are never retrieved.
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def settle(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer)


class StreamCall(Call):
    """A call whose partial outputs one coroutine awaits, one after the other."""

    __slots__ = ("_answer", "_parts", "_taken", "_waiter")

    def __init__(self, spec: task_pb2.TaskSpec, payload: bytes, request_id: str, own: dict[str, Any] | None) -> None:
        super().__init__(spec, payload, request_id, own)
        self._parts: deque[Part] = deque()
        self._taken = 0
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None

    def receive_partial(self, data: bytes, content_type: str) -> None:
        self._parts.append(Part(data, content_type))
        self._wake()

    def settle(self, answer: Answer) -> None:
        self._answer = answer
        if isinstance(answer, Outcome):  # it has all partial outputs, also those that the stream did not bring
            received = self._taken + len(self._parts)
            missing = answer.message.partials[received:]
            types = answer.message.partial_content_types[received:]
            self._parts.extend(map(Part, missing, types or [RAW] * len(missing)))
        self._wake()

    async def next_part(self) -> Part | None:
        """The next partial output; None after the last one of a task that SUCCEEDED. Otherwise raises its error."""
        while not self._parts:
            answer = self._answer
            if isinstance(answer, Outcome):
                if answer.succeeded:
                    return None
                raise answer.to_error()
            if answer is not None:
                raise answer
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._taken += 1
        return self._parts.popleft()

    @property
    def outcome(self) -> Outcome:
        """How it ended. Only after `next_part` has returned None."""
        assert isinstance(self._answer, Outcome), "the task has not succeeded"
        return self._answer

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class CallFactory:
    """Makes the calls of one client. Safe to use from several threads."""

    def __init__(self) -> None:
        self.ids = RequestIds()
        self.specs = SpecCache()

    def one(self, cls: Callable[..., C], kind: str, payload: Any, options: dict[str, Any], traceparent: str) -> C:
        """A call of class `cls` for a single task. `options`: TaskOptions."""
        own = own_fields(options) if options else {}
        request_id = own.pop("request_id", "")
        if traceparent:
            own["traceparent"] = traceparent
        return cls(*self._prepare(kind, payload, options, own or None, request_id))

    def many(self, kind: str, options: Mapping[str, Any], traceparent: str, *, answer_errors: bool) -> MakeCall:
        """A function that makes a map's calls. `answer_errors`: an item that can't be a payload becomes an answer."""
        prepare = self._prepare
        no_payload = self.specs.get(kind, RAW, options)  # a wrong option shows now, and not with the first item
        common = {"traceparent": traceparent} if traceparent else None

        def make(item: Any, buffer: MapBuffer) -> MapCall:
            own = common
            request_id = ""
            try:
                if type(item) is Input:
                    own, request_id, item = _of_input(item, common)
                elif type(item) is WrongInput:
                    raise item.error
                return MapCall(*prepare(kind, item, options, own, request_id), buffer)
            except (InvalidTaskError, OSError, TypeError) as error:
                if not answer_errors:
                    raise
                call = MapCall(no_payload, b"", "", None, buffer)
                call.answer = error  # type: ignore[assignment]  # an OSError or TypeError is handed on as well
                return call

        return make

    def inputs(
        self, kind: str, items: Iterable[Any], options: Mapping[str, Any], traceparent: str
    ) -> Iterator[tuple[task_pb2.TaskSpec, task_pb2.TaskInput]]:
        """The spec and TaskInput of each item, for Submit."""
        common = {"traceparent": traceparent} if traceparent else None
        for item in items:
            own, request_id, payload = _of_input(item, common) if type(item) is Input else (common, "", item)
            spec, data, request_id, own = self._prepare(kind, payload, options, own, request_id)
            yield spec, task_pb2.TaskInput(payload=data, request_id=request_id, **(own or {}))

    def _prepare(
        self, kind: str, payload: Any, options: Mapping[str, Any], own: dict[str, Any] | None, request_id: str
    ) -> tuple[task_pb2.TaskSpec, bytes, str, dict[str, Any] | None]:
        """The arguments of a Call. `request_id`: empty if the caller gave none. Raises InvalidTaskError, TypeError."""
        try:
            data, content_type = encode(payload)
        except ValueError as error:
            raise InvalidTaskError(INVALID_ARGUMENT, str(error)) from error
        if len(data) > _PAYLOAD_BYTES_MAX:
            limit = "the limit is the master's payload_bytes_max, 32 MiB by default"
            raise InvalidTaskError(INVALID_ARGUMENT, f"the payload has {len(data):,} bytes; {limit}: split it")
        if request_id and len(data) >= LARGE_BYTES:
            # The master compares payloads of one request_id, also those whose bytes it never reads.
            own = {**(own or {}), "payload_crc32": zlib.crc32(data)}
        return self.specs.get(kind, content_type, options), data, request_id or self.ids.new(), own


def _of_input(item: Input, common: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str, Any]:
    own = own_fields({"request_id": item.request_id, "partition_key": item.partition_key, "units": item.units})
    request_id = own.pop("request_id", "")
    return {**own, **(common or {})} or None, request_id, item.payload
