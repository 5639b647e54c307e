"""Mutations of what becomes of a lease that ended: attempts.py."""

from functools import partial

from tests.mutations.mutation import Mutation

attempts = partial(Mutation, module="multigpu_master.core.attempts")
attempts_story = partial(attempts, checker="pytest")

ATTEMPTS = (
    attempts(
        name="hopeless errors are tried again",
        old="        if error.retryable and task.attempts",
        new="        if task.attempts",
    ),
    attempts(
        name="one attempt too many",
        old="task.attempts < task.spec.attempts_max",
        new="task.attempts <= task.spec.attempts_max",
        breaks="P4: a task has one attempt more than it may",
    ),
    attempts(
        name="one attempt too few",
        old="task.attempts < task.spec.attempts_max",
        new="task.attempts + 1 < task.spec.attempts_max",
    ),
    attempts(
        name="a failure is tried again at once",
        old="self._requeue(task, now, self._backoff_s(task, task.attempts))",
        new="self._requeue(task, now, 0.0)",
    ),
    attempts(
        name="dead letters are failures",
        old="OutcomeState.DEAD_LETTERED if error.retryable else OutcomeState.FAILED",
        new="OutcomeState.FAILED",
        breaks="P4: a poison task is not kept as a dead letter",
    ),
    attempts(
        name="wrong attempt count",
        old="        if task.attempts == lease.attempt:\n            task.attempts -= 1\n",
        breaks="P4: an attempt that never ran is charged",
    ),
    attempts_story(
        name="an old lease gives an attempt back",
        old="        if task.attempts == lease.attempt:\n            task.attempts -= 1\n",
        new="        task.attempts -= 1\n",
        breaks="P4: a task has more attempts than it may",
    ),
    attempts(
        name="losses are not counted",
        old="        extra.losses += 1\n",
        breaks="P4: a task that kills its workers before they can say so does so for ever",
    ),
    attempts(
        name="dead letter never",
        old="        if extra.losses <= LOSSES_MAX:\n",
        new="        if True:\n",
        breaks="P4: a task that kills its workers before they can say so does so for ever",
    ),
    attempts(
        name="suspects are retried without a delay",
        old="0.0 if extra.losses == 1 else self._backoff_s(task, extra.losses - 1)",
        new="0.0",
    ),
    attempts(
        name="revoke not sent",
        old="        self._state.outbox.revoke(worker.session, [lease.lease_id], why)\n",
    ),
    attempts(
        name="a taken lease stays in its window",
        old="        del worker.leases[lease.lease_id]\n",
        breaks="P2: a lease that was taken back can still be reported",
    ),
    attempts(
        name="a taken lease leaves the ranking as it was",
        old="        self._state.fleet.touch(worker)\n",
    ),
    attempts(
        name="a run that was too long is not charged",
        old="""        if error is not None:
            self._ledger.counters.requeued += 1
            self.failed(""",
        new="""        if error is not None:
            self.lost(lease, error.message, now)
        elif error is not None:
            self.failed(""",
        breaks="P4: a task that never ends is tried for ever",
    ),
    attempts(
        name="a settled task stays in its class",
        old="            self._state.classes.leave(self._ledger.class_of(task), task)\n",
        new="            pass\n",
    ),
    attempts(
        name="a deadline is no end",
        old="        if what is Due.DEADLINE:\n",
        new="        if what is Due.DEADLINE and task.lease is None:\n",
    ),
    attempts(
        name="queue timeouts while workers are awaited",
        old="        elif self._state.hold.active(now):\n",
        new="        elif False:\n",
        seeds=5000,
    ),
    attempts(
        name="queue timeout ignored",
        old="        else:\n            self._queue_timeout(task, now)\n",
    ),
    attempts(
        name="queue_timeout does not recall a lease from a window",
        old="                self._state.outbox.recall(lease.worker, [lease])",
        new="                pass",
    ),
    attempts(
        name="a lease returned after its queue_timeout is granted again",
        old="        elif spec.queue_timeout_s is not None and task.submit_s + spec.queue_timeout_s <= now:\n",
        new="        elif False:\n",
    ),
    attempts_story(
        name="queue timeout of what runs",
        old=" or (lease is not None and lease.running):\n            return\n",
        new=":\n            return\n",
    ),
    attempts(
        name="queue timeout of a later attempt",
        old="task.attempts > (lease is not None) or (lease",
        new="(lease",
    ),
    attempts(
        name="a lease meets the queue timeout",
        old="        if lease is not None and now < due_s:\n",
        new="        if lease is not None:\n            return\n        if False:\n",
    ),
    attempts(
        name="queue_timeout leaves no time to report the start",
        old="        if lease is not None and now < due_s:\n",
        new="        if False:\n",
    ),
    attempts(
        name="a lease that is not begun stays",
        old="            self._withdraw(lease, NOT_BEGUN)\n",
        new="            return\n",
    ),
    attempts_story(
        name="a task is granted again to the worker that did not start it",
        old="            task.more().avoids = worker.device_key\n",
    ),
    attempts_story(
        name="a model's loading counts as not begun",
        old="        if not lease.running and worker.residency.loading(lease.model):\n",
        new="        if False:\n",
    ),
    attempts_story(
        name="a recalled lease is granted to the same worker",
        old="            lease.task.more().avoids = lease.worker.worker_id\n",
        new="            pass\n",
    ),
    attempts(
        name="run timeout counts from the grant",
        old="since_s = lease.run_s if lease.running else lease.dispatch_s",
        new="since_s = lease.dispatch_s",
    ),
    attempts(
        name="run timeout looks once",
        old="            self._ledger.expiries.at(due_s, task, Due.RUN_TIMEOUT)\n",
        new="            pass\n",
        breaks="P7: an attempt that never ends is never ended",
    ),
    attempts(
        name="pauses don't grow",
        old="spec.backoff_initial_s * 2.0 ** max(0, tries - 1)",
        new="spec.backoff_initial_s",
    ),
    attempts(
        name="pauses have no limit",
        old="min(spec.backoff_initial_s * 2.0 ** max(0, tries - 1), spec.backoff_max_s)",
        new="spec.backoff_initial_s * 2.0 ** max(0, tries - 1)",
    ),
    attempts(
        name="a pause that is over by adoption wakes the task",
        old=" and extra.not_before_s == not_before_s:",
        new=":",
        seeds=5000,
    ),
    attempts(
        name="a settled task wakes",
        old="if task.task_id and task.outcome is None and extra",
        new="if task.task_id and extra",
    ),
    attempts(
        name="a rejected task wakes",
        old="if task.task_id and task.outcome is None and",
        new="if task.outcome is None and",
        seeds=5000,
    ),
    attempts(
        name="a pause without end",
        old="        self._state.timers.at(not_before_s, due)\n",
        breaks="P7: a task is never tried again",
    ),
    Mutation(
        module="multigpu_master.core.workers.sessions",
        name="the first reported attempt of a task is adopted",
        old="        ours.sort(key=lambda h: -h.attempt)  # of several attempts of a task the last one counts\n",
        seeds=5000,
    ),
)
