"""Mutations of what workers may say: sessions.py."""

from functools import partial

from tests.mutations.mutation import Mutation

sessions = partial(Mutation, module="multigpu_master.core.sessions")

SESSIONS = (
    sessions(
        name="takeover not fenced",
        old="            self._lose(worker, now, kept={h.lease_id for h in event.leases})\n",
        new="",
        breaks="P2: the old session of a worker lives on beside the new one",
    ),
    sessions(
        name="takeover not told",
        old='ledger.out.append(ev.EndSession(worker.session, "the worker began',
        new='_ = (ev.EndSession(worker.session, "the worker began',
        breaks="the process whose session was taken over works on",
    ),
    sessions(
        name="lease not in hello",
        old="kept={h.lease_id for h in event.leases}",
        new="kept=()",
        breaks="a reconnect costs a running task its attempt",
        seeds=5000,
    ),
    sessions(
        name="a takeover keeps too much",
        old="leases = [x for x in worker.leases.values() if x.lease_id not in kept]",
        new="leases = [x for x in worker.leases.values() if not kept and x.lease_id not in kept]",
        breaks="leases that the new session does not have are never taken back",
    ),
    sessions(
        name="a kept lease keeps its old frame",
        old="                lease.frame = 0\n",
        new="",
        breaks="a lease of the last session counts as on its way in this one",
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
        name="an adopted task stays in its lane",
        old="            ledger.lanes.leave(ledger.lane_for(task))\n",
        new="            pass\n",
        breaks="the lane counts a task that is leased",
    ),
    sessions(
        name="an adopted task pauses on",
        old="            extra.not_before_s = 0.0\n",
        new="            pass\n",
        breaks="an adopted task that is lost again waits for a pause that has no end",
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
        old="        task.attempts = max(task.attempts, held.attempt)\n",
        new="",
        breaks="P4: a task has more attempts than it may after a restart of the master",
    ),
    sessions(
        name="revoke not sent to a hello",
        old="        if revoked:\n",
        new="        if False:\n",
        breaks="a worker goes on with a lease that no longer counts",
    ),
    sessions(
        name="a drain is not told to a new session",
        old="        if worker.draining:\n            ledger.out.append(ev.Desire(",
        new="        if worker.draining:\n            _ = (ev.Desire(",
        breaks="a worker that reconnects while it is drained does not know",
    ),
    sessions(
        name="a drain that is over lets go on",
        old="            if worker.drain_deadline_s is not None and worker.drain_deadline_s <= now:\n",
        new="            if False:\n",
        breaks="leases that come back after the deadline of the drain stay",
        checker="stories",
        seeds=1,
    ),
    sessions(
        name="silence not watched",
        old="        self._watch_silence(worker, now + self._suspect_s)\n",
        new="",
        breaks="P3: a silent worker keeps its leases",
    ),
    sessions(
        name="an awaited worker that is back is awaited",
        old="        ledger.expected.pop(worker.worker_id, None)\n",
        new="",
        breaks="the fleet idles although everybody is back",
    ),
    sessions(
        name="one worker back is enough",
        old="        if not ledger.expected:\n",
        new="        if True:\n",
        breaks="a new master runs what the second worker is about to bring back",
    ),
    sessions(
        name="a new worker is not remembered",
        old="        ledger.out.append(ev.WorkerChanged(worker, remember=True))\n\n    def _adopt",
        new="        ledger.out.append(ev.WorkerChanged(worker))\n\n    def _adopt",
        breaks="the next master does not wait for the worker",
    ),
    sessions(
        name="what runs is not noted",
        old="        lease.running = held.running\n",
        new="",
        breaks="P4: a task that kills its workers is never charged",
    ),
    sessions(
        name="a run begins with every heartbeat",
        old="        if held.running and not lease.running:\n",
        new="        if held.running:\n",
        breaks="a run timeout never comes",
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
        old="        ledger.fleet.heard(worker, event.models, event.last_frame, now)\n",
        new="",
        breaks="tasks wait for the loading of models that are loaded",
    ),
    sessions(
        name="a stopping worker gets work",
        old="            worker.stopping = event.stopping\n",
        new="",
        breaks="a worker that leaves is given work",
    ),
    sessions(
        name="a stopping worker keeps its keys",
        old="            ledger.fleet.members_changed(worker)\n",
        new="            pass\n",
        breaks="pinned tasks wait for a worker that leaves",
    ),
    sessions(
        name="loading for ever",
        old="            ledger.fleet.settled_down(worker)\n",
        new="            pass\n",
        breaks="a model that was unloaded counts as loaded",
    ),
    sessions(
        name="a heartbeat leaves the ranking as it was",
        old="        ledger.fleet.touch(worker)\n        ledger.freed[worker] = None\n        held:",
        new="        ledger.freed[worker] = None\n        held:",
        breaks="strategies go by old telemetry",
    ),
    sessions(
        name="a heartbeat frees nothing",
        old="        ledger.fleet.touch(worker)\n        ledger.freed[worker] = None\n        held:",
        new="        ledger.fleet.touch(worker)\n        held:",
        breaks="tasks wait although memory is free again",
    ),
    sessions(
        name="revoke not sent to a heartbeat",
        old="        if unknown:\n",
        new="        if False:\n",
        breaks="a worker goes on with a lease that no longer counts",
        seeds=5000,
    ),
    sessions(
        name="a lost lease is never missed",
        old="        if len(worker.leases) > len(held):\n",
        new="        if False:\n",
        breaks="P7: a lease that its worker has lost is never given to another",
        checker="stories",
        seeds=1,
    ),
    sessions(
        name="a lease on its way is taken for lost",
        old="x.lease_id not in held and x.frame <= event.last_frame]",
        new="x.lease_id not in held]",
        breaks="a lease is taken back before its worker could see it",
    ),
    sessions(
        name="the last frame's leases are not missed",
        old="x.frame <= event.last_frame]",
        new="x.frame < event.last_frame]",
        breaks="P7: a lost lease is missed only after the next dispatch",
        checker="stories",
        seeds=1,
    ),
    sessions(
        name="stale report accepted",
        old="            lease = pop(lease_id, None)\n",
        new=(
            "            lease = next((w.leases.pop(lease_id) for w in self._ledger.fleet.workers.values()\n"
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
            "            lease = next((w.leases.pop(failure.lease_id) for w in ledger.fleet.workers.values()\n"
            "                          if failure.lease_id in w.leases), None)\n"
        ),
        breaks="P2: a failure counts whoever holds the lease",
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
        breaks="results are lost",
    ),
    sessions(
        name="stale reports free nothing",
        old="        ledger.freed[worker] = None  # its window may have grown",
        new="        # its window may have grown",
        breaks="tasks wait although the window has grown",
        seeds=5000,
    ),
    sessions(
        name="reports leave the ranking as it was",
        old="spec.model), now)\n        ledger.fleet.touch(worker)\n",
        new="spec.model), now)\n",
        breaks="strategies go by what the worker held before",
    ),
    sessions(
        name="partial index repeated",
        old="            if partial.index < len(extra.partials):\n",
        new="            if False:\n",
        breaks="P9: a partial output that is sent again counts twice",
    ),
    sessions(
        name="a gap in the partial outputs",
        old="            if partial.index > len(extra.partials):\n",
        new="            if False:\n",
        breaks="P9: outputs are delivered with a gap",
        checker="stories",
        seeds=1,
    ),
    sessions(
        name="partial outputs of the fenced",
        old="            lease = worker.leases.get(partial.lease_id)\n",
        new=(
            "            lease = next((w.leases[partial.lease_id] for w in ledger.fleet.workers.values()\n"
            "                          if partial.lease_id in w.leases), None)\n"
        ),
        breaks="P2: outputs count whoever holds the lease",
    ),
    sessions(
        name="a broken stream is not noticed",
        old="        if worker is not None:\n            self._lose(worker, now)\n",
        new="",
        breaks="P3: leases of a broken stream wait for the timeout",
    ),
    sessions(
        name="forget a requeue",
        old='                self._attempts.lost(lease, f"worker {worker.worker_id} was lost", now)\n',
        new="                pass\n",
        breaks="P7: tasks in the window of a lost worker are in no lane",
    ),
    sessions(
        name="the lost go back in the wrong order",
        old="        leases.sort(key=lambda x: -x.task.task_id)\n",
        new="",
        breaks="many tasks of a lost worker come back out of order",
        checker="stories",
        seeds=1,
    ),
    sessions(
        name="a lost run is not charged",
        old="            if lease.running:\n                message",
        new="            if False:\n                message",
        breaks="P4: a task that kills its workers goes on to the next",
    ),
    sessions(
        name="a lost window is charged",
        old="            if lease.running:\n                message",
        new="            if True:\n                message",
        breaks="P4: tasks that never ran become dead letters",
    ),
    sessions(
        name="an old watch ends a new session",
        old="            if worker.session != session:\n                return\n",
        new="",
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
    sessions(
        name="a second look that is late counts",
        old="            elif not suspected or now > due_s + grace_s:\n",
        new="            elif not suspected:\n",
        breaks="P3: a stall of the master ends every session",
        checker="stories",
        seeds=1,
    ),
    sessions(
        name="a worker is given up at the first suspicion",
        old="            if now < suspect_at_s:\n",
        new="            if now < suspect_at_s - self._grace_s:\n",
        breaks="P3: a worker is lost before its timeout",
    ),
    sessions(
        name="a failure that was counted comes back",
        old="        if extra is not None and held.attempt <= extra.failed_attempt:\n            return False",
        new="        if False:\n            return False",
        breaks="P4: an attempt that failed is taken off the count when its lease comes back and is lost",
        checker="stories",
        seeds=1,
    ),
    sessions(
        name="a watch looks once",
        old="                self._watch_silence(worker, suspect_at_s)\n",
        new="                pass\n",
        breaks="P3: a worker that falls silent later is never missed",
    ),
    sessions(
        name="the end of a silent session is not told",
        old='self._ledger.out.append(ev.EndSession(session, f"nothing',
        new='_ = (ev.EndSession(session, f"nothing',
        breaks="a worker that thaws believes in its session",
    ),
)
