"""From the arguments of a client's method to calls: request_ids, specs, payloads, and a Call for each way to wait."""

import asyncio
import base64
import itertools
import secrets
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from multigpu._calls.mapping import MakeCall, MapBuffer, MapCall
from multigpu._calls.streaming import Part
from multigpu._encoding import RAW, encode
from multigpu._transport.call import Answer, Call
from multigpu._transport.connection import MESSAGE_BYTES_MAX
from multigpu._transport.payloads import LARGE_BYTES
from multigpu.errors import INVALID_ARGUMENT, NOT_FOUND, InvalidTaskError, NotFoundError, RejectedError
from multigpu.options import Input, SpecCache, per_task_fields
from multigpu.outcome import Outcome
from multigpu.v1 import task_pb2

C = TypeVar("C", bound=Call)
Encode = Callable[[Any], Any]
_NO_SPEC = task_pb2.TaskSpec()
# The rest of a message is for the spec.
_PAYLOAD_BYTES_MAX = MESSAGE_BYTES_MAX - (1 << 20)


def request_ids() -> Callable[[], str]:
    """Makes request_ids: 60 random bits, then a counter, so that they sort in order of creation. Thread-safe."""
    prefix = base64.b32encode(secrets.token_bytes(8)).decode().lower()[:12]
    following = itertools.count(1).__next__
    return lambda: f"{prefix}{following():09x}"


class FutureCall(Call):
    """A call whose answer one coroutine awaits."""

    __slots__ = ("future",)

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        # An error is a result too: asyncio complains of exceptions that are never retrieved.
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def settle(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer)


class ThreadCall(Call):
    """A call whose answer one thread awaits, which is not the event loop's."""

    __slots__ = ("_answer", "_answered")

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self._answer: Answer | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def settle(self, answer: Answer) -> None:
        if self._answer is None:
            self._answer = answer
            self._answered.release()

    def wait(self, timeout_s: float | None) -> Answer | None:
        """The answer; None: there was none within the time."""
        if not self._answered.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            return None
        assert self._answer is not None, "the call is settled"
        return self._answer


class FollowCall(FutureCall):
    """A call for a task that was submitted before."""

    __slots__ = ()
    follows = True

    def __init__(self, request_id: str) -> None:
        super().__init__(_NO_SPEC, b"", request_id, None)

    def settle(self, answer: Answer) -> None:
        super().settle(followed(answer))


class FollowMapCall(MapCall):
    """As FollowCall, for one of many handles."""

    __slots__ = ("handle",)
    follows = True

    def __init__(self, handle: Any, buffer: MapBuffer) -> None:
        super().__init__(_NO_SPEC, b"", handle.request_id, None, buffer)
        self.handle = handle
        if handle._outcome is not None:  # noqa: SLF001  it has ended
            self.answer = self  # type: ignore[assignment]  # as in settle

    def settle(self, answer: Answer) -> None:
        """What the map takes is this call: the answer belongs to the handle."""
        found = followed(answer)
        if isinstance(found, Outcome):
            self.handle._outcome = found  # noqa: SLF001
            super().settle(self)  # type: ignore[arg-type]
        else:
            super().settle(found)


def followed(answer: Answer) -> Answer:
    """The answer to a follower: a rejection means that there is no such task."""
    if isinstance(answer, RejectedError) and answer.code == NOT_FOUND:
        return NotFoundError(answer.message)
    return answer


class StreamCall(Call):
    """A call whose partial outputs one coroutine awaits, one after the other."""

    __slots__ = ("_arrived", "_items")

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self._items: deque[Part | Answer] = deque()
        # What next_item waits for; None: it never waited. An asyncio.Queue takes 2.6 KiB more.
        self._arrived: asyncio.Future[None] | None = None

    def receive_partial(self, data: bytes, content_type: str) -> None:
        self._add(Part(data, content_type))

    def settle(self, answer: Answer) -> None:
        if isinstance(answer, Outcome):  # it has all partial outputs, also those that the stream did not bring
            missing = answer.message.partials[self.partials_received :]
            types = answer.message.partial_content_types[self.partials_received :]
            self._add(*map(Part, missing, types or [RAW] * len(missing)))
        self._add(answer)

    def _add(self, *items: Part | Answer) -> None:
        self._items.extend(items)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def next_item(self) -> Part | Outcome:
        """The next partial output, and after the last one the outcome of a task that SUCCEEDED. Else its error."""
        while not self._items:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return self._checked(self._items.popleft())

    def _checked(self, item: Part | Answer) -> Part | Outcome:
        """What next_item returns for an item, or raises."""
        if isinstance(item, Part):
            return item
        if isinstance(item, Outcome) and item.succeeded:
            return item
        raise item.to_error() if isinstance(item, Outcome) else item


class FollowStreamCall(StreamCall):
    """A StreamCall for a task that was submitted before: it has the partial outputs from the first on."""

    __slots__ = ()
    follows = True
    streams = True

    def __init__(self, request_id: str) -> None:
        super().__init__(_NO_SPEC, b"", request_id, None)

    def settle(self, answer: Answer) -> None:
        super().settle(followed(answer))

    def _checked(self, item: Part | Answer) -> Part | Outcome:
        """The outcome is returned, whatever it is."""
        if isinstance(item, Part | Outcome):
            return item
        raise item


class CallFactory:
    """Makes the calls of one client. Safe to use from several threads."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        """`defaults`: SpecOptions. Raises TypeError, InvalidTaskError."""
        self._new_id = request_ids()
        self._spec = SpecCache(defaults).get
        self._spec("", RAW, {})  # a wrong default shows now

    def one(self, cls: Callable[..., C], kind: str, payload: Any, options: dict[str, Any], traceparent: str) -> C:
        """A call of class `cls` for a single task. `options`: TaskOptions."""
        own = per_task_fields(options) if options else {}
        request_id = own.pop("request_id", "")
        if traceparent:
            own["traceparent"] = traceparent
        return cls(*self._prepare(kind, payload, options, own or None, request_id))

    def many(
        self, kind: str, options: Mapping[str, Any], traceparent: str, encode: Encode | None, *, answer_errors: bool
    ) -> MakeCall:
        """A function that makes a map's calls. `encode`: makes the payload, or an Input, of an item. `answer_errors`:
        the error of an item that can't be a payload becomes its answer.
        """
        prepare = self._prepare
        no_payload = self._spec(kind, RAW, options)  # a wrong option shows now, and not with the first item
        common = {"traceparent": traceparent} if traceparent else None

        def make(item: Any, buffer: MapBuffer) -> MapCall:
            own = common
            request_id = ""
            try:
                if encode is not None:
                    item = encode(item)
                if type(item) is Input:
                    own, request_id, item = _of_input(item, common)
                return MapCall(*prepare(kind, item, options, own, request_id), buffer)
            except (InvalidTaskError, OSError, TypeError) as error:
                if not answer_errors:
                    error.add_note(f"The item is number {buffer.pulled}, counted from 0.")
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
        for at, item in enumerate(items):
            try:
                own, request_id, payload = _of_input(item, common) if type(item) is Input else (common, "", item)
                spec, data, request_id, own = self._prepare(kind, payload, options, own, request_id)
            except (InvalidTaskError, TypeError) as error:
                error.add_note(f"The item is number {at}, counted from 0.")
                raise
            yield spec, task_pb2.TaskInput(payload=data, request_id=request_id, **(own or {}))

    def _prepare(
        self, kind: str, payload: Any, options: Mapping[str, Any], own: dict[str, Any] | None, request_id: str
    ) -> tuple[task_pb2.TaskSpec, bytes, str, dict[str, Any] | None]:
        """The arguments of a Call. `request_id`: empty if the caller gave none. Raises InvalidTaskError, TypeError."""
        try:
            data, content_type = (payload, RAW) if type(payload) is bytes else encode(payload)
        except ValueError as error:
            if type(payload) is Input:
                raise TypeError("an Input is an item of map or submit_many; here write request_id=…, units=…") from None
            raise InvalidTaskError(INVALID_ARGUMENT, str(error)) from error
        if len(data) > _PAYLOAD_BYTES_MAX:
            limit = "the limit is the master's payload_bytes_max, 32 MiB by default"
            raise InvalidTaskError(INVALID_ARGUMENT, f"the payload has {len(data):,} bytes; {limit}: split it")
        if request_id and len(data) >= LARGE_BYTES:
            # The master compares payloads of one request_id, also those whose bytes it never reads.
            own = {**(own or {}), "payload_crc32": zlib.crc32(data)}
        return self._spec(kind, content_type, options), data, request_id or self._new_id(), own


def _of_input(item: Input, common: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str, Any]:
    own = per_task_fields({"request_id": item.request_id, "partition_key": item.partition_key, "units": item.units})
    request_id = own.pop("request_id", "")
    return {**own, **(common or {})} or None, request_id, item.payload
