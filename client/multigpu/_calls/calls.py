"""From what a caller says to calls: names, specs and the calls of each kind of waiting."""

import asyncio
import base64
import itertools
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from multigpu._calls.mapping import MakeCall, MapBuffer, MapCall
from multigpu._calls.streaming import Part
from multigpu._transport.encoding import RAW, encode
from multigpu._transport.payloads import LARGE_BYTES
from multigpu._transport.run_state import Answer, Call
from multigpu._transport.run_stream import check_payload
from multigpu.errors import InvalidTaskError
from multigpu.options import Input, SpecCache, WrongInput, own_fields
from multigpu.outcome import Outcome
from multigpu.v1 import task_pb2


class RequestIds:
    """Names for tasks: 60 random bits for the client, then a counter, so that they sort in the order of their making.

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
        # Also for errors a result, not an exception: nobody need retrieve it.
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
        if isinstance(answer, Outcome):  # it has them all: those that the stream did not bring too
            received = self._taken + len(self._parts)
            missing = answer.message.partials[received:]
            types = answer.message.partial_content_types[received:]
            self._parts.extend(map(Part, missing, types or [RAW] * len(missing)))
        self._wake()

    async def next_part(self) -> Part | None:
        """The next partial output; None when the task has SUCCEEDED and there are no more. Raises how it ended else."""
        while not self._parts:
            answer = self._answer
            if isinstance(answer, Outcome):
                if not answer.succeeded:
                    raise answer.to_error()
                return None
            if answer is not None:
                raise answer
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._taken += 1
        return self._parts.popleft()

    @property
    def outcome(self) -> Outcome:
        """How it ended; after `next_part` has said None."""
        assert isinstance(self._answer, Outcome), "the task has not succeeded"
        return self._answer

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class CallFactory:
    """Makes the calls of one client."""

    def __init__(self) -> None:
        self.ids = RequestIds()
        self.specs = SpecCache()

    def one(
        self,
        cls: Callable[[task_pb2.TaskSpec, bytes, str, dict[str, Any] | None], Any],
        kind: str,
        payload: Any,
        options: dict[str, Any],
        traceparent: str,
    ) -> Any:
        """A call of class `cls` for a single task. `options`: TaskOptions."""
        data, content_type = encode(payload)
        check_payload(data)
        own = own_fields(options) if options else None
        named = own and own.pop("request_id", None)
        request_id = named or self.ids.new()
        if traceparent:
            own = {**(own or {}), "traceparent": traceparent}
        if named:
            own = _with_crc(own, data)
        return cls(self.specs.get(kind, content_type, options), data, request_id, own or None)

    def many(self, kind: str, options: Mapping[str, Any], traceparent: str, *, answer_errors: bool) -> MakeCall:
        """A function that makes a map's calls. `answer_errors`: an item that can't be a payload answers for itself."""
        specs = self.specs
        new_id = self.ids.new
        specs.get(kind, RAW, options)  # a wrong option shows now, and not with the first item
        common = {"traceparent": traceparent} if traceparent else None

        def make(item: Any, buffer: MapBuffer) -> MapCall:
            own = common
            request_id = ""
            try:
                if type(item) is Input:
                    own, request_id, item = _of_input(item, common)
                if type(item) is WrongInput:
                    raise item.error
                data, content_type = encode(item)
                check_payload(data)
            except (InvalidTaskError, OSError, TypeError) as error:
                if not answer_errors:
                    raise
                call = MapCall(specs.get(kind, RAW, options), b"", "", None, buffer)
                call.answer = error  # type: ignore[assignment]  # an OSError or TypeError is handed on as well
                return call
            if request_id:
                own = _with_crc(own, data)
            return MapCall(specs.get(kind, content_type, options), data, request_id or new_id(), own, buffer)

        return make

    def inputs(self, kind: str, items: Any, options: Mapping[str, Any], traceparent: str) -> Any:
        """(spec, TaskInput) of each item, for Submit."""
        common = {"traceparent": traceparent} if traceparent else None
        for item in items:
            own: dict[str, Any] | None = common
            request_id = ""
            if type(item) is Input:
                own, request_id, item = _of_input(item, common)  # noqa: PLW2901  an Input is its payload and more
            data, content_type = encode(item)
            check_payload(data)
            task_input = task_pb2.TaskInput(payload=data, request_id=request_id or self.ids.new(), **(own or {}))
            yield self.specs.get(kind, content_type, options), task_input


def _with_crc(own: dict[str, Any] | None, payload: bytes) -> dict[str, Any] | None:
    """For a task whose caller named it: what tells its payload from another's, if the master may not see the bytes."""
    return own if len(payload) < LARGE_BYTES else {**(own or {}), "payload_crc32": zlib.crc32(payload)}


def _of_input(item: Input, common: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str, Any]:
    own = own_fields({"request_id": item.request_id, "partition_key": item.partition_key, "units": item.units}) or {}
    request_id = own.pop("request_id", "")
    return {**own, **(common or {})} or None, request_id, item.payload
