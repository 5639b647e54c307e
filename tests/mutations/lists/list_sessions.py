"""Mutations of what workers may say: sessions.py."""

from functools import partial

from tests.mutations.mutation import Mutation

sessions = partial(Mutation, module="multigpu_master.core.workers.sessions")
sessions_story = partial(sessions, checker="pytest")

SESSIONS = (
    sessions(
        name="a recalled lease counts as lost",
        old="                attempts.spare(lease, now, 0.0)\n",
        new='                attempts.lost(lease, "recalled", now)\n',
    ),
    sessions_story(
        name="a lease returned without a recall does not count as lost",
        old="failure.error.type == RECALLED and lease.recalled:",
        new="failure.error.type == RECALLED:",
        breaks="P4: a worker that returns all it gets keeps its tasks for ever",
    ),
    sessions(
        name="takeover not fenced",
        old="            self._lose(worker, now, kept={h.lease_id for h in ours})\n",
        breaks="P2: the old session of a worker lives on beside the new one",
    ),
    sessions(
        name="a superseded session is not ended",
        old='outbox.add(ev.EndSession(worker.session, "the worker began',
        new='_ = (ev.EndSession(worker.session, "the worker began',
    ),
    sessions(
        name="leases listed in hello are dropped",
        old="kept={h.lease_id for h in ours}",
        new="kept=()",
        seeds=5000,
    ),
    sessions(
        name="a takeover keeps leases that hello does not list",
        old="leases = [x for x in worker.leases.values() if x.lease_id not in kept]",
        new="leases = [x for x in worker.leases.values() if not kept and x.lease_id not in kept]",
    ),
    sessions(
        name="a kept lease keeps its old frame",
        old="                lease.frame = 0\n",
    ),
    sessions(
        name="adopted although settled",
        old="task.outcome is not None or task.lease is not None",
        new="task.lease is not None",
        breaks="P2: a settled task is leased again",
    ),
    sessions(
        name="adopted although leased",
        old="task.outcome is not None or task.lease is not None",
        new="task.outcome is not None",
        breaks="P2: a task has two leases",
    ),
    sessions(
        name="an adopted task stays in its class",
        old="            self._state.classes.leave(self._ledger.class_of(task), task)\n",
        new="            pass\n",
    ),
    sessions(
        name="an adopted task pauses on",
        old="            extra.not_before_s = 0.0\n",
        new="            pass\n",
        seeds=5000,
    ),
    sessions(
        name="a lease that came back counts as lost",
        old="            extra.losses = max(0, extra.losses - 1)",
        new="            pass",
        breaks="P4: reconnects make a dead letter of a task",
        seeds=5000,
    ),
    sessions(
        name="an adopted attempt is not counted",
        old="        task.attempts = max(task.attempts, held.attempt)\n        lease = ",
        new="        lease = ",
        breaks="P4: a task has more attempts than it may after a restart of the master",
    ),
    sessions(
        name="revoke not sent to a hello",
        old="        outbox.revoke(event.session, revoked, STALE)\n",
    ),
    sessions(
        name="a drain is not sent to a new session",
        old="        if worker.draining or worker.checks_asked or",
        new="        if worker.checks_asked or",
    ),
    sessions_story(
        name="a drain that is over lets go on",
        old="        if worker.drain_deadline_s is not None and worker.drain_deadline_s <= now:\n",
        new="        if False:\n",
    ),
    sessions(
        name="silence not watched",
        old="        self._watch_silence(worker, now + self._suspect_s)\n",
        breaks="P3: a silent worker keeps its leases",
    ),
    sessions(
        name="an awaited worker that is back is awaited",
        old="        self._state.hold.arrived(worker.worker_id, now)\n",
    ),
    sessions(
        name="one worker back is enough",
        module="multigpu_master.core.restart",
        old="        if not self._expected:\n",
        new="        if True:\n",
    ),
    sessions(
        name="a new worker is not remembered",
        old="hold.arrived(worker.worker_id, now)\n        outbox.worker_changed(worker, remember=True)\n",
        new="hold.arrived(worker.worker_id, now)\n        outbox.worker_changed(worker)\n",
    ),
    sessions(
        name="running leases are not recorded",
        old="        lease.running = held.running\n",
        breaks="P4: a task that kills its workers is never charged",
    ),
    sessions(
        name="each heartbeat restarts the run time",
        old="        if held.running and not lease.running:\n",
        new="        if held.running:\n",
    ),
    sessions(
        name="a heartbeat is not heard",
        old="        worker.heard_s = now\n        worker.telemetry = event.telemetry\n",
        new="        worker.telemetry = event.telemetry\n",
        breaks="P3: a worker that speaks is declared lost",
    ),
    sessions(
        name="a report is not heard",
        old="        worker.heard_s = now\n        succeeded = ",
        new="        succeeded = ",
        breaks="P3: a worker that speaks is declared lost",
    ),
    sessions(
        name="a worker's models are not noted",
        old="        fleet.heard(worker, event.models, event.last_frame, now)\n",
    ),
    sessions(
        name="a stopping worker gets work",
        old="            worker.stopping = event.stopping\n",
    ),
    sessions(
        name="a stopping worker keeps its keys",
        old="            fleet.members_changed(worker)\n",
        new="            pass\n",
    ),
    sessions(
        name="loading for ever",
        old="            fleet.idle(worker)\n",
        new="            pass\n",
    ),
    sessions(
        name="a heartbeat leaves the ranking as it was",
        old="        fleet.free(worker)\n        self._held",
        new="        fleet.freed[worker] = None\n        self._held",
    ),
    sessions(
        name="a heartbeat frees nothing",
        old="        fleet.free(worker)\n        self._held",
        new="        fleet.touch(worker)\n        self._held",
    ),
    sessions(
        name="revoke not sent to a heartbeat",
        old="        self._outbox.revoke(event.session, unknown, STALE)\n",
        seeds=5000,
    ),
    sessions_story(
        name="a lost lease is never missed",
        old="        if len(worker.leases) > len(held):\n",
        new="        if False:\n",
        breaks="P7: a lease that its worker has lost is never given to another",
    ),
    sessions(
        name="a lease on its way is taken for lost",
        old="x.lease_id not in held and x.frame <= event.last_frame]",
        new="x.lease_id not in held]",
    ),
    sessions_story(
        name="the last frame's leases are not missed",
        old="x.frame <= event.last_frame]",
        new="x.frame < event.last_frame]",
        breaks="P7: a lost lease is missed only after the next dispatch",
    ),
    sessions(
        name="stale report accepted",
        old="            lease = pop(lease_id, None)\n",
        new=(
            "            lease = next((w.leases.pop(lease_id) for w in self._state.fleet.workers.values()\n"
            "                          if lease_id in w.leases), None)\n"
        ),
        breaks="P2: a result counts whoever holds the lease",
    ),
    sessions(
        name="the fence is left open",
        old="            lease = pop(lease_id, None)\n",
        new="            lease = worker.leases.get(lease_id)\n",
        breaks="P2: a lease can be reported twice",
    ),
    sessions(
        name="stale failure accepted",
        old="            lease = worker.leases.pop(failure.lease_id, None)\n",
        new=(
            "            lease = next((w.leases.pop(failure.lease_id) for w in self._fleet.workers.values()\n"
            "                          if failure.lease_id in w.leases), None)\n"
        ),
        breaks="P2: a failure counts whoever holds the lease",
        checker="pytest",
    ),
    sessions(
        name="a returned task is charged",
        old="            elif failure.returned:\n",
        new="            elif False:\n",
        breaks="P4: a worker that leaves costs its tasks an attempt",
    ),
    sessions(
        name="a failed task is not charged",
        old="            elif failure.returned:\n",
        new="            elif True:\n",
        breaks="P4: a task that fails does so for ever",
    ),
    sessions(
        name="a success without its result",
        old=" result, content_type, None,\n",
        new=' b"", content_type, None,\n',
    ),
    sessions(
        name="stale reports free nothing",
        old="        fleet.free(worker)  # its window may have grown",
        new="        fleet.touch(worker)  # its window may have grown",
        seeds=5000,
    ),
    sessions(
        name="reports leave the ranking as it was",
        old="        fleet.free(worker)  # its window may have grown",
        new="        fleet.freed[worker] = None  # its window may have grown",
    ),
    sessions(
        name="partial outputs take no room",
        module="multigpu_master.core.ledger",
        old="        self.unsettled_bytes += size\n\n    def succeed",
        new="\n    def succeed",
        breaks="P10: partial outputs without end",
    ),
    sessions(
        name="partial index repeated",
        old="            if partial.index < known:\n",
        new="            if False:\n",
        breaks="P9: a partial output that is sent again counts twice",
    ),
    sessions_story(
        name="a gap in the partial outputs",
        old="            if partial.index > known:\n",
        new="            if False:\n",
        breaks="P9: outputs are delivered with a gap",
    ),
    sessions(
        name="partial outputs of a revoked lease are accepted",
        old="            lease = worker.leases.get(partial.lease_id)\n",
        new=(
            "            lease = next((w.leases[partial.lease_id] for w in self._fleet.workers.values()\n"
            "                          if partial.lease_id in w.leases), None)\n"
        ),
        breaks="P2: outputs count whoever holds the lease",
    ),
    sessions(
        name="a broken stream is not noticed",
        old="        if worker is not None:\n            self._lose(worker, now)\n",
        breaks="P3: leases of a broken stream wait for the timeout",
    ),
    sessions(
        name="a lost lease is not requeued",
        module="multigpu_master.core.attempts",
        old='            self.lost(lease, f"worker {worker_id} was lost", now)\n',
        new="            pass\n",
        breaks="P7: tasks in the window of a lost worker are in no class",
    ),
    sessions_story(
        name="lost leases are requeued in the wrong order",
        old="        leases.sort(key=lambda x: -x.task.task_id)\n",
    ),
    sessions(
        name="a lost run is not charged",
        module="multigpu_master.core.attempts",
        old="        if lease.running:\n            self._ledger.counters",
        new="        if False:\n            self._ledger.counters",
        breaks="P4: a task that kills its workers goes on to the next",
    ),
    sessions(
        name="a lost window is charged",
        module="multigpu_master.core.attempts",
        old="        if lease.running:\n            self._ledger.counters",
        new="        if True:\n            self._ledger.counters",
        breaks="P4: tasks that never ran become dead letters",
    ),
    sessions(
        name="an old watch ends a new session",
        old="            if worker.session != session:\n                return\n",
        breaks="P3: the watch of a session that is over declares the next one lost",
        seeds=2000,
    ),
    sessions(
        name="a master that was away blames the workers",
        old="            elif not suspected or now > due_s + grace_s:\n",
        new="            elif False:\n",
        breaks="P3: a stall of the master ends every session",
        seeds=1000,
    ),
    sessions_story(
        name="a second look that is late counts",
        old="            elif not suspected or now > due_s + grace_s:\n",
        new="            elif not suspected:\n",
        breaks="P3: a stall of the master ends every session",
    ),
    sessions(
        name="a worker is given up at the first suspicion",
        old="            if now < suspect_at_s:\n",
        new="            if now < suspect_at_s - self._grace_s:\n",
        breaks="P3: a worker is lost before its timeout",
    ),
    sessions_story(
        name="a failed attempt is adopted",
        old="        if extra is not None and held.attempt <= extra.failed_attempt:\n            return False",
        new="        if False:\n            return False",
        breaks="P4: an attempt that failed is taken off the count when its lease comes back and is lost",
    ),
    sessions(
        name="a worker's silence is checked only once",
        old="                self._watch_silence(worker, suspect_at_s)\n",
        new="                pass\n",
        breaks="P3: a worker that falls silent later is never missed",
    ),
    sessions(
        name="a silent session is not ended",
        old='self._outbox.add(ev.EndSession(session, f"nothing',
        new='_ = (ev.EndSession(session, f"nothing',
    ),
)
