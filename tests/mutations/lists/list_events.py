"""Mutations of what clients and operators may do: scheduler.py, admission.py, operators.py."""

from functools import partial

from tests.mutations.mutation import Mutation

scheduler = partial(Mutation, module="multigpu_master.core.scheduler")
admission = partial(Mutation, module="multigpu_master.core.admission")
operators = partial(Mutation, module="multigpu_master.core.operators")

EVENTS = (
    scheduler(
        name="a requeued dead letter gets another id",
        old="task.task_id = requeued or ids.take()",
        new="task.task_id = ids.take()",
        breaks="what an operator requeued is a second task of its request_id",
        seeds=20_000,
    ),
    scheduler(
        name="timers never fire",
        old="        state.timers.fire(now)\n",
    ),
    scheduler(
        name="deadlines ignored",
        old=(
            "        for task, what in self._expiries.due(now):\n"
            "            self._attempts.due(task, what, now)\n"
            "        self._handlers"
        ),
        new="        self._handlers",
    ),
    scheduler(
        name="tick ignores deadlines",
        old="in (self.state.timers.next_s(), self._expiries.next_s()):\n",
        new="in (self.state.timers.next_s(),):\n",
    ),
    scheduler(
        name="outcomes are sent twice",
        module="multigpu_master.core.outbox",
        old="            self._settled = []\n",
    ),
    scheduler(
        name="duplicate request_id taken twice",
        old="known = ledger.requests.get(task.request_id) if task.request_id else None",
        new="known = None",
        breaks="P5: a repeated request_id makes a second task",
    ),
    scheduler(
        name="a withdrawn request_id stays taken",
        old=" and not _is_free(known.outcome, spec):",
        new=":",
        checker="pytest",
    ),
    scheduler(
        name="a second stream is not followed",
        old="task.streams = (*living, stream)",
        new="pass",
    ),
    scheduler(
        name="no limits on admission",
        old="why_not = reason or full(state, queue, len(task.payload))",
        new="why_not = reason",
        breaks="P10: queues grow without end",
    ),
    scheduler(
        name="rejections ignored",
        old="why_not = reason or full(state, queue, len(task.payload))",
        new="why_not = full(state, queue, len(task.payload))",
    ),
    scheduler(
        name="cancel lost",
        old="            self._attempts.end(task, OutcomeState.CANCELLED, error, now)\n",
        new="            pass\n",
    ),
    scheduler(
        name="settled tasks are cancelled",
        old="for t in dict.fromkeys(event.tasks) if t.outcome is None]",
        new="for t in dict.fromkeys(event.tasks)]",
        checker="pytest",
    ),
    scheduler(
        name="a failed submit stays in its class",
        old='                self._attempts.leave(task, "the master could not write the task to its journal")\n',
    ),
    scheduler(
        name="a failed submit keeps its place in the accounts",
        old="                ledger.close(task)\n",
    ),
    scheduler(
        name="a failed submit is acknowledged",
        old="                task.task_id = 0\n",
        breaks="P1: a task is acknowledged that the journal could not write",
    ),
    scheduler(
        name="a restarted master does not wait for workers",
        old="self.state.hold.until_s = event.hold_until_s",
        new="self.state.hold.until_s = 0.0",
    ),
    scheduler(
        name="the wait after a restart has no end of its own",
        old="        self.state.timers.at(event.hold_until_s, lambda _now: None)\n",
    ),
    scheduler(
        name="outcomes on the disk are not forgotten",
        old="            self.state.ledger.committed(task)\n",
        new="            pass\n",
        breaks="P10: settled tasks stay in memory",
    ),
    admission(
        name="a passed deadline is taken",
        old="spec.deadline_s is not None and spec.deadline_s <= now",
        new="spec.deadline_s is not None and spec.deadline_s < now - 1.0",
    ),
    admission(
        name="wait_for_worker ignored",
        old="if spec.wait_for_worker or not fleet.sessions or fleet.eligible(shape_of(spec)):",
        new="if spec.wait_for_worker or True:",
    ),
    admission(
        name="a queue's limit is off by one",
        old="queue.queued + queue.leased >= queue.tasks_max",
        new="queue.queued + queue.leased > queue.tasks_max",
        breaks="P10: a queue holds one task more than it may",
    ),
    admission(
        name="a queue's limit forgets what is leased",
        old="queue.queued + queue.leased >= queue.tasks_max",
        new="queue.queued >= queue.tasks_max",
        breaks="P10: a queue holds more than it may while some of it runs",
        seeds=5000,
    ),
    admission(
        name="a queue's bytes ignored",
        old="queue.bytes_max and queue.queued_bytes + queue.leased_bytes + size > queue.bytes_max",
        new="False",
        breaks="P10: a queue holds more bytes than it may",
    ),
    admission(
        name="the master's limit is off by one",
        old="ledger.unsettled >= limits.tasks_max",
        new="ledger.unsettled > limits.tasks_max",
        breaks="P10: the master holds one task more than it may",
        seeds=5000,
    ),
    admission(
        name="the master's bytes ignored",
        old="ledger.unsettled_bytes + size > limits.bytes_max",
        new="False",
        breaks="P10: payloads without end",
        checker="pytest",
    ),
    operators(
        name="a cordon is forgotten by a restart",
        old="Cordon(event.cordon_reason) if event.cordoned else None",
        new="None",
    ),
    operators(
        name="a restarted master expects no worker",
        old="            self._state.hold.expect(worker.worker_id)\n",
        new="            pass\n",
    ),
    operators(
        name="a cordon does nothing",
        old='        worker.cordon = replace(worker.cordon or Cordon(""), reason=event.reason)\n',
    ),
    operators(
        name="an uncordon leaves the drain",
        old="drained, worker.cordon = worker.draining, None",
        new="drained = worker.draining",
    ),
    operators(
        name="an uncordon is not sent to the worker",
        old="        if drained:\n            self._state.outbox.desire(worker)\n",
    ),
    operators(
        name="a drain gets new work",
        old="draining=True, drain_deadline_s=deadline_s)\n        self._state.outbox.desire(worker)\n",
        new=(
            "draining=True, drain_deadline_s=deadline_s)\n"
            "        self._state.outbox.desire(worker)\n"
            "        worker.cordon = None\n"
        ),
    ),
    operators(
        name="a drain is not sent to the worker",
        old="drain_deadline_s=deadline_s)\n        self._state.outbox.desire(worker)\n",
        new="drain_deadline_s=deadline_s)\n",
    ),
    operators(
        name="a drain has no deadline",
        old="            self._state.timers.at(deadline_s, end)\n",
        new="            pass\n",
    ),
    operators(
        name="a drain is interrupted early",
        old="            self._state.timers.at(deadline_s, end)\n",
        new="            self._state.timers.at(deadline_s - 0.5, end)\n",
        breaks="P6: leases are taken before the deadline of the drain",
    ),
    operators(
        name="an overruled drain interrupts",
        old="if worker.draining and worker.drain_deadline_s == deadline_s:",
        new="if worker.session:",
        breaks="P6: a drain that was called off takes the leases",
    ),
    operators(
        name="an earlier deadline outlives a later one",
        old="if worker.draining and worker.drain_deadline_s == deadline_s:",
        new="if worker.draining:",
        breaks="P6: the first of two drains interrupts what the second would let end",
        checker="pytest",
    ),
    operators(
        name="a forgotten worker is still awaited",
        old="        self._state.hold.arrived(event.worker_id, now)\n",
        seeds=2000,
    ),
    operators(
        name="a forgotten worker comes back",
        old=(
            "        self._state.hold.arrived(event.worker_id, now)\n"
            "        self._state.outbox.worker_changed(worker, remember=True, gone=True)\n"
        ),
        new="        self._state.hold.arrived(event.worker_id, now)\n",
    ),
    operators(
        name="a changed worker is not remembered",
        old="members_changed(worker)\n        self._state.outbox.worker_changed(worker, remember=True)\n",
        new="members_changed(worker)\n        self._state.outbox.worker_changed(worker)\n",
    ),
    operators(
        name="an uncordon does not fill the worker",
        old="        self._state.fleet.members_changed(worker)\n",
    ),
    operators(
        name="a strategy change forgets what waits",
        old="            self._state.classes.offer_all()\n",
        seeds=5000,
    ),
    operators(
        name="an unpaused queue is not tried",
        old="        if event.paused is False:\n            self._retry(event.queue)\n",
    ),
    operators(
        name="a pause does nothing",
        old="            queue.paused = event.paused\n",
        new="            pass\n",
    ),
)
