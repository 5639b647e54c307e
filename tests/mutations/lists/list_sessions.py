"""Mutations of what workers may say: sessions.py."""

from functools import partial

from tests.mutations.mutation import Mutation

sessions = partial(Mutation, module="multigpu_master.core.workers.sessions")
sessions_story = partial(sessions, checker="pytest")

SESSIONS = (
    sessions(
        "a recalled lease counts as lost",
        "attempts.requeue_uncharged(lease, now, 0.0)",
        'attempts.lost(lease, "recalled", now)',
    ),
    sessions_story(
        "P4: a worker that returns all it gets keeps its tasks for ever", "RECALLED and lease.recalled_in:", "RECALLED:"
    ),
    sessions(
        "P2: the old session of a worker lives on beside the new one",
        "self._lose(worker, now, kept={h.lease_id for h in ours})",
    ),
    sessions(
        "a superseded session is not ended",
        'commands.add(ev.EndSession(worker.session, "the worker began',
        '_ = (ev.EndSession(worker.session, "the worker began',
    ),
    sessions("leases listed in hello are dropped", "kept={h.lease_id for h in ours}", "kept=()", seeds=5000),
    sessions(
        "a takeover keeps leases that hello does not list",
        "leases = [x for x in worker.leases.values() if x.lease_id not in kept]",
        "leases = [x for x in worker.leases.values() if not kept and x.lease_id not in kept]",
    ),
    sessions("a kept lease keeps its old dispatch number", "lease.dispatch_number = 0"),
    sessions("P2: a settled task is leased again", "task.outcome is not None or task.lease is", "task.lease is"),
    sessions("P2: a task has two leases", "task.outcome is not None or task.lease is not", "task.outcome is not"),
    sessions("an adopted task stays in its class", "self._ledger.classes.remove(self._ledger.class_of(task), task)"),
    sessions("an adopted task pauses on", "extra.not_before_s = 0.0", seeds=5000),
    sessions("P4: reconnects make a dead letter of a task", "            extra.losses -= 1\n", seeds=5000),
    sessions(
        "P4: a task has more attempts than it may after a restart of the master",
        "task.attempts = max(task.attempts, held.attempt)",
    ),
    sessions("revoke not sent to a hello", "commands.revoke(event.session, revoked, STALE)"),
    sessions(
        "a drain is not sent to a new session", "worker.draining or worker.requested_check", "worker.requested_check"
    ),
    sessions_story(
        "a drain that is over lets go on", "if worker.drain_deadline_s is not None and worker.drain_deadline_s <= now:"
    ),
    sessions("P3: a silent worker keeps its leases", "self._watch_silence(worker, now + self._suspect_s)"),
    sessions("an awaited worker that is back is awaited", "self._hold.stop_expecting(worker.worker_id, now)"),
    sessions("one worker back is enough", "if not self._expected:", "if True:", module="multigpu_master.core.restart"),
    sessions(
        "a new worker is not remembered",
        "hold.stop_expecting(worker.worker_id, now)\n        commands.worker_changed(worker, save=True)\n",
        "hold.stop_expecting(worker.worker_id, now)\n        commands.worker_changed(worker)\n",
    ),
    sessions("P4: a task that kills its workers is never charged", "lease.running = held.running"),
    sessions("each heartbeat restarts the run time", "if held.running and not lease.running:\n", "if held.running:\n"),
    sessions("P3: a heartbeat is not heard", "worker.heard_s = now\n        worker.telemetry", "worker.telemetry"),
    sessions(
        "P3: a report is not heard",
        "        if not event.by_master:\n            worker.heard_s = now\n        for",
        "        for",
    ),
    sessions(
        "a worker's models are not noted", "fleet.apply_models(worker, event.models, event.last_dispatch_number, now)"
    ),
    sessions("a stopping worker gets work", "worker.stopping = event.stopping"),
    sessions("a stopping worker keeps its keys", "fleet.eligibility_changed(worker)"),
    sessions("loading for ever", "fleet.forget_models_of_leases(worker)"),
    sessions(
        "a heartbeat leaves the score as it was", "fleet.room_changed(worker)\n", "fleet.maybe_freed[worker] = None\n"
    ),
    sessions(
        "a heartbeat frees nothing", "        fleet.room_changed(worker)\n", "        fleet.score_changed(worker)\n"
    ),
    sessions("revoke not sent to a heartbeat", "self._commands.revoke(event.session, unknown, STALE)", seeds=5000),
    sessions_story(
        "P7: a lease that its worker has lost is never given to another", "if len(worker.leases) > len(held):"
    ),
    sessions("a lease on its way is taken for lost", "if x.dispatch_number <= event.last_dispatch_number]", "]"),
    sessions_story(
        "P7: a lost lease is missed only after the next dispatch",
        "x.dispatch_number <= event.last_dispatch_number]",
        "x.dispatch_number < event.last_dispatch_number]",
    ),
    sessions(
        "P2: a result counts whoever holds the lease",
        "            lease = pop(lease_id, None)\n",
        "            lease = next((w.leases.pop(lease_id) for w in self._fleet.workers.values()\n"
        "                          if lease_id in w.leases), None)\n",
    ),
    sessions("P2: a lease can be reported twice", "lease = pop(lease_id, None)", "lease = worker.leases.get(lease_id)"),
    sessions(
        "P2: a failure counts whoever holds the lease",
        "            lease = worker.leases.get(failure.lease_id)\n",
        "            lease = next((w.leases[failure.lease_id] for w in self._fleet.workers.values()\n"
        "                          if failure.lease_id in w.leases), None)\n",
        checker="pytest",
    ),
    sessions("P4: a worker that leaves costs its tasks an attempt", "elif failure.returned:\n", "elif False:\n"),
    sessions("P4: a task that fails does so for ever", "            elif failure.returned:", "            elif True:"),
    sessions("a success without its result", " result, content_type, None,\n", ' b"", content_type, None,\n'),
    sessions(
        "stale reports free nothing",
        "fleet.room_changed(worker)  # its",
        "fleet.score_changed(worker)  # its",
        seeds=5000,
    ),
    sessions(
        "reports leave the score as it was",
        "fleet.room_changed(worker)  # its",
        "fleet.maybe_freed[worker] = None  # its",
    ),
    sessions(
        "P10: partial outputs without end",
        "        self.unsettled_bytes += size\n\n    def _keep_log",
        "\n    def _keep_log",
        module="multigpu_master.core.ledger",
    ),
    sessions("P9: a partial output that is sent again counts twice", "if partial.index < known:"),
    sessions_story("P9: outputs are delivered with a gap", "if partial.index > known:"),
    sessions(
        "P2: outputs count whoever holds the lease",
        "            lease = worker.leases.get(partial.lease_id)\n",
        "            lease = next((w.leases[partial.lease_id] for w in self._fleet.workers.values()\n"
        "                          if partial.lease_id in w.leases), None)\n",
    ),
    sessions(
        "P3: leases of a broken stream wait for the timeout",
        "        if worker is not None:\n            self._lose(worker, now)\n",
    ),
    sessions(
        "P7: tasks in the window of a lost worker are in no class",
        'self.lost(lease, f"worker {worker_id} was lost", now)',
        module="multigpu_master.core.attempts",
    ),
    sessions_story("lost leases are requeued in the wrong order", "leases.sort(key=lambda x: -x.task.task_id)"),
    sessions(
        "P4: a task that kills its workers goes on to the next",
        "        if lease.running and lease.gang is None:\n            self._ledger.counters",
        "        if False:\n            self._ledger.counters",
        module="multigpu_master.core.attempts",
    ),
    sessions(
        "P4: tasks that never ran become dead letters",
        "        if lease.running and lease.gang is None:\n            self._ledger.counters",
        "        if True:\n            self._ledger.counters",
        module="multigpu_master.core.attempts",
    ),
    sessions(
        "P3: the watch of a session that is over declares the next one lost",
        "            if worker.session != session:\n                return\n",
        seeds=2000,
    ),
    sessions(
        "P3: a master that was away blames the workers", "not suspected or now > due_s + grace_s:", "False:", seeds=1000
    ),
    sessions_story("P3: a second look that is late counts", "not suspected or now > due_s + grace_s", "not suspected"),
    sessions("P3: a worker is lost before its timeout", "now < suspect_at_s:", "now < suspect_at_s - self._grace_s:"),
    sessions_story(
        "P4: an attempt that failed is taken off the count when its lease comes back and is lost",
        "if held.attempt <= extra.failed_attempt or held.lease_id in extra.returned_lease_ids:",
        "if held.lease_id in extra.returned_lease_ids:",
    ),
    sessions("P3: a worker that falls silent later is never missed", "self._watch_silence(worker, suspect_at_s)"),
    sessions("a silent session is not ended", "self._commands.add(ev.EndSession(session", "_ = (ev.EndSession(session"),
)
