"""The workers' events: sessions that begin, speak, fall silent and end.

A report counts only if its session's worker holds that lease (`worker.leases.pop`). That is the one fence: whatever
takes a task away from a worker takes the lease out of that dict, and a late word finds nothing.
"""

from collections.abc import Container
from dataclasses import replace

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Outcome, OutcomeState, Task, TaskError, Worker
from multigpu_master.core.placement.recall import Recalls
from multigpu_master.core.workers.load_reservations import Turns
from multigpu_master.core.workers.quarantine import Quarantine

PARTIALS_BYTES_MAX = 16 << 20
PARTIAL_OVERHEAD_BYTES = 64  # that each of them counts for, besides its data
# A timer that fires later than this (or a quarter of the session's timeout) shows that the master itself was away.
LATE_S = 1.0
# What a worker says of a lease whose model had to make room for another, and how long the task waits then.
MAKES_ROOM, MAKES_ROOM_S = "ModelMakesRoom", 0.1
# What it says of a lease that was recalled.
RECALLED = "Recalled"


class Sessions:
    """See the module."""

    def __init__(
        self, ledger: Ledger, attempts: Attempts, quarantine: Quarantine, turns: Turns, recalls: Recalls
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._recalls = recalls
        self._attempts = attempts
        self._quarantine = quarantine
        self._turns = turns
        timeout_s = ledger.limits.session_timeout_s
        self._grace_s = min(LATE_S, timeout_s / 4)
        self._suspect_s = timeout_s - self._grace_s  # a silence of so long is looked into

    # --- a session begins --------------------------------------------------------------------------------------------

    def hello(self, event: ev.Hello, now: float) -> None:
        ledger, fleet = self._ledger, self._ledger.fleet
        worker = fleet.workers.get(event.info.worker_id)
        ours = [h for h in event.leases if h.proven and max(h.lease_id, h.task_id) < event.ids_end]
        ours.sort(key=lambda h: -h.attempt)  # of several attempts of a task the last one counts
        if worker is not None and worker.session:
            ledger.out.append(ev.EndSession(worker.session, "the worker began another session", taken_over=True))
            self._lose(worker, now, kept={h.lease_id for h in ours})
        worker = fleet.register(event.info)
        ledger.out.extend(ev.WorkerChanged(gone, remember=True, gone=True) for gone in fleet.forgotten)
        fleet.forgotten.clear()
        fleet.new_session(worker, event.session, now)
        adopted = [lease.lease_id for lease in worker.leases.values()]
        for held in ours:
            lease = worker.leases.get(held.lease_id)
            if lease is not None:
                lease.frame = 0
                self._observe(lease, held, now)
            elif self._adopt(worker, held, now):
                adopted.append(held.lease_id)
        self._recalls.granted(worker, now)
        revoked = [h.lease_id for h in event.leases if h.lease_id not in worker.leases]
        ledger.out.append(ev.Welcome(event.session, adopted))
        if revoked:
            ledger.out.append(ev.Revoke(event.session, revoked, "the lease no longer counts"))
        if worker.draining:
            ledger.out.append(ev.Desire(event.session, draining=True, drain_deadline_s=worker.drain_deadline_s))
            if worker.drain_deadline_s is not None and worker.drain_deadline_s <= now:
                self._attempts.take_back_all(worker, now)
        elif worker.checks_asked or worker.residency.pins or worker.residency.unwanted:
            ledger.out.append(ev.Desire(event.session, draining=False))
        self._watch_silence(worker, now + self._suspect_s)
        ledger.expected.pop(worker.worker_id, None)
        if not ledger.expected:
            ledger.hold_until_s = min(ledger.hold_until_s, now)
        ledger.out.append(ev.WorkerChanged(worker, remember=True))

    def _adopt(self, worker: Worker, held: ev.HeldLease, now: float) -> bool:
        """Takes back a lease of an earlier session, if its task still waits for one."""
        ledger = self._ledger
        task = ledger.tasks.get(held.task_id)
        if task is None or task.outcome is not None or task.lease is not None:
            return False
        extra = task.extra
        if extra is not None and held.attempt <= extra.failed_attempt:
            return False  # its report has arrived, and the attempt is charged: it must not end once more
        if task.waiting:
            ledger.lanes.leave(ledger.lane_for(task), task)
        if extra is not None:
            extra.not_before_s = 0.0
            extra.losses = max(0, extra.losses - 1)  # it was not lost after all
        task.attempts = max(task.attempts, held.attempt)
        lease = Lease(held.lease_id, task, worker, held.attempt, now, 0, 0.0)
        ledger.book(lease, now)
        self._observe(lease, held, now)
        return True

    def _observe(self, lease: Lease, held: ev.HeldLease, now: float) -> None:
        if held.running and not lease.running:
            lease.run_s = now
        lease.running = held.running
        lease.fraction, lease.steps, lease.note = held.fraction, held.steps, held.note
        if held.checkpoint:
            lease.task.more().checkpoint = held.checkpoint

    # --- it speaks ---------------------------------------------------------------------------------------------------

    def heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        ledger = self._ledger
        worker = ledger.fleet.sessions.get(event.session)
        if worker is None:
            return
        worker.heard_s = now
        worker.telemetry = event.telemetry
        worker.embedding_cache = event.embedding_cache
        worker.mps, worker.handlers = event.mps, event.handlers
        # A quarantine may be from before this master, and over; a breaker may have been reset since the last session.
        if event.health != worker.health or worker.quarantined or not event.health.fit:
            self._quarantine.heard(worker, event.health, now)
        if not worker.leases and worker.loading:
            ledger.fleet.settled_down(worker)
        if event.catalog is not None:
            self._offers(worker, event.catalog)
        ledger.fleet.heard(worker, event.models, event.last_frame, now)
        if event.stopping != worker.stopping:
            worker.stopping = event.stopping
            ledger.fleet.members_changed(worker)
        self._models(worker)
        ledger.fleet.touch(worker)
        ledger.freed[worker] = None
        held: dict[int, None] = {}
        unknown = []
        for h in event.leases:
            lease = worker.leases.get(h.lease_id)
            if lease is None:
                unknown.append(h.lease_id)
            else:
                held[h.lease_id] = None
                self._observe(lease, h, now)
        if unknown:
            ledger.out.append(ev.Revoke(event.session, unknown, "the lease no longer counts"))
        if len(worker.leases) > len(held):
            gone = [x for x in worker.leases.values() if x.lease_id not in held and x.frame <= event.last_frame]
            for lease in reversed(gone):
                self._attempts.take_back(lease, None, now)
        worker.occupied = event.occupied_slots
        if worker.occupied:
            self._recalls.granted(worker, now)
        ledger.out.append(ev.WorkerChanged(worker))

    def _offers(self, worker: Worker, catalog: ev.Catalog) -> None:
        """The worker offers something else than it did."""
        info = worker.info
        if (catalog.capabilities, catalog.models) == (info.capabilities, info.models):
            return
        worker.info = replace(info, capabilities=catalog.capabilities, models=catalog.models)
        self._ledger.fleet.offered(worker)
        if worker.residency.pins:  # their ids may be others now
            self._ledger.out.append(desire(worker))
        self._ledger.out.append(ev.WorkerChanged(worker, remember=True))

    def _models(self, worker: Worker) -> None:
        """What follows from what the worker has said of its models."""
        if worker.residency.unwanted and worker.residency.unloaded():
            self._ledger.fleet.models_changed(worker)
            self._ledger.out.append(desire(worker))
        self._turns.look_at(worker)

    def reports(self, event: ev.Reports, now: float) -> None:
        ledger = self._ledger
        worker = ledger.fleet.sessions.get(event.session)
        if worker is None:
            ledger.counters.stale_reports += len(event.succeeded) + len(event.failures)
            return
        worker.heard_s = now
        succeeded = self._succeeded(worker, event, now)
        failed = self._failed(worker, event, now)
        worker.succeeded += len(succeeded)
        worker.failed += failed
        ledger.fleet.paced(worker, now, len(succeeded) + failed)
        ledger.freed[worker] = None  # its window may have grown, even if every report was stale
        if succeeded and event.start_s and event.finish_s > event.start_s:
            spec = succeeded[0].spec
            units = sum([task.units for task in succeeded])
            ledger.fleet.learned(worker, (spec.kind, spec.model), len(succeeded), units, event.finish_s - event.start_s)
        if succeeded and worker.residency.began_s:
            spec = succeeded[0].spec
            self._turns.used(worker, ledger.fleet.model_id(worker, spec.kind, spec.model), now)
        ledger.fleet.touch(worker)

    def _succeeded(self, worker: Worker, event: ev.Reports, now: float) -> list[Task]:
        """Settles the tasks whose lease the worker still holds."""
        # A worker's clock may be wrong, and how long an outcome is kept hangs on when it ended.
        finish_s, start_s, content_type = min(event.finish_s or now, now), event.start_s, event.content_type
        worker_id, device_id = worker.info.worker_id, worker.info.device_id
        leases = []
        pop = worker.leases.pop
        for lease_id, result in zip(event.succeeded, event.results, strict=True):
            lease = pop(lease_id, None)
            if lease is not None:
                leases.append(lease)
                ended_s, dispatch_s, began_s = finish_s, lease.dispatch_s, start_s
                if not dispatch_s <= began_s <= ended_s:
                    ended_s = max(finish_s, dispatch_s)
                    dispatch_s, began_s = lease.stages(start_s, ended_s)
                lease.task.outcome = Outcome(
                    OutcomeState.SUCCEEDED, ended_s, result, content_type, None,
                    dispatch_s, began_s, worker_id, device_id,
                )  # fmt: skip
        if event.energy:
            energy = dict(zip(event.succeeded, event.energy, strict=True))
            for lease in leases:
                lease.task.outcome.energy = energy[lease.lease_id]  # type: ignore[union-attr]  # it was set above
        self._ledger.counters.stale_reports += len(event.succeeded) - len(leases)
        return self._ledger.succeed(worker, leases)

    def _failed(self, worker: Worker, event: ev.Reports, now: float) -> int:
        """Takes back the leases of tasks that did not succeed. Returns how many were attempts."""
        ledger, attempts, finish_s = self._ledger, 0, min(event.finish_s or now, now)
        for failure in event.failures:
            lease = worker.leases.pop(failure.lease_id, None)
            if lease is None:
                ledger.counters.stale_reports += 1
                continue
            ledger.release(lease)
            if failure.returned and failure.error.type == MAKES_ROOM:
                self._attempts.spare(lease, now, MAKES_ROOM_S)
            elif failure.returned and failure.error.type == RECALLED and lease.recalled:
                self._attempts.spare(lease, now, 0.0)
            elif failure.returned:
                ledger.counters.requeued += 1
                message = f"worker {worker.worker_id} returned the task"
                self._attempts.lost(lease, message, now, sick=not worker.health.fit)
            else:
                attempts += 1
                lease.task.more().failed_attempt = lease.attempt
                condemned = failure.broke_engine and self._quarantine.broke_engine(lease, now)
                ended_s = max(finish_s, lease.dispatch_s)
                self._attempts.failed(lease, failure.error, event.start_s, ended_s, now, condemned=condemned)
        return attempts

    def partials(self, event: ev.Partials, now: float) -> None:
        ledger = self._ledger
        worker = ledger.fleet.sessions.get(event.session)
        if worker is None:
            return
        worker.heard_s = now
        fresh: dict[Task, ev.Forward] = {}
        for partial in event.partials:
            lease = worker.leases.get(partial.lease_id)
            if lease is None:
                continue
            task = lease.task
            extra = task.more()
            if partial.index < len(extra.partials):
                continue  # repeated after a reconnect
            if partial.index > len(extra.partials):
                # The attempt goes on from outputs that died with the last master: only another one can fill the gap.
                self._attempts.take_back(lease, None, now)
                continue
            size = len(partial.data) + len(partial.content_type) + PARTIAL_OVERHEAD_BYTES
            error = None
            if extra.partials_bytes + size > PARTIALS_BYTES_MAX:
                message = f"partial outputs exceed {PARTIALS_BYTES_MAX} bytes, with {PARTIAL_OVERHEAD_BYTES} for each"
                error = TaskError("ResultTooLarge", message, retryable=False)
            elif ledger.unsettled_bytes + size > ledger.limits.bytes_max:
                message = f"payloads and partial outputs exceed the master's limit of {ledger.limits.bytes_max} bytes"
                error = TaskError("ResourceExhausted", f"{message} (queue_bytes_max)")
            if error is not None:
                self._attempts.take_back(lease, error, now)
                continue
            extra.partials_bytes += size
            ledger.unsettled_bytes += size
            extra.partials.append(partial.data)
            extra.partial_content_types.append(partial.content_type)
            if task.streams:
                forward = fresh.setdefault(task, ev.Forward(task))
                forward.partials.append((partial.index, partial.data, partial.content_type))
        ledger.out.extend(fresh.values())

    # --- it ends -----------------------------------------------------------------------------------------------------

    def closed(self, event: ev.SessionClosed, now: float) -> None:
        worker = self._ledger.fleet.sessions.get(event.session)
        if worker is not None:
            self._lose(worker, now)

    def _lose(self, worker: Worker, now: float, kept: Container[int] = ()) -> None:
        """The master stopped hearing a worker: its tasks go back to the queue at once, the youngest first, so that each
        finds its place at the front. Kept leases go on in its next session, which has already begun.
        """
        ledger = self._ledger
        leases = [x for x in worker.leases.values() if x.lease_id not in kept]
        leases.sort(key=lambda x: -x.task.task_id)
        for lease in leases:
            del worker.leases[lease.lease_id]
        for lease in leases:
            ledger.release(lease)
        ledger.fleet.close_session(worker)
        worker.heard_s = now
        ledger.counters.requeued += len(leases)
        for lease in leases:
            if lease.running:
                message = f"worker {worker.worker_id} was lost while it ran the task"
                self._attempts.failed(lease, TaskError("WorkerLost", message), lease.run_s, now, now)
            else:
                self._attempts.lost(lease, f"worker {worker.worker_id} was lost", now)
        ledger.out.append(ev.WorkerChanged(worker, remember=True))

    def _watch_silence(self, worker: Worker, due_s: float, *, suspected: bool = False) -> None:
        """Looks at due_s whether the worker still speaks. It is lost when two looks in time found it silent: a single
        one may be the first thing that the master does after it was away, with all that was said meanwhile unread.
        """
        session, grace_s = worker.session, self._grace_s

        def check(now: float) -> None:
            if worker.session != session:
                return
            suspect_at_s = worker.heard_s + self._suspect_s
            if now < suspect_at_s:
                self._watch_silence(worker, suspect_at_s)
            elif not suspected or now > due_s + grace_s:
                self._watch_silence(worker, now + grace_s, suspected=True)
            else:
                self._ledger.out.append(ev.EndSession(session, f"nothing heard for {now - worker.heard_s:.1f} s"))
                self._lose(worker, now)

        self._ledger.timers.at(due_s, check)


def desire(worker: Worker) -> ev.Desire:
    """All that is wanted of a connected worker, as it stands."""
    return ev.Desire(worker.session, worker.draining, worker.drain_deadline_s if worker.draining else None)
