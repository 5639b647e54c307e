"""What a lease that ended costs its task: the rules of attempts, losses and pauses, from events and commands alone.

- A failed attempt, a run that was too long, and a run whose worker was lost are charged.
- Any other end is not charged; it counts as a loss, and the adoption of its lease takes the loss back. Leases returned
  by a sick device (of running tasks, the first two), recalled leases, leases that a worker did not start in time, and
  those taken back at a drain's deadline are no losses.
- A charged task pauses, for longer each time, or has ended; a task that was lost pauses from its second loss on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import LOSSES_MAX, NOT_BEGUN, SICK_RETURNS_MAX
from multigpu_master.core.ledger import RUN_GRACE_S
from multigpu_master.core.model import Lease, OutcomeState, Task
from multigpu_master.core.scheduler import Core
from multigpu_master.core.workers.sessions import MAKES_ROOM, RECALLED

from tests.sim.world import ViolationError, check

DRAINED = re.compile("the drain deadline of worker .* has passed")
LOST = re.compile("worker .* lost the lease|the master lacks earlier partial outputs of the attempt on .*")
Entry = tuple[Lease, bool, int]  # a lease, whether it runs, its session


@dataclass(slots=True)
class Tally:
    """Of one task."""

    attempts: int = 0
    losses: int = 0
    lost_lease_id: int = 0  # of the newest of these losses
    sick_returns: int = 0

    def take_back(self, lease_id: int) -> None:
        """The lease was adopted: its loss, if it was one, no longer counts."""
        if self.lost_lease_id == lease_id:
            self.losses -= 1
            self.lost_lease_id = 0


class Attempts:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._tallies: dict[Task, Tally] = {}
        self._leases: dict[int, Entry] = {}  # those that are live
        self._recalled: dict[int, None] = {}
        self._begun: dict[Task, None] = {}  # unsettled tasks, also gangs, that a worker has begun

    def after(self, event: ev.Event, commands: Sequence[ev.Command], now: float) -> None:
        workers = self._core.fleet.workers.values()
        # Those of gangs follow other rules: tests/core/test_gangs.py.
        live = {x.lease_id: (x, x.running, w.session) for w in workers for x in w.leases.values() if x.gang is None}
        self._begun |= {x.task: None for w in workers for x in w.leases.values() if x.running}
        granted = {x.lease_id: x for c in commands if isinstance(c, ev.Dispatch) for x in c.leases}
        ended = [entry for lease_id, entry in self._leases.items() if lease_id not in live]
        revoked: dict[tuple[int, int], str] = {}
        for revoke in (c for c in commands if isinstance(c, ev.Revoke)):
            for lease_id in revoke.lease_ids:
                revoked.setdefault((revoke.session, lease_id), revoke.reason)  # the first says why
        for lease, running, session in ended:
            # What was taken back first (a drain's deadline passed while the master slept) ends by nothing else.
            why = revoked.get((session, lease.lease_id))
            charge = self._charge(event if why is None else None, lease, running, session, now)
            drained = why is not None and DRAINED.fullmatch(why) is not None
            lost = why is not None and LOST.fullmatch(why) is not None
            if (drained or lost) and charge is False and lease.task.outcome is not None:
                self._tallies[lease.task].attempts -= self._tallies[lease.task].attempts == lease.attempt
            charge = charge or (why is not None and why.startswith("payloads and partial outputs exceed"))
            spared = isinstance(event, ev.Reports) and why is None and not lease.worker.health.fit
            if spared and running and self._fell_sick(event, lease):
                tally = self._tallies[lease.task]
                tally.sick_returns += 1
                if tally.sick_returns > SICK_RETURNS_MAX:
                    charge, spared = True, False
            if why == NOT_BEGUN:
                self._not_begun(lease, running, now)
            if why == NOT_BEGUN or drained:
                charge, spared = False, True
            self._ended(lease, charge, now, spared=spared or (why is None and self._returned(event, lease)))
        if isinstance(event, ev.Hello):
            self._came_and_went(event, commands, live)
        for lease_id, (lease, _, _) in live.items():
            if lease_id not in self._leases:
                self._began(lease, adopted=lease_id not in granted)
        for command in commands:  # also of leases that the same event adopted
            if isinstance(command, ev.Recall):
                self._recalled.update(dict.fromkeys(command.lease_ids))
        self._leases = live
        for command in commands:
            if isinstance(command, ev.Settled):
                for task in command.tasks:
                    self._settled(task, now)

    @staticmethod
    def _not_begun(lease: Lease, running: bool, now: float) -> None:
        timeout_s = lease.task.spec.run_timeout_s
        if running or timeout_s is None or now < lease.dispatch_s + timeout_s + RUN_GRACE_S:
            raise ViolationError(f"lease {lease.lease_id} was taken back as not begun: {running=}, {now=}")

    def _returned(self, event: ev.Event, lease: Lease) -> bool:
        """Whether the worker returns it because it was recalled."""
        if not isinstance(event, ev.Reports) or lease.lease_id not in self._recalled:
            return False
        return any(f.lease_id == lease.lease_id and f.error.type == "Recalled" for f in event.failures)

    @staticmethod
    def _fell_sick(event: ev.Event, lease: Lease) -> bool:
        """Whether a worker with a sick device returns it, for no other reason."""
        if not isinstance(event, ev.Reports):
            return False
        others = (MAKES_ROOM, RECALLED) if lease.recalled_in else (MAKES_ROOM,)
        return any(f.lease_id == lease.lease_id and f.returned and f.error.type not in others for f in event.failures)

    def _charge(
        self, event: ev.Event | None, lease: Lease, running: bool, session: int, now: float
    ) -> ev.Failure | bool:
        """How the lease ended: by this failure; True: charged for another reason; False: not charged."""
        if event is not None and session not in self._core.fleet.sessions:
            return running
        if isinstance(event, ev.Reports) and event.session == session:
            for failure in event.failures:
                if failure.lease_id == lease.lease_id:
                    return False if failure.returned else failure
        timeout_s = lease.task.spec.run_timeout_s
        return running and timeout_s is not None and now >= lease.running_since_s + timeout_s + RUN_GRACE_S

    def _ended(self, lease: Lease, charge: ev.Failure | bool, now: float, *, spared: bool) -> None:
        task = lease.task
        tally = self._tallies[task]
        state = task.outcome.state if task.outcome is not None else None
        if state in {OutcomeState.SUCCEEDED, OutcomeState.CANCELLED, OutcomeState.EXPIRED} or not task.task_id:
            if charge is False:  # given back and over by the same event: the master was away for long
                tally.attempts -= tally.attempts == lease.attempt
            return
        base_s = 0.0
        if charge is False:
            if not spared:
                tally.losses += 1
                tally.lost_lease_id = lease.lease_id
            tally.attempts -= tally.attempts == lease.attempt
            over = OutcomeState.DEAD_LETTERED if tally.losses > LOSSES_MAX else None
            if tally.losses > 1 and not spared:
                base_s = _pause_s(task, tally.losses - 1)
        else:
            hopeless = isinstance(charge, ev.Failure) and not charge.error.retryable
            over = OutcomeState.DEAD_LETTERED if tally.attempts >= task.spec.attempts_max else None
            over = OutcomeState.FAILED if hopeless else over
            base_s = _pause_s(task, tally.attempts)
        check(state is over, "task %s should have ended as %s, not as %s: %s", task.task_id, over, state, tally)
        if over is not None or task.lease is not None:
            return  # ended; or leased again by the same event, an older lease of it perhaps
        if base_s:
            until_s = task.extra.not_before_s if task.extra is not None else 0.0
            if not now + 0.5 * base_s <= until_s <= now + base_s:
                raise ViolationError(f"task {task.task_id} pauses for {until_s - now} s, not for up to {base_s} s")
        elif not task.waiting:
            raise ViolationError(f"task {task.task_id} pauses for a single loss")
        check(task.attempts == tally.attempts, "task %s counts %s attempts: %s", task.task_id, task.attempts, tally)

    def _began(self, lease: Lease, *, adopted: bool) -> None:
        task = lease.task
        tally = self._tallies.setdefault(task, Tally())
        if adopted:
            self._recalled.pop(lease.lease_id, None)  # the master has asked an earlier session
            tally.attempts = max(tally.attempts, lease.attempt)
            tally.take_back(lease.lease_id)
        else:
            tally.attempts += 1
            check(lease.attempt == tally.attempts, "lease %s is attempt %s: %s", lease.lease_id, lease.attempt, tally)
        check(task.attempts == tally.attempts, "task %s counts %s attempts: %s", task.task_id, task.attempts, tally)

    def _came_and_went(self, event: ev.Hello, commands: Sequence[ev.Command], live: dict[int, Entry]) -> None:
        """Leases that a hello brought back and that were taken from the worker again: its drain is over."""
        (adopted,) = [c.adopted for c in commands if isinstance(c, ev.Welcome)]
        for held in event.leases:
            task = self._core.ledger.tasks.get(held.task_id)
            if task is None or (task.outcome is not None and task.outcome.state is not OutcomeState.EXPIRED):
                continue
            if held.lease_id in adopted and held.lease_id not in live:
                tally = self._tallies.setdefault(task, Tally())
                tally.attempts = max(tally.attempts, held.attempt) - (tally.attempts <= held.attempt)
                tally.take_back(held.lease_id)

    def _settled(self, task: Task, now: float) -> None:
        """An end by the clock had its reason; what is settled is no longer followed."""
        outcome, spec = task.outcome, task.spec
        tally = self._tallies.pop(task, None) or Tally()
        begun = task in self._begun
        self._begun.pop(task, None)
        assert outcome is not None, "it is settled"
        if outcome.state is not OutcomeState.EXPIRED:
            return
        assert outcome.error is not None, "an expired task says why"
        if outcome.error.type == "QueueTimeout":
            assert spec.queue_timeout_s is not None, "it has one"
            grace_s = self._core.ledger.limits.session_timeout_s if outcome.dispatch_s else 0.0
            if tally.attempts or begun or now < task.submit_s + spec.queue_timeout_s + grace_s:
                raise ViolationError(f"task {task.task_id} expired in the queue: {tally}, {begun=}")
            check(not self._core.hold.active(now), "task %s expired while its worker is awaited", task.task_id)
        elif spec.deadline_s is None or now < spec.deadline_s:
            raise ViolationError(f"task {task.task_id} expired before its deadline")


def _pause_s(task: Task, tries: int) -> float:
    """The longest pause after so many tries."""
    pause_s = task.spec.backoff_initial_s
    for _ in range(tries - 1):
        pause_s = min(pause_s * 2, task.spec.backoff_max_s)
    return min(pause_s, task.spec.backoff_max_s)
