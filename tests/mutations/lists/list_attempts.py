"""Mutations of what becomes of a lease that ended: attempts.py."""

from functools import partial

from tests.mutations.mutation import Mutation

attempts = partial(Mutation, module="multigpu_master.core.attempts")
attempts_story = partial(attempts, checker="pytest")

ATTEMPTS = (
    attempts("hopeless errors are tried again", "if error.retryable and task.attempts", "if task.attempts"),
    attempts(
        "P4: a task has one attempt more than it may",
        "task.attempts < task.spec.attempts_max",
        "task.attempts <= task.spec.attempts_max",
    ),
    attempts(
        "one attempt too few", "task.attempts < task.spec.attempts_max", "task.attempts + 1 < task.spec.attempts_max"
    ),
    attempts("a failure is tried again at once", "task, now, self._backoff_s(task, task.attempts)", "task, now, 0.0"),
    attempts(
        "P4: a poison task is not kept as a dead letter",
        "OutcomeState.DEAD_LETTERED if error.retryable else OutcomeState.FAILED",
        "OutcomeState.FAILED",
    ),
    attempts(
        "P4: an attempt that never ran is charged",
        "        if task.attempts == lease.attempt:\n            task.attempts -= 1\n",
    ),
    attempts_story(
        "P4: a task has more attempts than it may",
        "        if task.attempts == lease.attempt:\n            task.attempts -= 1\n",
        "        task.attempts -= 1\n",
    ),
    attempts("P4: losses are not counted", "extra.losses += 1"),
    attempts("P4: dead letter never", "        if extra.losses <= LOSSES_MAX:\n", "        if True:\n"),
    attempts(
        "suspects are retried without a delay",
        "0.0 if extra.losses == 1 else self._backoff_s(task, extra.losses - 1)",
        "0.0",
    ),
    attempts("revoke not sent", "self._commands.revoke(lease.worker.session, [lease.lease_id], why)"),
    attempts(
        "P4: a task that never ends is tried for ever",
        """        self._revoke(lease, error.message)
        self._ledger.counters.requeued += 1
        self.failed(lease, error, lease.running_since_s, now, now)""",
        """        self._revoke(lease, error.message)
        self.lost(lease, error.message, now)""",
    ),
    attempts(
        "a settled task stays in its class", "self._ledger.classes.remove_ended(self._ledger.class_of(task), task)"
    ),
    attempts(
        "a deadline is no end",
        "if limit is TimeLimit.DEADLINE:\n",
        "if limit is TimeLimit.DEADLINE and task.lease is None:\n",
    ),
    attempts("queue timeouts while workers are awaited", "elif self._hold.active(now)", "elif False", seeds=5000),
    attempts("queue timeout ignored", "        else:\n            self._queue_timeout(task, now)\n"),
    attempts("queue_timeout does not recall a lease from a window", "self._commands.recall(lease.worker, [lease])"),
    attempts(
        "a lease returned after its queue_timeout is granted again",
        "        elif spec.queue_timeout_s is not None and task.submit_s + spec.queue_timeout_s <= now:\n",
        "        elif False:\n",
    ),
    attempts_story("queue timeout of what runs", " or (lease is not None and lease.running):\n", ":\n"),
    attempts("queue timeout of a later attempt", "task.attempts > (lease is not None) or (lease", "(lease"),
    attempts(
        "queue timeout of a task that ran, and was interrupted",
        "task.ensure_extra().queue_timeout_over = True\n        if task.attempts",
        "pass\n        if task.attempts",
    ),
    attempts("a lease meets the queue timeout", "None and now < due_s", "None:\n            return\n        if False"),
    attempts("queue_timeout leaves no time to report the start", "if lease is not None and now < due_s:"),
    attempts("a lease that is not begun stays", "            self._revoke(lease, NOT_BEGUN)", "            return"),
    attempts_story(
        "a task is granted again to the worker that did not start it",
        "task.ensure_extra().avoid_device_or_worker = worker.device_key",
    ),
    attempts_story(
        "a model's loading counts as not begun", "if not lease.running and worker.residency.loading(lease.model):"
    ),
    attempts_story(
        "a recalled lease is granted to the same worker",
        "lease.task.ensure_extra().avoid_device_or_worker = lease.worker.worker_id",
    ),
    attempts_story(
        "a suspended master applies time limits before it reads",
        "task.lease is not None and now > when_s + late_s",
        "False",
    ),
    attempts("run timeout counts from the grant", "since_s = lease.running_since_s if lease.running else", "since_s ="),
    attempts(
        "P7: run timeout looks once",
        "self._ledger.expiries.at(due_s if now < due_s else now + late_s, task, TimeLimit.RUN_TIMEOUT)",
    ),
    attempts("pauses don't grow", "spec.backoff_initial_s * 2.0 ** max(0, tries - 1)", "spec.backoff_initial_s"),
    attempts(
        "pauses have no limit",
        "min(spec.backoff_initial_s * 2.0 ** max(0, tries - 1), spec.backoff_max_s)",
        "spec.backoff_initial_s * 2.0 ** max(0, tries - 1)",
    ),
    attempts(
        "a pause that is over by adoption wakes the task", " or extra.not_before_s != not_before_s:", ":", seeds=5000
    ),
    attempts("a settled task wakes", "or task.outcome is not None or extra", "or extra"),
    attempts("P7: a pause without end", "self._timers.at(not_before_s, put_back)"),
    Mutation(
        "the first reported attempt of a task is adopted",
        "ours.sort(key=lambda h: -h.attempt)  # of several attempts of a task the last one counts",
        module="multigpu_master.core.workers.sessions",
        checker="pytest",
    ),
)
