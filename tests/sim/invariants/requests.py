"""Which tasks may have the request_id of another one."""

from collections.abc import Container
from typing import Protocol

from multigpu_master.core.identity import REQUEST_ID_FREE
from multigpu_master.core.model import OutcomeState, Task

from tests.sim.journal import Rows
from tests.sim.world import check


class Disk(Protocol):
    """The master's clock, and its journal."""

    @property
    def now(self) -> float: ...

    @property
    def journal(self) -> Rows: ...


class Requests:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.answered: dict[str, int] = {}  # request_ids of which the journal has the outcome, and their tasks

    def forget(self, known: Container[str]) -> None:
        """Of the requests answered so far the journal knows only these."""
        self.answered = {request: task for request, task in self.answered.items() if request in known}

    def taken(self, task: Task) -> None:
        """A request_id stands for one task, until that is a dead letter that is gone, or has failed and the client asks
        for another run.
        """
        old = self.answered.get(task.request_id)
        if old in (None, task.task_id):
            return
        stored = self._disk.journal.by_request[task.request_id]
        failed = stored.state != OutcomeState.SUCCEEDED
        free = stored.fingerprint == REQUEST_ID_FREE or (failed and task.spec.retry_failed)
        check(free, "request %s was task %s, and is taken again", task.request_id, old)
