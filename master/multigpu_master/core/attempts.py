"""Decides what follows a lease that ends without success: another attempt, or the task's end.

- An attempt that failed, or ran when its worker was lost, is charged to the task. The next attempt begins after a
  pause, on another device if one is free then; after attempts_max charged attempts, and one more for each blamed device
  (quarantine.py), the task becomes a dead letter. An error that is not retryable ends the task as FAILED at once.
- A *loss* is a lease that ends uncharged: its worker was lost while the lease waited in the window, or lost the lease,
  or returned it (unless the device is sick). But a task may kill its workers before they can report that it runs. So
  after the second such loss and each later one, the task pauses, longer each time: this separates it from other tasks
  that were lost with it. After more than LOSSES_MAX losses the task becomes a dead letter.
- If a gang (gangs.py) loses a worker, the loss counts in the same way and is not charged, even if the gang ran.
- An attempt that the master interrupts, for example at a drain deadline, is not charged, however often that happens.
"""

from collections.abc import Callable

from multigpu_master.core.events import Commands
from multigpu_master.core.ledger import RUN_GRACE_S, Ledger
from multigpu_master.core.model import (
    ATTEMPTS_KEPT,
    Attempt,
    Lease,
    Outcome,
    OutcomeState,
    Task,
    TaskError,
    Worker,
)
from multigpu_master.core.restart import RecoveryHold
from multigpu_master.core.timers import TimeLimit, Timers

# A task becomes a dead letter after more than this many uncharged losses of its leases (Extra.losses).
LOSSES_MAX = 16
# Limit of uncharged attempts of a task that end because the device fell sick; each further one is charged.
SICK_RETURNS_MAX = 2
# Limit of the characters of the reason that Task.extra keeps for each attempt.
REASON_CHARS_MAX = 200
# The reason for revoking a lease that its worker did not begin within the run_timeout.
NOT_BEGUN = "it was not begun in time"
# The reason for interrupting a gang that begins again with more workers.
TO_GROW = "it begins again with more workers, which are idle"


class Attempts:
    """See the module. `random` returns 0.0 <= x < 1.0."""

    def __init__(
        self, ledger: Ledger, timers: Timers, commands: Commands, hold: RecoveryHold, random: Callable[[], float]
    ) -> None:
        self._ledger = ledger
        self._timers = timers
        self._commands = commands
        self._hold = hold
        self._random = random

    # --- released leases ---------------------------------------------------------------------------------------------

    def failed(
        self, lease: Lease, error: TaskError, start_s: float, finish_s: float, now: float, *, condemned: bool = False
    ) -> None:
        """Ends a failed attempt, which stays charged: it was counted when its lease was granted. Requeues the task
        after a pause if the error is retryable, an attempt is left, and the task is not `condemned` (quarantine.py).
        Otherwise settles it: as a dead letter if the error is retryable, as FAILED if not.
        """
        task, worker = lease.task, lease.worker
        extra = task.ensure_extra()
        self._ledger.keep_error(task, error)
        extra.avoid_device_or_worker = worker.device_key
        if error.retryable and task.attempts < task.spec.attempts_max + len(extra.blamed_devices) and not condemned:
            self._record(lease, start_s, finish_s, f"{error.type}: {error.message}")
            self._requeue(task, now, self._backoff_s(task, task.attempts))
            return
        dispatch_s, start_s, finish_s = lease.stages(start_s, finish_s)
        outcome = Outcome(
            OutcomeState.DEAD_LETTERED if error.retryable else OutcomeState.FAILED, finish_s, error=error,
            dispatch_s=dispatch_s, start_s=start_s, worker_id=worker.worker_id, device_id=worker.info.device_id,
        )  # fmt: skip
        self._ledger.settle(task, outcome, now)

    def lost(self, lease: Lease, message: str, now: float, *, sick: bool = False) -> None:
        """Requeues the task without charge, and counts the loss. After more than LOSSES_MAX losses the task becomes a
        dead letter. `sick`: the worker has returned the lease because its device is sick, which does not count as a
        loss. But if devices fell sick more than SICK_RETURNS_MAX times while they ran the task, the attempt is charged.
        """
        task, worker = lease.task, lease.worker
        self._ledger.counters.requeued += 1
        if sick and lease.running:
            extra = task.ensure_extra()
            extra.sick_returns += 1
            if extra.sick_returns > SICK_RETURNS_MAX:
                what = f"devices fell sick {extra.sick_returns} times while they ran this task"
                self.failed(lease, TaskError("DeviceFellSick", what), lease.running_since_s, now, now)
                return
        if lease.running:
            self._record(lease, lease.running_since_s, now, message)
        self._uncharge(lease)
        if sick:
            self._requeue(task, now, 0.0)
            return
        extra = task.ensure_extra()
        extra.losses += 1
        extra.lost_lease_id = lease.lease_id
        if extra.losses <= LOSSES_MAX:
            self._requeue(task, now, 0.0 if extra.losses == 1 else self._backoff_s(task, extra.losses - 1))
            return
        error = TaskError("WorkerLost", f"{message}; {extra.losses} leases of this task ended like this")
        outcome = Outcome(
            OutcomeState.DEAD_LETTERED, now, error=error,
            dispatch_s=lease.dispatch_s, worker_id=worker.worker_id, device_id=worker.info.device_id,
        )  # fmt: skip
        self._ledger.settle(task, outcome, now)

    def worker_lost(self, lease: Lease, now: float) -> None:
        worker_id = lease.worker.worker_id
        if lease.running and lease.gang is None:
            self._ledger.counters.requeued += 1
            error = TaskError("WorkerLost", f"worker {worker_id} was lost while it ran the task")
            self.failed(lease, error, lease.running_since_s, now, now)
        else:
            self.lost(lease, f"worker {worker_id} was lost", now)

    def requeue_uncharged(self, lease: Lease, now: float, after_s: float) -> None:
        """Requeues the task without charge, however often; ends it if it is overdue. Call if the worker had no room for
        the model, returned a recalled lease, or did not begin in time, if the master could not read the payload, or if
        the attempt was interrupted.
        """
        self._uncharge(lease)
        if lease.recalled_in:
            lease.task.ensure_extra().avoid_device_or_worker = lease.worker.worker_id
        self._requeue(lease.task, now, after_s)
        self.end_if_overdue(lease.task, now)

    @staticmethod
    def _record(lease: Lease, start_s: float, end_s: float, reason: str) -> None:
        """Keeps the attempt, for display only."""
        dispatch_s, start_s, end_s = lease.stages(start_s, end_s)
        reason = reason[:REASON_CHARS_MAX]
        attempt = Attempt(lease.worker.worker_id, dispatch_s, start_s, end_s, reason, lease.lease_id)
        extra = lease.task.ensure_extra()
        extra.ended_attempts = (*extra.ended_attempts[1 - ATTEMPTS_KEPT :], attempt)

    def _uncharge(self, lease: Lease) -> None:
        """Takes the charge of the lease's attempt back, unless the task has had a later attempt."""
        task, gang = lease.task, lease.gang
        if lease.running or (gang is not None and (gang.succeeded or any(x.running for x in gang.leases))):
            task.ensure_extra().queue_timeout_over = True
        if task.attempts == lease.attempt:
            task.attempts -= 1

    # --- live leases -------------------------------------------------------------------------------------------------

    def revoke_charged(self, lease: Lease, error: TaskError, now: float) -> None:
        """Revokes a lease; its attempt counts as failed with this error."""
        self._revoke(lease, error.message)
        self._ledger.counters.requeued += 1
        self.failed(lease, error, lease.running_since_s, now, now)

    def revoke_uncharged(self, lease: Lease, why: str, now: float) -> None:
        """Revokes a lease; this counts as a loss (see `lost`)."""
        self._revoke(lease, why)
        self.lost(lease, why, now)

    def interrupt(self, lease: Lease, why: str, now: float) -> None:
        """Revokes a lease, and requeues its task without charge."""
        self._ledger.counters.requeued += 1
        self._revoke(lease, why)
        if lease.running:
            self._record(lease, lease.running_since_s, now, why)
        self.requeue_uncharged(lease, now, 0.0)

    def interrupt_all(self, worker: Worker, now: float) -> None:
        """Interrupts the attempts of all leases of a worker whose drain deadline has passed."""
        for lease in sorted(worker.leases.values(), key=lambda x: -x.task.task_id):
            if lease.lease_id in worker.leases:  # else the end of another rank has released it
                self.interrupt(lease, f"the drain deadline of worker {worker.worker_id} has passed", now)

    def _revoke(self, lease: Lease, why: str) -> None:
        self._ledger.release(lease)
        self._commands.revoke(lease.worker.session, [lease.lease_id], why)

    # --- tasks that end without a report -----------------------------------------------------------------------------

    def settle_without_report(self, task: Task, state: OutcomeState, error: TaskError, now: float) -> None:
        """Settles a task, whether it waits, pauses or is leased."""
        outcome = Outcome(state, now, error=error)
        lease = task.lease
        if lease is not None:
            outcome.dispatch_s, outcome.start_s, _ = lease.stages(lease.running_since_s, now)
            outcome.worker_id, outcome.device_id = lease.worker.worker_id, lease.worker.info.device_id
        self.take_out(task, error.message)
        self._ledger.settle(task, outcome, now)

    def take_out(self, task: Task, why: str) -> None:
        """Revokes the lease of a leased task. Removes a waiting task from its resource class."""
        if task.lease is not None:
            self._revoke(task.lease, why)
        elif task.waiting:
            self._ledger.classes.remove_ended(self._ledger.class_of(task), task)

    def apply_limit(self, task: Task, limit: TimeLimit, when_s: float, now: float) -> None:
        """Applies a time limit that an unsettled task has passed. `when_s`: the time of the expiry."""
        late_s = self._ledger.limits.timer_late_s
        if limit is TimeLimit.RUN_TIMEOUT:
            self._run_timeout(task, when_s, now)
        elif task.lease is not None and now > when_s + late_s:
            # The master was suspended, and may not have read yet that the attempt began or ended in time.
            self._ledger.expiries.at(now + late_s, task, limit)
        elif limit is TimeLimit.DEADLINE:
            error = TaskError("DeadlineExceeded", "the deadline passed before the task ended", retryable=False)
            self.settle_without_report(task, OutcomeState.EXPIRED, error, now)
        elif self._hold.active(now):
            # A worker that has not reconnected yet may have begun the task in time.
            self._ledger.expiries.at(self._hold.until_s, task, limit)
        else:
            self._queue_timeout(task, now)

    def end_if_overdue(self, task: Task, now: float) -> bool:
        """Ends a waiting task whose deadline or queue_timeout has passed. Returns whether the task has ended."""
        spec = task.spec
        if spec.deadline_s is not None and spec.deadline_s <= now:
            self.apply_limit(task, TimeLimit.DEADLINE, spec.deadline_s, now)
        elif spec.queue_timeout_s is not None and task.submit_s + spec.queue_timeout_s <= now:
            self.apply_limit(task, TimeLimit.QUEUE_TIMEOUT, task.submit_s + spec.queue_timeout_s, now)
        return task.outcome is not None

    def _queue_timeout(self, task: Task, now: float) -> None:
        """Ends a task of which no attempt has begun within the queue_timeout. If the task is leased, first recalls
        the lease: the worker has session_timeout_s to return it, or to report that the task has begun.
        """
        lease, timeout_s = task.lease, task.spec.queue_timeout_s
        # There is no limit, or an attempt has begun: an earlier, charged one, or the current one.
        if timeout_s is None or task.attempts > (lease is not None) or (lease is not None and lease.running):
            return
        if task.extra is not None and task.extra.queue_timeout_over:
            return
        if now < task.submit_s + timeout_s:
            return  # an old expiry: the task became a dead letter, and was requeued with its task_id and a new submit_s
        due_s = task.submit_s + timeout_s + self._ledger.limits.session_timeout_s
        if lease is not None and now < due_s:
            if lease.recalled_in != lease.worker.session:
                self._commands.recall(lease.worker, [lease])
            self._ledger.expiries.at(due_s, task, TimeLimit.QUEUE_TIMEOUT)
            return
        error = TaskError("QueueTimeout", "no worker began the task within its queue_timeout", retryable=False)
        self.settle_without_report(task, OutcomeState.EXPIRED, error, now)

    def _run_timeout(self, task: Task, when_s: float, now: float) -> None:
        """Revokes a lease whose worker has not ended the attempt within run_timeout_s + RUN_GRACE_S. Charges the
        task only if the attempt has begun. If the worker is loading the task's model now, the limit begins anew.
        `when_s`: the time of the expiry, which may be that of an earlier lease.
        """
        lease, timeout_s = task.lease, task.spec.run_timeout_s
        task.run_timeout_armed = False
        if lease is None or timeout_s is None:
            return
        worker = lease.worker
        since_s = lease.running_since_s if lease.running else lease.dispatch_s
        if not lease.running and worker.residency.loading(lease.model):
            since_s = now
        due_s, late_s = since_s + timeout_s + RUN_GRACE_S, self._ledger.limits.timer_late_s
        # Too early, or so late that the master was suspended: see apply_limit.
        if now < due_s or now > max(due_s, when_s) + late_s:
            task.run_timeout_armed = True
            self._ledger.expiries.at(due_s if now < due_s else now + late_s, task, TimeLimit.RUN_TIMEOUT)
        elif lease.running:
            error = TaskError("RunTimeout", "the attempt ran too long and its worker did not end it")
            self.revoke_charged(lease, error, now)
        else:
            self._revoke(lease, NOT_BEGUN)
            self._ledger.counters.requeued += 1
            task.ensure_extra().avoid_device_or_worker = worker.device_key
            self.requeue_uncharged(lease, now, 0.0)

    # --- back to the queue -------------------------------------------------------------------------------------------

    def pause(self, task: Task, now: float, after_s: float) -> None:
        """Puts a task, which must be in no resource class now, back into its class after `after_s` seconds."""
        not_before_s = task.ensure_extra().not_before_s = now + after_s
        task_id = task.task_id

        def put_back(_now: float) -> None:
            # By task_id: with a reference, a task that ends meanwhile would stay in memory until the end of the pause.
            task = self._ledger.tasks.get(task_id)
            extra = task.extra if task is not None else None
            if task is None or extra is None or task.outcome is not None or extra.not_before_s != not_before_s:
                return
            extra.not_before_s = 0.0
            self._ledger.classes.put_back(self._ledger.class_of(task), task)

        self._timers.at(not_before_s, put_back)

    def _requeue(self, task: Task, now: float, after_s: float) -> None:
        """Requeues a released task, now or after a pause."""
        if after_s > 0.0:
            self.pause(task, now, after_s)
        else:
            self._ledger.classes.put_back(self._ledger.class_of(task), task)

    def _backoff_s(self, task: Task, tries: int) -> float:
        """A pause that doubles with each try, less up to half at random, which separates tasks that failed together."""
        spec = task.spec
        pause_s = min(spec.backoff_initial_s * 2.0 ** max(0, tries - 1), spec.backoff_max_s)
        return pause_s * (1.0 - 0.5 * self._random())
