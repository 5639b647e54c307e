"""Mutations of what clients and operators may do: scheduler.py, admission.py, operators.py."""

from functools import partial

from tests.mutations.mutation import Mutation

scheduler = partial(Mutation, module="multigpu_master.core.scheduler")
admission = partial(Mutation, module="multigpu_master.core.admission")
operators = partial(Mutation, module="multigpu_master.core.operators")

EVENTS = (
    scheduler(
        "a requeued dead letter gets another id", "task.task_id = dead_letter_id or", "task.task_id =", seeds=20_000
    ),
    scheduler("timers never fire", "self.timers.fire(now)"),
    scheduler(
        "deadlines ignored",
        "        for when_s, task, limit in self.ledger.expiries.due(now):\n"
        "            self._attempts.apply_limit(task, limit, when_s, now)\n"
        "        self._handlers",
        "        self._handlers",
    ),
    scheduler("tick ignores deadlines", "self.timers.next_s(), self.ledger.expiries.next_s()", "self.timers.next_s(),"),
    scheduler("outcomes are sent twice", "self._settled = []", module="multigpu_master.core.events"),
    scheduler(
        "P5: duplicate request_id taken twice",
        "known = ledger.requests.get(task.request_id) if task.request_id else None",
        "known = None",
    ),
    scheduler(
        "a withdrawn request_id stays taken",
        " and not _may_reuse_request_id(known.outcome, spec):",
        ":",
        checker="pytest",
    ),
    scheduler("a second stream is not followed", "task.streams = (*open_streams, stream)"),
    scheduler(
        "P10: queues grow without end", "reason or room_rejection(ledger, ids, queue, len(task.payload))", "reason"
    ),
    scheduler("rejections ignored", "why_not = reason or", "why_not ="),
    scheduler("cancel lost", "self._attempts.settle_without_report(task, OutcomeState.CANCELLED, error, now)"),
    scheduler(
        "settled tasks are cancelled",
        "for t in dict.fromkeys(event.tasks) if t.outcome is None]",
        "for t in dict.fromkeys(event.tasks)]",
        checker="pytest",
    ),
    scheduler(
        "a failed submit stays in its class",
        'self._attempts.take_out(task, "the master could not write the task to its journal")',
    ),
    scheduler("a failed submit keeps its place in the accounts", "ledger.remove_from_counts(task)"),
    scheduler("P1: a task is acknowledged that the journal could not write", "task.task_id = 0"),
    scheduler(
        "a restarted master does not wait for workers",
        "self.hold.until_s = event.hold_until_s",
        "self.hold.until_s = 0.0",
    ),
    scheduler(
        "the wait after a restart has no end of its own",
        "self.timers.at(event.hold_until_s, self._extend_hold_if_suspended)",
    ),
    scheduler("P10: outcomes on the disk are not forgotten", "self.ledger.forget_settled(task)"),
    admission("a passed deadline is taken", "None and spec.deadline_s <= now", "None and spec.deadline_s < now - 1.0"),
    admission(
        "wait_for_worker ignored",
        "or not fleet.sessions or fleet.placeable(shape):",
        "or True:",
    ),
    admission(
        "P10: a queue holds one task more than it may",
        "queue.queued + queue.leased >= queue.tasks_max",
        "queue.queued + queue.leased > queue.tasks_max",
    ),
    admission(
        "P10: a queue holds more than it may while some of it runs",
        "queue.queued + queue.leased >= queue.tasks_max",
        "queue.queued >= queue.tasks_max",
        seeds=5000,
    ),
    admission(
        "P10: a queue holds more bytes than it may",
        "queue.bytes_max and queue.queued_bytes + queue.leased_bytes + size > queue.bytes_max",
        "False",
    ),
    admission(
        "P10: the master holds one task more than it may",
        "ledger.unsettled >= limits.tasks_max",
        "ledger.unsettled > limits.tasks_max",
        seeds=5000,
    ),
    admission(
        "P10: payloads without end", "ledger.unsettled_bytes + size > limits.bytes_max", "False", checker="pytest"
    ),
    operators("a cordon is forgotten by a restart", "worker.cordon = event.cordon", "worker.cordon = None"),
    operators(
        "a restart drops the deadline of a drain",
        "= event.cordon\n        self._interrupt_at_drain_deadline(worker)\n",
        "= event.cordon\n",
    ),
    operators("a restarted master expects no worker", "self._hold.expect(worker.worker_id)"),
    operators("a cordon does nothing", 'worker.cordon = replace(worker.cordon or Cordon(""), reason=event.reason)'),
    operators(
        "an uncordon leaves the drain",
        "was_draining, worker.cordon = worker.draining, None",
        "was_draining = worker.draining",
    ),
    operators(
        "an uncordon is not sent to the worker",
        "        if was_draining:\n            self._commands.send_desired_state(worker)\n",
    ),
    operators(
        "a drain gets new work",
        "draining=True, drain_deadline_s=deadline_s)\n        self._commands.send_desired_state(worker)\n",
        "draining=True, drain_deadline_s=deadline_s)\n"
        "        self._commands.send_desired_state(worker)\n"
        "        worker.cordon = None\n",
    ),
    operators(
        "a drain is not sent to the worker",
        "drain_deadline_s=deadline_s)\n        self._commands.send_desired_state(worker)\n",
        "drain_deadline_s=deadline_s)\n",
    ),
    operators("a drain has no deadline", "self._timers.at(deadline_s, interrupt)"),
    operators(
        "P6: leases are taken before the deadline of the drain", "deadline_s, interrupt", "deadline_s - 0.5, interrupt"
    ),
    operators(
        "P6: a drain that was called off takes the leases",
        "if worker.draining and worker.drain_deadline_s == deadline_s:",
        "if worker.session:",
    ),
    operators(
        "P6: the first of two drains interrupts what the second would let end",
        "if worker.draining and worker.drain_deadline_s == deadline_s:",
        "if worker.draining:",
        checker="pytest",
    ),
    operators("a forgotten worker is still awaited", "self._hold.stop_expecting(event.worker_id, now)", seeds=2000),
    operators(
        "a forgotten worker comes back",
        "        self._hold.stop_expecting(event.worker_id, now)\n"
        "        self._commands.worker_changed(worker, save=True, gone=True)\n",
        "        self._hold.stop_expecting(event.worker_id, now)\n",
    ),
    operators(
        "a changed worker is not remembered",
        "eligibility_changed(worker)\n        self._commands.worker_changed(worker, save=True)\n",
        "eligibility_changed(worker)\n        self._commands.worker_changed(worker)\n",
    ),
    operators("an uncordon does not fill the worker", "self._fleet.eligibility_changed(worker)"),
    operators(
        "a strategy change forgets what waits",
        "            ledger.strategy = event.name\n        self._ledger.classes.regroup(event.queue)\n",
        "            ledger.strategy = event.name\n",
        seeds=5000,
    ),
    operators(
        "a queue that is paused or resumed keeps its backlogs",
        "            queue.paused = event.paused\n            self._ledger.classes.regroup(event.queue)\n",
        "            queue.paused = event.paused\n",
    ),
    operators("a pause does nothing", "queue.paused = event.paused"),
)
