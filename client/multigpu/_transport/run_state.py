"""The calls of a client's Run stream: pure bookkeeping, frames in, frames out, no I/O and no clock.

A call is one task that this process waits for. From `start` until its answer it is *unsettled*; an answer is an
outcome, or an error in its place. A call waits in the *outbox* until a frame takes it. When the stream breaks, all
unsettled calls go back to the outbox in their first order: the master recognises tasks by request_id, so sending them
again is safe. The first answer counts; a second outcome finds no call and is dropped.

A call whose caller has left is *withdrawn*: dropped if it was never sent; otherwise its request_id is sent to be
cancelled, again on each new stream, until the master says how the task ended. The request_id may be started again at
once, also before the master has answered.
"""

import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from multigpu._transport.call import OVERHEAD_BYTES, Answer, Call
from multigpu._transport.payload_sharing import Sharing
from multigpu._transport.payloads import LARGE_BYTES, Directory, Reference, is_transient
from multigpu._transport.protobuf import Frame
from multigpu._transport.task_batch import TaskBatch
from multigpu._transport.window import Window
from multigpu.errors import (
    ALREADY_EXISTS,
    CANCELLED,
    NOT_FOUND,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    AlreadyExistsError,
    MultigpuError,
    RejectedError,
    UnavailableError,
)
from multigpu.outcome import Outcome
from multigpu.v1 import task_pb2, task_service_pb2

# Limits of a frame; a larger payload goes alone. Large enough to amortise the cost of a message, small enough that the
# master can work on one frame while the next is being written.
FRAME_TASKS_MAX = 1024
FRAME_BYTES_MAX = 1 << 20
# Withdrawn tasks that the master has not confirmed. It never answers for a task that it doesn't know.
_CANCELLING_MAX = 10_000
# The error type of a withdrawn task, and the codes by which a withdrawal is rejected.
WITHDRAWN = "Withdrawn"
_WITHDRAWAL_CODES = (CANCELLED, NOT_FOUND)
_IN_USE = "this client waits for another task with this request_id; use a request_id for one task only"


class RunState:
    def __init__(self, window: Window, *, wait_when_full: bool = True) -> None:
        self._window = window
        self._retried = (RESOURCE_EXHAUSTED, UNAVAILABLE) if wait_when_full else (UNAVAILABLE,)
        self._client_id = secrets.token_hex(8)
        self.sharing = Sharing()
        self._unsettled: dict[str, Call] = {}
        self._outbox: deque[Call] = deque()
        self._cancelling: dict[str, None] = {}
        self._cancel_outbox: list[str] = []
        # Withdrawals sent on this stream that the master has not answered, by request_id. Each is answered once; the
        # answer does not concern a call that was started again meanwhile.
        self._withdrawals: Counter[str] = Counter()
        # Further calls for the request_id of an unsettled call. Two calls that submit, or two that follow, get the same
        # answer. If the first follows and the second submits, the second is sent after the first was answered: only the
        # master can compare their tasks.
        self._joined: dict[str, list[Call]] = {}

    @property
    def idle(self) -> bool:
        """Whether no stream is needed."""
        return not self._unsettled and not self._cancelling

    @property
    def in_flight(self) -> int:
        """Calls without an answer."""
        return len(self._unsettled)

    @property
    def waits_to_send(self) -> bool:
        """Whether calls wait for the next frame."""
        return bool(self._outbox)

    @property
    def cancelling(self) -> int:
        """Withdrawn tasks that the master has not yet confirmed."""
        return len(self._cancelling)

    def unsettled(self) -> list[Call]:
        """All calls without an answer, in the order of their start."""
        return [*self._unsettled.values(), *(twin for twins in self._joined.values() for twin in twins)]

    def start(self, calls: Iterable[Call]) -> None:
        """Takes calls that the window has admitted."""
        unsettled = self._unsettled
        outbox = self._outbox
        cancelling = self._cancelling
        for call in calls:
            if cancelling and call.request_id in cancelling:
                del cancelling[call.request_id]
                if call.request_id in self._cancel_outbox:
                    self._cancel_outbox.remove(call.request_id)  # not sent yet: the task goes on
            first = unsettled.get(call.request_id)
            if first is None:
                unsettled[call.request_id] = call
                outbox.append(call)
            elif first.follows or call.follows or _same_task(first, call):
                self._joined.setdefault(call.request_id, []).append(call)
                if call.streams:
                    outbox.append(call)  # the master sends the partial outputs again, from the first on
            else:
                call.done = True
                self._window.free(1, call.nbytes)
                call.settle(AlreadyExistsError(ALREADY_EXISTS, _IN_USE))

    def withdraw(self, call: Call) -> None:
        """The caller has left. Harmless for a settled call."""
        request_id = call.request_id
        if self._unsettled.get(request_id) is not call:
            joined = self._joined.get(request_id, [])
            if call in joined:
                joined.remove(call)
                call.done = True
                self._window.free(1, call.nbytes)
            return
        call.done = True
        del self._unsettled[request_id]
        self._window.free(1, call.nbytes)
        others = self._joined.pop(request_id, None)
        if others:
            self._replace(call, others)
        elif call.sent and not call.follows:
            self._cancelling[request_id] = None
            self._cancel_outbox.append(request_id)
            if len(self._cancelling) > _CANCELLING_MAX:
                del self._cancelling[next(iter(self._cancelling))]

    def _replace(self, call: Call, joined: list[Call]) -> None:
        """The first of the joined calls takes the place of a withdrawn one."""
        first = joined.pop(0)
        self._unsettled[first.request_id] = first
        self._outbox.append(first)
        first.sent = call.sent and call.follows == first.follows
        if joined:
            self._joined[first.request_id] = joined

    def next_frame(self, *, report: bool = False) -> bytes | None:
        """The next serialized RunRequest; None: there is nothing to send. `report`: also if only a pending report is
        there.
        """
        frame = Frame(self._frame_of_withdrawals())
        message = frame.message
        outbox = self._outbox
        tasks = nbytes = 0
        batch = None
        while outbox and tasks < FRAME_TASKS_MAX:
            call = outbox[0]
            if call.done:
                outbox.popleft()
                continue
            if call.follows:
                outbox.popleft()
                message.follow_request_ids.append(call.request_id)
                call.sent = True
                tasks += 1
                continue
            call_bytes = call.nbytes
            place = None
            if call_bytes > LARGE_BYTES:
                if tasks and not self.sharing.offer_known:
                    break  # as the first of the next frame it waits for the offer
                place = self._place_of(call)
                if place is not None:
                    call_bytes = OVERHEAD_BYTES
            if tasks and nbytes + call_bytes > FRAME_BYTES_MAX:
                break
            outbox.popleft()
            if batch is None or not batch.add(call, place):
                if batch is not None:
                    frame.parts += batch.serialized()
                batch = TaskBatch(call.spec)
                batch.add(call, place)
            call.sent = True
            tasks += 1
            nbytes += call_bytes
        if batch is not None:
            frame.parts += batch.serialized()
        if self.sharing.report_due or (self.sharing.report_pending and (tasks or report)):
            message.payload_key = self.sharing.pop_key()
            message.results_taken = self.sharing.pop_taken()
        elif not tasks and not message.cancel_request_ids:
            return None
        return frame.serialize()

    def _frame_of_withdrawals(self) -> task_service_pb2.RunRequest:
        frame = task_service_pb2.RunRequest(outcomes_only=True, client_id=self._client_id)
        if self._cancel_outbox:
            frame.cancel_request_ids.extend(self._cancel_outbox[:_CANCELLING_MAX])
            self._withdrawals.update(frame.cancel_request_ids)
            del self._cancel_outbox[:_CANCELLING_MAX]
        return frame

    def _place_of(self, call: Call) -> Reference | None:
        """The reference to a large payload; None: its bytes are sent. A reference made for an earlier stream is valid
        once this one has offered the same directory.
        """
        if not self.sharing.shares:
            return None
        if call.place is None:
            call.place = self.sharing.put(call.payload)
        return call.place

    @property
    def waits_for_offer(self) -> bool:
        """Whether the next payload is large, and the stream has not said yet whether it shares a directory."""
        return bool(self._outbox) and self._outbox[0].nbytes > LARGE_BYTES and not self.sharing.offer_known

    def offered(self, directory: Directory | None) -> None:
        """The stream's master shares this directory, or none."""
        if self.sharing.offered(directory):
            for call in self._unsettled.values():
                call.place = None

    def receive(self, response: task_service_pb2.RunResponse, nbytes: int) -> dict[float, list[Call]]:
        """Settles the calls that a frame of `nbytes` answers. Returns those to `retry`, by the delay in seconds.

        Acceptances are ignored: calls are known by request_id, and outcomes carry the task_id.
        """
        for output in response.partials:
            call = self._unsettled.get(output.request_id)
            # A repeat has a lower index. After a gap the outcome supplies what is missing.
            if call is None:
                continue
            for each in (call, *self._joined.get(output.request_id, ())):
                if output.index == each.partials_received and (each.follows or not call.follows):
                    each.partials_received += 1
                    each.receive_partial(output.data, output.content_type)
        if response.outcomes:
            self._settle_outcomes(response, nbytes)
        return self._settle_rejections(response) if response.rejected else {}

    def _settle_outcomes(self, response: task_service_pb2.RunResponse, response_bytes: int) -> None:
        outcomes = response.outcomes
        frame_bytes = response_bytes // len(outcomes)
        take = self._unsettled.pop
        withdrawals = self._withdrawals
        joined = self._joined
        unsent: list[Call] = []
        tasks = nbytes = 0
        for message in outcomes:
            request_id = message.request_id
            if withdrawals and request_id in withdrawals and message.error.type == WITHDRAWN:
                self._withdrawal_answered(request_id)
                continue
            call = take(request_id, None)
            if call is None:
                self._cancelling.pop(request_id, None)
                if message.HasField("result_place"):
                    self.sharing.taken += 1
                continue
            tasks += 1
            nbytes += call.nbytes
            outcome = self._with_result(message) if message.HasField("result_place") else Outcome(message, frame_bytes)
            call.done = True  # it may be in the outbox, to be sent again
            call.place = None
            call.settle(outcome)
            if joined:
                for twin in joined.pop(request_id, ()):
                    if call.follows and not twin.follows:
                        unsent.append(twin)
                        continue
                    tasks += 1
                    nbytes += twin.nbytes
                    twin.done = True
                    twin.settle(outcome)
        self._window.free(tasks, nbytes)
        self.start(unsent)

    def _with_result(self, message: task_pb2.Outcome) -> Answer:
        """The outcome with the result that it refers to, or an error if that can't be read at the moment."""
        try:
            result = self.sharing.take(message.result_place)
        except (OSError, MemoryError) as error:
            if is_transient(error):
                return UnavailableError(
                    f"task {message.task_id} SUCCEEDED, but its result cannot be read now ({error!r}); "
                    "free memory or files, and run it again with the same request_id"
                )
            message.state = task_pb2.OUTCOME_STATE_RESULT_MISSING
            message.error.type = "ResultLost"
            message.error.message = f"its file in the payloads folder of the master's data_dir cannot be read: {error}"
            return Outcome(message)
        return Outcome(message, len(result), result)

    def _settle_rejections(self, response: task_service_pb2.RunResponse) -> dict[float, list[Call]]:
        retries_by_delay: dict[float, list[Call]] = {}
        for rejection in response.rejected:
            request_id = rejection.request_id
            if request_id in self._withdrawals and rejection.code in _WITHDRAWAL_CODES:
                self._withdrawal_answered(request_id)
                continue
            call = self._unsettled.get(request_id)
            if call is None:
                self._cancelling.pop(request_id, None)
                continue
            error = RejectedError.of(rejection)
            if error.retry_delay_s is not None and error.code in self._retried:
                call.deferred = True
                retries_by_delay.setdefault(error.retry_delay_s, []).append(call)
            else:
                joined = self._joined.pop(request_id, [])
                alike = [twin for twin in joined if twin.follows == call.follows]
                if alike:
                    self._joined[request_id] = alike
                self._fail(call, partial(RejectedError.of, rejection))
                self.start(twin for twin in joined if twin.follows != call.follows)
        return retries_by_delay

    def _withdrawal_answered(self, request_id: str) -> None:
        """The master has answered a withdrawal."""
        self._withdrawals[request_id] -= 1
        if not self._withdrawals[request_id]:
            del self._withdrawals[request_id]
        if request_id not in self._cancel_outbox:  # otherwise it was started, and withdrawn again
            self._cancelling.pop(request_id, None)

    def retry(self, calls: Iterable[Call]) -> None:
        """The delay is over: sends the calls again, except those withdrawn meanwhile."""
        for call in calls:
            call.deferred = False
            self._outbox.append(call)

    def stream_opened(self) -> None:
        """A new stream: all unsettled calls go to the outbox, in their first order."""
        self.sharing.stream_opened()
        self._outbox = deque(call for call in self._unsettled.values() if not call.deferred)
        self._cancel_outbox = list(self._cancelling)
        self._withdrawals.clear()

    def fail_all(self, make_error: Callable[[], MultigpuError]) -> None:
        """Settles all calls with an error: one object each, because raising an error changes it."""
        self.sharing.close()
        self._outbox.clear()
        self._cancel_outbox.clear()
        self._cancelling.clear()
        for call in list(self._unsettled.values()):
            self._fail(call, make_error)

    def _fail(self, call: Call, make_error: Callable[[], MultigpuError]) -> None:
        del self._unsettled[call.request_id]
        for each in (call, *self._joined.pop(call.request_id, ())):
            each.done = True
            self._window.free(1, each.nbytes)
            each.settle(make_error())


def _same_task(first: Call, second: Call) -> bool:
    """As the master compares tasks: by kind, model, content type, parameters and payload."""
    a, b = first.spec, second.spec
    same = a is b or (a.kind, a.model, a.content_type, a.parameters) == (b.kind, b.model, b.content_type, b.parameters)
    return same and first.payload == second.payload
