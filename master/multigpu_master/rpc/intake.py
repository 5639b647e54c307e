"""How tasks come in, whichever door they come by: validated, matched with what is known, handed to the core."""

from collections.abc import Callable, Sequence

import structlog
from google.protobuf.message import DecodeError
from multigpu.v1 import task_pb2

from multigpu_master import wire
from multigpu_master.core import events as ev
from multigpu_master.core.model import Task
from multigpu_master.driver import Driver
from multigpu_master.journal import JournalError, StoredOutcome
from multigpu_master.wire_large import Peer

log = structlog.get_logger()

INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8
DISK_FULL = ev.Rejection(
    RESOURCE_EXHAUSTED,
    "the master's disk is full (or journal_bytes_max is reached): durable tasks can't be taken until there is room; "
    "free space in its data_dir, or submit with durability EPHEMERAL",
    1.0,
)

Answer = Task | ev.Rejection | StoredOutcome


class Intake:
    """See the module."""

    def __init__(self, driver: Driver, payload_bytes_max: int) -> None:
        self._driver = driver
        self._payload_bytes_max = payload_bytes_max
        self.stopping = False

    def take(
        self, batch: task_pb2.TaskBatch, request_ids: Sequence[str], stream: int,
        done: Callable[[JournalError | None], None], peer: Peer | None = None, *, patient: bool = False,
    ) -> list[Answer]:  # fmt: skip
        """Submits a batch of tasks called so, whose payloads `peer` may have referred to. For each input, in order: the
        task that stands for it, the outcome it already had, or why it was not taken. `done` is called, later, once the
        tasks are durable; it is called in any case. `patient`: nobody is told of tasks before they settle.
        """
        driver = self._driver
        count = len(request_ids)
        refusal = None
        try:
            spec = driver.specs.read(batch.spec)
        except wire.InvalidTaskError as error:
            refusal = ev.Rejection(INVALID_ARGUMENT, str(error))
        else:
            if self.stopping:
                refusal = ev.Rejection(14, "the master is stopping; try again in a moment", 1.0)
            elif spec.durable and not driver.journaling.writable:
                refusal = DISK_FULL
        if refusal is not None:
            driver.soon(done)
            return [refusal] * count
        candidates = wire.tasks_of(spec, batch, self._payload_bytes_max, peer)
        known = driver.known(request_ids) if spec.durable else {}
        tasks = [c for c in candidates if isinstance(c, Task) and c.request_id not in known]
        if not tasks:
            driver.soon(done)
            results: Sequence[Answer] = ()
        else:
            results = driver.submit(spec, tasks, stream, done, patient=patient)
        if len(tasks) == count:
            return list(results)
        rest = iter(results)
        answers: list[Answer] = []
        for candidate in candidates:
            if not isinstance(candidate, Task):
                answers.append(candidate)
            elif (stored := known.get(candidate.request_id)) is not None:
                answers.append(stored)
            else:
                answers.append(next(rest))
        return answers


def fill_stored(message: task_pb2.Outcome, stored: StoredOutcome) -> None:
    """Fills an Outcome from the journal."""
    lost = "ResultExpired", "the task ended, but its result_ttl is over and the result is gone"
    if stored.body is not None:
        try:
            message.ParseFromString(stored.body)
        except DecodeError as error:
            what = f"the outcome at cursor {stored.cursor} is damaged: {error}"
            log.warning("the journal is damaged", task_id=stored.task_id, what=what)
            message.Clear()
            lost = "ResultDamaged", "the task ended, but its result is damaged in the master's journal; check its disk"
        else:
            return
    message.task_id = stored.task_id
    message.request_id = stored.request_id
    message.state = stored.state  # type: ignore[assignment]  # enums are ints on the wire
    message.error.type, message.error.message = lost
