"""A simulated client: until each of its tasks has an outcome, it attaches again whenever its stream breaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multigpu_master.core import events as ev
from multigpu_master.core.model import Outcome, OutcomeState, Spec, Task

from tests.sim.world import ViolationError, World

if TYPE_CHECKING:
    from tests.sim.master import Master


@dataclass(slots=True)
class Ask:
    """What the client wants done, and what it knows of it."""

    request_id: str
    spec: Spec
    payload: bytes
    partition_key: str
    task_id: int = 0  # once it was accepted
    epoch: int = 0  # the master's life in which that was
    outcomes: list[tuple[int, int, Outcome]] = field(default_factory=list)  # (epoch, task_id, outcome)
    given_up: bool = False

    @property
    def open(self) -> bool:
        return not self.outcomes and not self.given_up


class Client:
    def __init__(self, world: World, master: Master, name: str) -> None:
        self._world = world
        self._master = master
        self.name = name
        self.asks: dict[str, Ask] = {}
        self._stream = 0

    def ask(self, asks: list[Ask]) -> None:
        """Wants more done, all of one spec."""
        for ask in asks:
            self.asks[ask.request_id] = ask
        self.submit(asks)

    def submit(self, asks: list[Ask]) -> None:
        if not self._stream or not asks:
            return
        stream = self._stream
        spec = asks[0].spec

        def arrive() -> None:
            master = self._master
            if master.core is not None and master.streams.get(stream) is self:
                tasks = [Task(a.spec, a.request_id, a.payload, a.partition_key) for a in asks]
                self._world.trace("%s submits %s", self.name, ", ".join(a.request_id for a in asks))
                master.submit(self, stream, spec, tasks)

        self._world.after(self._world.between(0.0001, 0.005), lambda: self._master.when_awake(arrive))

    def connect(self) -> None:
        """Begins a stream, and sends every task without an outcome again."""
        if self._stream:
            return
        if self._master.core is None:
            self._world.after(self._world.between(0.05, 0.5), self.connect)
            return
        self._stream = self._master.new_id()
        self._master.streams[self._stream] = self
        waiting: dict[int, list[Ask]] = {}
        for ask in self.asks.values():
            if ask.open:
                waiting.setdefault(id(ask.spec), []).append(ask)
        for asks in waiting.values():
            self.submit(asks)

    def stream_broke(self) -> None:
        """The stream is gone, with all that was on its way."""
        self._master.streams.pop(self._stream, None)
        self._stream = 0
        self._world.after(self._world.between(0.02, 0.3), self.connect)

    # --- what the master says ----------------------------------------------------------------------------------------

    def accepted(self, request_id: str, task: Task, epoch: int) -> None:
        ask = self.asks[request_id]
        if ask.task_id and ask.task_id != task.task_id and ask.spec.durable and ask.outcomes == []:
            raise ViolationError(f"{request_id} was accepted as {ask.task_id}, now it is {task.task_id}")
        ask.task_id, ask.epoch = task.task_id, epoch

    def rejected(self, request_id: str, rejection: ev.Rejection) -> None:
        ask = self.asks[request_id]
        if ask.task_id and ask.spec.durable and ask.open and rejection.code != 4:
            raise ViolationError(f"{request_id} was accepted, and then rejected: {rejection.message}")
        self._world.trace("%s is rejected: %s", request_id, rejection.message)
        if rejection.retry_delay_s is None:
            ask.given_up = True
        elif ask.open:
            self._world.after(rejection.retry_delay_s, lambda: self.submit([ask]) if ask.open else None)

    def send_outcome(self, request_id: str, task_id: int, outcome: Outcome, epoch: int) -> None:
        """An outcome sets out for the client, and gets lost if the stream breaks first."""
        stream = self._stream
        delay_s = self._world.between(0.0001, 0.005)
        self._world.after(
            delay_s, lambda: self.outcome(request_id, task_id, outcome, epoch) if self._stream == stream else None
        )

    def outcome(self, request_id: str, task_id: int, outcome: Outcome, epoch: int) -> None:
        ask = self.asks[request_id]
        for old_epoch, old_id, old in ask.outcomes:
            # Twins come from a master that died before it knew; and from ephemeral tasks that were forgotten.
            same = old_id == task_id and old.state == outcome.state and old.result == outcome.result
            if not same and old_epoch == epoch and ask.spec.durable:
                raise ViolationError(f"{request_id} ended twice: {old} as {old_id}, {outcome} as {task_id}")
        if outcome.state is OutcomeState.SUCCEEDED and not outcome.result.startswith(request_id.encode() + b" "):
            raise ViolationError(f"{request_id} got another's result: {outcome.result!r}")
        ask.outcomes.append((epoch, task_id, outcome))
