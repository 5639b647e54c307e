"""Collects the commands that the core returns for an event."""

from collections.abc import Iterable, Sequence

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task, Worker


class Commands:
    """The commands of the current event, in the order in which they are executed. If the event settled tasks, one
    Settled with all of them comes last; only RenewIds may follow it. Call `pop_all` at the end of the event.
    """

    def __init__(self) -> None:
        self._commands: list[ev.Command] = []
        self._settled: list[Task] = []

    def add(self, command: ev.Command) -> None:
        self._commands.append(command)

    def worker_changed(self, worker: Worker, *, save: bool = False, gone: bool = False) -> None:
        self._commands.append(ev.WorkerChanged(worker, save, gone))

    def desire(self, worker: Worker) -> None:
        """Sends the worker, if it is connected, its complete desired state."""
        if worker.session:
            self._commands.append(ev.Desire(worker.session, worker.draining, worker.drain_deadline_s))

    def revoke(self, session: int, lease_ids: list[int], reason: str) -> None:
        if lease_ids:
            self._commands.append(ev.Revoke(session, lease_ids, reason))

    def recall(self, worker: Worker, leases: Sequence[Lease]) -> None:
        """Asks the worker to return those of these leases that it has not begun."""
        for lease in leases:
            lease.recalled = worker.session
        if leases:
            self._commands.append(ev.Recall(worker.session, [lease.lease_id for lease in leases]))

    def settled(self, tasks: Iterable[Task]) -> None:
        self._settled += tasks

    def pop_all(self) -> list[ev.Command]:
        commands, self._commands = self._commands, []
        if self._settled:
            commands.append(ev.Settled(self._settled))
            self._settled = []
        return commands
