"""A simulated client: until each of its tasks has an outcome, it submits them again whenever its stream breaks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from multigpu_master.core import events as ev
from multigpu_master.core.identity import REQUEST_ID_FREE, conflict
from multigpu_master.core.model import Outcome, OutcomeState, Task
from multigpu_master.core.spec import Spec

from tests.sim.world import Inbox, Link, ViolationError, World

if TYPE_CHECKING:
    from tests.sim.actors.master import Master


@dataclass(slots=True)
class Request:
    """A task of the client, and what the client knows about it."""

    request_id: str
    spec: Spec
    payload: bytes
    partition_key: str
    task_id: int = 0  # once it was accepted
    epoch: int = 0  # the master's life in which that was
    outcomes: list[tuple[int, int, Outcome]] = field(default_factory=list)  # (epoch, task_id, outcome)
    given_up: bool = False
    again: bool = False  # the client died, and the next one submits the same task
    repaired: bool = False  # it has failed, and the next client submits another payload

    @property
    def open(self) -> bool:
        return (self.again or not self.outcomes) and not self.given_up


def repaired(spec: Spec) -> Spec:
    """That of a client which runs again what has failed."""
    return replace(spec, retry_failed=True, wire=spec.wire + b" again") if not spec.retry_failed else spec


def reuse_request_id(master: Master, request: Request) -> None:
    """Sometimes submits another task with a request_id that the master knows: it must be rejected."""
    core = master.core
    assert core is not None, "it has just handled a submit"
    live, stored = core.ledger.requests.get(request.request_id), master.journal.by_request.get(request.request_id)
    dice = zlib.crc32(f"{request.request_id} {core.ids.next_id}".encode())  # the world's own dice are left as they are
    if request.spec.retry_failed:
        return  # what has failed may be another task
    if dice % 8 or (live is None and (stored is None or not request.spec.durable)):
        return
    spec, payload = request.spec, request.payload
    match dice // 8 % 3:
        case 0:
            payload += b" another"
        case 1:
            spec = replace(spec, kind=f"not {spec.kind}")
        case _:
            spec = replace(spec, identity=spec.identity + 1)
    task = Task(spec, request.request_id, payload, request.partition_key)
    if live is not None:
        submitted = [c for c in master.handle(ev.Submit(spec, [task])) if isinstance(c, ev.Submitted)]
        answer = submitted[0].results[0]
    else:
        assert stored is not None, "one of the two"
        answer = conflict(stored.task_id, stored.kind, stored.model, stored.fingerprint, task, stored.state) or task
    if not isinstance(answer, ev.Rejection):
        raise ViolationError(f"{request.request_id} was used for another task, and task {answer.task_id} was given")
    master.world.coverage[f"another task with a known request_id: {'live' if live else 'stored'}"] += 1


class Client:
    """One program, over all its processes. Until `paused_until` it is stopped (SIGSTOP) and reads nothing."""

    def __init__(self, world: World, master: Master, name: str) -> None:
        self._world = world
        self._master = master
        self.name = name
        self.requests: dict[str, Request] = {}
        self.paused_until = 0.0
        self.outcomes_only = world.chance(0.5)  # it does not ask for acceptances
        self._repaired: dict[int, Spec] = {}  # by the id of the spec
        self._stream = 0
        self._down: Link
        self._inbox = Inbox(world, lambda: self.paused_until)

    def request(self, requests: list[Request]) -> None:
        """Adds tasks, all of one spec."""
        for request in requests:
            self.requests[request.request_id] = request
        self.submit(requests)

    def submit(self, requests: list[Request]) -> None:
        if not self._stream or not requests:
            return
        stream = self._stream
        spec = requests[0].spec

        def arrive() -> None:
            master = self._master
            if master.core is not None and master.streams.get(stream) is self:
                tasks = [Task(a.spec, a.request_id, a.payload, a.partition_key) for a in requests]
                if self._world.tracing:
                    self._world.trace("%s submits %s", self.name, ", ".join(a.request_id for a in requests))
                master.submit(self, stream, spec, tasks)
                for request in requests:
                    reuse_request_id(master, request)

        self._world.after(self._world.between(0.0001, 0.005), lambda: self._master.when_awake(arrive))

    def connect(self) -> None:
        """Opens a stream, and submits every task without an outcome again."""
        if self._stream:
            return
        if self._master.core is None or self._world.now < self.paused_until:
            self._world.after(self._world.between(0.05, 0.5), self.connect)
            return
        self._stream = self._master.new_id()
        self._master.stream_opened(self._stream, self)
        self._down = Link(self._world, 0.0025, self._inbox.put)
        waiting: dict[int, list[Request]] = {}
        for request in self.requests.values():
            if request.open:
                waiting.setdefault(id(request.spec), []).append(request)
        for requests in waiting.values():
            self.submit(requests)

    def stream_broke(self) -> None:
        """The stream broke; messages on their way are lost."""
        if self._stream:
            self._master.stream_closed(self._stream)
            self._stream = 0
            self._down.end(lost=True)
            self._inbox.clear()
            self._world.after(self._world.between(0.02, 0.3), self.connect)

    def crash(self) -> None:
        """kill -9; the program starts again, and submits everything again with the same request_ids."""
        self._world.trace("%s is killed", self.name)
        self.paused_until = 0.0
        for request in self.requests.values():
            if request.spec.durable and not request.given_up:
                request.again = True
                failed = request.outcomes and request.outcomes[-1][2].state is not OutcomeState.SUCCEEDED
                if failed and zlib.crc32(f"repair {request.request_id} {len(request.outcomes)}".encode()) % 2:
                    self._repair(request)
        self.stream_broke()

    def _repair(self, request: Request) -> None:
        """The next program runs what has failed again, with another payload: it is another task for it."""
        self._world.coverage["client: a failed task with another payload"] += 1
        request_id, *_ = request.payload.decode().split()
        spec = self._repaired.setdefault(id(request.spec), repaired(request.spec))
        request.spec, request.payload = spec, f"{request_id} run 0.01 again".encode()
        request.task_id = request.epoch = 0
        request.outcomes, request.repaired = [], True

    # --- messages of the master ---------------------------------------------------------------------------------------

    def send_accepted(self, stream: int, request_id: str, task_id: int, epoch: int) -> None:
        if self._stream == stream:
            self._down.send(lambda: self._accepted(request_id, task_id, epoch))

    def send_rejected(self, stream: int, request_id: str, rejection: ev.Rejection) -> None:
        if self._stream == stream:
            self._down.send(lambda: self._rejected(request_id, rejection))

    def send_outcome(self, stream: int, request_id: str, task_id: int, outcome: Outcome, epoch: int) -> None:
        if self._stream == stream:
            self._down.send(lambda: self._outcome(request_id, task_id, outcome, epoch))

    def promised(self, request: Request) -> bool:
        """Whether its acceptance is in the present journal."""
        return bool(request.task_id) and request.spec.durable and request.epoch > self._master.restored

    def _freed(self, request: Request) -> bool:
        """Whether it may be another task now: its dead letter is gone, or it is repaired, and so runs again whenever it
        has failed, although the client may not have learned of that.
        """
        return request.repaired or self._master.journal.deleted[request.task_id] > 0

    def _accepted(self, request_id: str, task_id: int, epoch: int) -> None:
        request = self.requests[request_id]
        known = self.promised(request) and not self._freed(request)
        if known and request.task_id != task_id and not request.outcomes:
            raise ViolationError(f"{request_id} was accepted as {request.task_id}, now it is {task_id}")
        request.task_id, request.epoch = task_id, epoch

    def _rejected(self, request_id: str, rejection: ev.Rejection) -> None:
        request = self.requests[request_id]
        self._world.coverage[f"rejection: code {rejection.code}"] += 1
        # While the disk is full even known tasks are rejected, for a while.
        known = self.promised(request) and not self._freed(request)
        if known and request.open and rejection.retry_delay_s is None:
            raise ViolationError(f"{request_id} was accepted, and then rejected: {rejection.message}")
        self._world.trace("%s is rejected: %s", request_id, rejection.message)
        if rejection.retry_delay_s is None:
            request.given_up = True
        elif request.open:
            self._world.after(rejection.retry_delay_s, lambda: self.submit([request]) if request.open else None)

    def _outcome(self, request_id: str, task_id: int, outcome: Outcome, epoch: int) -> None:
        request, journal = self.requests[request_id], self._master.journal
        self._world.coverage[f"outcome: {OutcomeState(outcome.state).name}"] += 1
        self._world.trace("%s has its outcome", request_id)
        if request.spec.durable and not journal.rejected_ever:
            stored = journal.by_request.get(request_id)
            again = journal.deleted[task_id] > 0  # it may have had another outcome since, or before
            if stored is not None and request.repaired:  # it may be of the failed task, until the new one is written
                again = again or stored.state != OutcomeState.SUCCEEDED
            if (
                stored is not None
                and stored.fingerprint != REQUEST_ID_FREE
                and not again
                and ((stored.task_id, stored.state) != (task_id, outcome.state))
            ):
                raise ViolationError(
                    f"{request_id} ended as {stored.task_id}; the client received {outcome} of {task_id}"
                )
            withdrawn = OutcomeState.CANCELLED
            if outcome.state is withdrawn and stored is None and epoch == self._master.epoch:
                raise ViolationError(f"{request_id} was reported as cancelled before that was on the disk")
            for old_epoch, old_id, old in request.outcomes:
                if request.repaired and old.state is not OutcomeState.SUCCEEDED:
                    continue  # it runs again whenever it has failed
                kept = old_epoch > self._master.restored  # else that it was cancelled may be lost
                if kept and old.state is withdrawn and outcome.state is not withdrawn:
                    raise ViolationError(f"{request_id} was cancelled, and ended {outcome}")
                # Twins come from a master that died before it knew, and from a disk that had no room for the first.
                same = old_id == task_id and old.state == outcome.state and old.result == outcome.result
                if not same and not again and not journal.deleted[old_id] and old_epoch == epoch:
                    raise ViolationError(f"{request_id} ended twice: {old} as {old_id}, {outcome} as {task_id}")
        if outcome.state is OutcomeState.SUCCEEDED and request.repaired and not outcome.result.endswith(b" again"):
            raise ViolationError(f"{request_id} has the result of the payload that failed: {outcome.result!r}")
        if outcome.state is OutcomeState.SUCCEEDED and not outcome.result.startswith(request_id.encode() + b" "):
            raise ViolationError(f"{request_id} has the result of another task: {outcome.result!r}")
        if request.again and request.outcomes:
            self._world.coverage["outcome: sent again to a new client"] += 1
        request.again = False
        request.outcomes.append((epoch, task_id, outcome))
