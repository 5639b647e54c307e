"""`Task`: a task as the master saw it when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multigpu._times import instant
from multigpu.outcome import OpenEnum, Outcome

if TYPE_CHECKING:
    from datetime import datetime

    from multigpu.v1 import task_pb2


class TaskState(OpenEnum):
    """Where a task can be."""

    UNSPECIFIED = 0
    QUEUED = 1
    LEASED = 2
    SETTLED = 3


class Task:
    """A task as the master saw it when asked. `message` is the protobuf behind it, with everything."""

    __slots__ = ("_listed", "message")

    def __init__(self, message: task_pb2.Task, *, listed: bool = False) -> None:
        """`listed`: it is of a list, without results."""
        self.message = message
        self._listed = listed

    def __repr__(self) -> str:
        return f"<Task {self.task_id}: {self.kind}, {self.state.name}>"

    @property
    def task_id(self) -> int:
        return self.message.task_id

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def kind(self) -> str:
        return self.message.spec.kind

    @property
    def state(self) -> TaskState:
        return TaskState(self.message.state)

    @property
    def attempts(self) -> int:
        """Attempts granted so far."""
        return self.message.attempts

    @property
    def worker_id(self) -> str:
        """Where it is leased; empty unless LEASED."""
        return self.message.worker_id

    @property
    def progress(self) -> float:
        """0 to 1; 0 if the engine doesn't say."""
        return self.message.progress.fraction

    @property
    def log(self) -> str:
        """The last lines that the handler has written with `context().log`, as of the worker's last heartbeat, or as
        of the end. Empty in a list.
        """
        return self.message.outcome.log if self.message.HasField("outcome") else self.message.log

    @property
    def submit_time(self) -> datetime | None:
        return instant(self.message.submit_time)

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None unless SETTLED."""
        return Outcome(self.message.outcome, listed=self._listed) if self.message.HasField("outcome") else None
