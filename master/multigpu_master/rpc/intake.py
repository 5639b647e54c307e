"""Validates the tasks of every submitting call, matches them with known request_ids, and passes them to the core."""

from collections.abc import Collection, Sequence

import structlog
from google.protobuf.message import DecodeError
from multigpu.v1 import task_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.identity import conflict
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.driver import DISK_FULL, Driver
from multigpu_master.errors import InvalidMessageError
from multigpu_master.journal.protocol import SettledTask, StoredOutcome
from multigpu_master.security.auth import current_caller
from multigpu_master.security.tokens import Token
from multigpu_master.wire.payloads import Peer
from multigpu_master.wire.specs import SpecsFullError
from multigpu_master.wire.tasks import tasks_of
from multigpu_master.write_buffer import Done

log = structlog.get_logger()

INVALID_ARGUMENT, PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNAVAILABLE = 3, 7, 8, 14  # gRPC's status codes
REQUEST_ID_IN_USE = ev.Rejection(INVALID_ARGUMENT, "another caller's task has this request_id; use another request_id")

Answer = Task | ev.Rejection | SettledTask


class Intake:
    """Submits batches of tasks. While `stopping` is True, rejects all tasks, known ones included."""

    def __init__(self, driver: Driver, payload_bytes_max: int) -> None:
        self._driver = driver
        self._payload_bytes_max = payload_bytes_max
        self.stopping = False

    def submit(
        self, batch: task_pb2.TaskBatch, request_ids: Sequence[str], stream: int,
        done: Done | None, peer: Peer | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Submits a batch of tasks with these request_ids, within the limits of the running call's caller.

        Returns for each input, in order: its task, the journal's record if the task has settled, or a rejection.
        `peer`: the sender, which may refer to shared payloads.

        Calls `done` once, after this method has returned: with None when the journal has written the new durable tasks,
        or with an error if the journal can't write them. If there are none, the event loop calls done(None) in its next
        iteration. An error does not concern known tasks that the batch has joined. `done` may be None.
        """
        driver, caller = self._driver, current_caller()
        count = len(request_ids)
        rejection = None
        try:
            spec = driver.specs.read(batch.spec, caller.name if caller is not None else "")
        except InvalidMessageError as error:
            rejection = ev.Rejection(INVALID_ARGUMENT, str(error))
        except SpecsFullError as error:
            rejection = ev.Rejection(RESOURCE_EXHAUSTED, str(error), 1.0)
        else:
            if self.stopping:
                rejection = ev.Rejection(UNAVAILABLE, "the master is stopping; try again in a moment", 1.0)
            elif spec.durable and not driver.write_buffer.writable:
                rejection = DISK_FULL
            elif caller is not None:
                rejection = _check_and_charge(caller, spec.queue, count, driver.now())
        if rejection is not None:
            driver.done_soon(done)
            return [rejection] * count
        candidates = tasks_of(spec, batch, self._payload_bytes_max, peer)
        known = driver.find_settled(request_ids)
        if caller is not None and caller.queues is not None:
            candidates = [self._check_request_id(c, known, caller) for c in candidates]
        replaces = self._pop_failed(request_ids, known) if spec.retry_failed else {}
        tasks = [c for c in candidates if isinstance(c, Task) and c.request_id not in known]
        if not tasks:
            driver.done_soon(done)
            results: Sequence[Answer] = ()
        else:
            results = driver.submit(spec, tasks, stream, done, replaces)
        if len(tasks) == count:
            return list(results)
        new_answers = iter(results)
        answers: list[Answer] = []
        for candidate in candidates:
            if not isinstance(candidate, Task):
                answers.append(candidate)
            elif (stored := known.get(candidate.request_id)) is not None:
                clash = conflict(stored.task_id, stored.kind, stored.model, stored.fingerprint, candidate, stored.state)
                answers.append(clash or stored)
            else:
                answers.append(next(new_answers))
        return answers

    def _pop_failed(self, request_ids: Sequence[str], known: dict[str, SettledTask]) -> dict[str, int]:
        """Removes the tasks that did not succeed from `known`, so that new tasks with their request_ids run. Returns
        the task_ids of the dead letters that the new tasks replace, by request_id.
        """
        failed = {r: known.pop(r) for r, s in list(known.items()) if s.state != OutcomeState.SUCCEEDED}
        replaces = {r: s.task_id for r, s in failed.items() if s.state == OutcomeState.DEAD_LETTERED}
        for r in request_ids:
            live = self._driver.core.ledger.requests.get(r)
            if live is not None and live.outcome is not None and live.outcome.state is OutcomeState.DEAD_LETTERED:
                replaces[r] = live.task_id  # the journal writes this dead letter before the new task
        return replaces

    def _check_request_id(
        self, candidate: Task | ev.Rejection, known: dict[str, SettledTask], caller: Token
    ) -> Task | ev.Rejection:
        """Returns the candidate, or a rejection if the caller may not see the task that has this request_id."""
        if isinstance(candidate, Task):
            request_id = candidate.request_id
            live, stored = self._driver.core.ledger.requests.get(request_id), known.get(request_id)
            queue = live.spec.queue if live is not None else stored.queue if stored is not None else None
            if queue is not None and not caller.may_use_queue(queue):
                return REQUEST_ID_IN_USE
        return candidate


def _check_and_charge(caller: Token, queue: str, count: int, now: float) -> ev.Rejection | None:
    """Returns a rejection if the caller may not submit these tasks now. Otherwise charges its rate for them."""
    if not caller.may_use_queue(queue):
        return ev.Rejection(PERMISSION_DENIED, f"the token is not for the queue {queue!r}; ask for a token that is")
    if (delay_s := caller.charge(count, now)) is not None:
        return ev.Rejection(
            RESOURCE_EXHAUSTED, f"the token's limit is {caller.tasks_per_s:g} tasks a second; send fewer", delay_s
        )
    return None


def fill_stored(message: task_pb2.Outcome, stored: StoredOutcome) -> None:
    """Fills an Outcome from the journal, or with an error if the journal has lost or deleted the outcome. Raises
    MemoryError if there is too little memory now.
    """
    lost = stored.lost
    if stored.body is not None:
        try:
            parse_outcome(message, stored.body)
        except DecodeError as error:
            message.Clear()
            lost = f"the outcome at cursor {stored.cursor} is damaged: {error}"
        else:
            return
    if lost:
        log.warning("an outcome was lost", task_id=stored.task_id, reason=lost)
    message.task_id, message.request_id = stored.task_id, stored.request_id
    ended = task_pb2.OutcomeState.Name(stored.state).removeprefix("OUTCOME_STATE_")
    missing = stored.state == task_pb2.OUTCOME_STATE_SUCCEEDED
    message.state = task_pb2.OUTCOME_STATE_RESULT_MISSING if missing else stored.state  # type: ignore[assignment]  # enums are ints on the wire
    if lost:
        what = f"its outcome cannot be read: {lost}. Check the master's disk, restore a backup, or run the task again"
    else:
        what = "its result_ttl is over and its outcome was deleted; set a longer result_ttl, or run the task again"
    message.error.type = "ResultLost" if lost else "ResultExpired"
    message.error.message = f"the task ended {ended}, but {what} under another request_id"


def stored_body(stored: StoredOutcome) -> bytes:
    """Returns the serialized Outcome of a task in the journal. Raises MemoryError if there is too little memory now."""
    message = task_pb2.Outcome()
    fill_stored(message, stored)
    return message.SerializeToString()


def parse_outcome(message: task_pb2.Outcome, body: bytes) -> None:
    """Raises DecodeError if the bytes are no Outcome, and MemoryError if there is too little memory now."""
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        if "alloc" in str(error):  # protobuf also raises DecodeError if it gets no memory
            raise MemoryError(str(error)) from error
        raise


def count_inputs(batches: Collection[task_pb2.TaskBatch], limit: int) -> int:
    """Returns the number of tasks in the batches (`inputs` plus columns), or of the batches if that is higher. If there
    are more than `limit` batches, returns their number at once.
    """
    if len(batches) > limit:
        return len(batches)
    return max(len(batches), sum([len(b.inputs) + max(len(b.request_ids), len(b.payloads)) for b in batches]))
