"""Handles the workers' events: sessions that begin, report, fall silent and end.

A report on a lease counts only if the session's worker holds the lease (`worker.leases`). No other check is necessary:
a released lease is not in `worker.leases`, so a late report finds none.
"""

from collections.abc import Container, Iterable
from dataclasses import replace

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.events import Commands
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import (
    LEASE_IDS_KEPT,
    Energy,
    Extra,
    Gang,
    Lease,
    Outcome,
    OutcomeState,
    Task,
    TaskError,
    Worker,
    sum_energy,
)
from multigpu_master.core.placement.gangs import Gangs
from multigpu_master.core.placement.recall import Recalls
from multigpu_master.core.restart import RecoveryHold
from multigpu_master.core.timers import Timers
from multigpu_master.core.usage import Usage
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.load_reservations import LoadReservations
from multigpu_master.core.workers.quarantine import Quarantine

PARTIALS_BYTES_MAX = 16 << 20
# Limit of a result with the task's partial outputs and log: an outcome must fit into one message of 64 MiB.
OUTCOME_BYTES_MAX = 63 << 20
PARTIAL_OVERHEAD_BYTES = 64  # added to the size of each partial output
# The error types of leases that workers return without charge: the model had to make room for another model; the master
# could not read the payload.
MAKES_ROOM, PAYLOAD_NOT_READABLE = "ModelMakesRoom", "PayloadNotReadable"
# The pause before the tasks of such leases are requeued.
REQUEUE_S = 0.1
# The error type of a lease that its worker returned because the master recalled it.
RECALLED = "Recalled"
# The reason for revoking a lease that its worker should not hold.
STALE = "the lease no longer counts"


class Sessions:
    def __init__(
        self, ledger: Ledger, fleet: Fleet, timers: Timers, commands: Commands, hold: RecoveryHold, attempts: Attempts,
        quarantine: Quarantine, reservations: LoadReservations, recalls: Recalls, gangs: Gangs, usage: Usage,
    ) -> None:  # fmt: skip
        self._ledger, self._fleet, self._timers, self._commands = ledger, fleet, timers, commands
        self._hold = hold
        self._attempts = attempts
        self._quarantine = quarantine
        self._reservations = reservations
        self._recalls = recalls
        self._gangs = gangs
        self._usage = usage
        self._grace_s = ledger.limits.timer_late_s
        # After this silence a worker is suspected to be lost.
        self._suspect_s = ledger.limits.session_timeout_s - self._grace_s

    # --- a session begins --------------------------------------------------------------------------------------------

    def hello(self, event: ev.Hello, now: float) -> None:
        fleet, commands = self._fleet, self._commands
        worker = fleet.workers.get(event.info.worker_id)
        # An id >= ids_end was issued by another journal (see ev.Hello): a task_id or a lease_id, from one sequence.
        ours = [h for h in event.leases if h.granted_by_this_journal and max(h.lease_id, h.task_id) < event.ids_end]
        ours.sort(key=lambda h: -h.attempt)  # of several attempts of a task the last one counts
        if worker is not None and worker.session:
            commands.add(ev.EndSession(worker.session, "the worker began another session", taken_over=True))
            self._lose(worker, now, kept={h.lease_id for h in ours})
        if (gone := fleet.evict_lost_worker_for(event.info.worker_id, event.token_id)) is not None:
            commands.worker_changed(gone, save=True, gone=True)
        worker = fleet.register(event.info)
        worker.token_id = event.token_id
        fleet.open_session(worker, event.session, now)
        adopted = [lease.lease_id for lease in worker.leases.values()]
        runs_rank = any(lease.gang is not None for lease in worker.leases.values())
        for held in ours:
            lease = worker.leases.get(held.lease_id)
            if lease is not None:
                lease.dispatch_number = 0  # no dispatch of the new session granted it, and the worker has it
                self._observe(lease, held, now)
            elif not runs_rank and self._adopt(worker, held, now):
                adopted.append(held.lease_id)
        self._recalls.watch(worker, now)
        revoked = [h.lease_id for h in event.leases if h.lease_id not in worker.leases]
        commands.add(ev.Welcome(event.session, adopted))
        commands.revoke(event.session, revoked, STALE)
        if worker.draining or worker.requested_check or worker.residency.operator_pins or worker.residency.unwanted:
            commands.send_desired_state(worker)
        if worker.drain_deadline_s is not None and worker.drain_deadline_s <= now:
            self._attempts.interrupt_all(worker, now)
        self._watch_silence(worker, now + self._suspect_s)
        self._hold.stop_expecting(worker.worker_id, now)
        commands.worker_changed(worker, save=True)

    def _adopt(self, worker: Worker, held: ev.HeldLease, now: float) -> bool:
        """Takes over a lease of an earlier session. Returns False, and does nothing, if the task is unknown, settled or
        leased, or if the lease is over: its end was reported, or the task is a dead letter that was requeued since. For
        a gang, returns False, and keeps only rank 0's checkpoint and the fact that an attempt has begun.
        """
        task = self._ledger.tasks.get(held.task_id)
        if task is None or task.outcome is not None or task.lease is not None:
            return False
        extra = task.extra
        if extra is not None and _is_over(extra, held):
            return False  # its report has counted already, and must not count twice
        if task.spec.world_size > 1:  # it runs again as a whole, from the checkpoint of rank 0: other ranks have none
            if held.checkpoint:
                self._ledger.keep_checkpoint(task, held.checkpoint)
            if held.running:
                task.ensure_extra().queue_timeout_over = True
            return False
        if task.waiting:
            self._ledger.classes.remove(self._ledger.class_of(task), task)
        if extra is not None:
            extra.not_before_s = 0.0
            self._undo_loss(task, extra, held)
        task.attempts = max(task.attempts, held.attempt)
        lease = Lease(held.lease_id, task, worker, held.attempt, now, 0, 0.0)
        self._ledger.record_lease(lease, now)
        self._observe(lease, held, now)
        return True

    def _undo_loss(self, task: Task, extra: Extra, held: ev.HeldLease) -> None:
        """Undoes what was recorded when the lease was lost with its session: its log, the loss, the ended attempt."""
        if held.log:  # held.log repeats the part of the log that the task has kept
            self._ledger.drop_log(task, held.lease_id)
        if extra.lost_lease_id == held.lease_id:
            extra.losses -= 1
            extra.lost_lease_id = 0
        if extra.ended_attempts and extra.ended_attempts[-1].lease_id == held.lease_id:
            extra.ended_attempts = extra.ended_attempts[:-1]
            self._ledger.keep_error(task, None)

    def _observe(self, lease: Lease, held: ev.HeldLease, now: float) -> bool:
        """Applies what the worker reports of a lease that it holds. Returns whether it has kept a checkpoint."""
        if held.running and not lease.running:
            lease.running_since_s = now
        lease.running = held.running
        lease.fraction, lease.steps, lease.note = held.fraction, held.steps, held.note
        if held.log:
            lease.log = held.log
        return bool(held.checkpoint and not lease.rank) and self._ledger.keep_checkpoint(lease.task, held.checkpoint)

    # --- heartbeats --------------------------------------------------------------------------------------------------

    def heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        fleet = self._fleet
        worker = fleet.sessions.get(event.session)
        if worker is None:
            return
        worker.heard_s = now
        worker.telemetry = event.telemetry
        worker.engine = event.engine
        first, worker.health_reported = not worker.health_reported, True
        if (
            first
            or event.health != worker.health
            or worker.quarantined  # perhaps restored from the journal: it may have to end
            or not event.health.fit  # a tripped breaker kept it in service; an operator may have reset the breaker
        ):
            self._quarantine.apply_health(worker, event.health, now, first=first)
        if not worker.leases and worker.residency.granted_without_id:
            fleet.forget_models_of_leases(worker)
        if event.catalog is not None:
            self._replace_catalog(worker, event.catalog)
        fleet.apply_models(worker, event.models, event.last_dispatch_number, now)
        if event.stopping != worker.stopping:
            worker.stopping = event.stopping
            fleet.eligibility_changed(worker)
        if worker.residency.unwanted and worker.residency.forget_unloaded():
            fleet.models_changed(worker)
            self._commands.send_desired_state(worker)
        self._reservations.start_cooldown_timer(worker)
        fleet.room_changed(worker)
        self._reconcile_leases(worker, event, now)
        worker.occupied_slots = event.occupied_slots
        self._recalls.watch(worker, now)
        self._commands.worker_changed(worker)

    def _reconcile_leases(self, worker: Worker, event: ev.Heartbeat, now: float) -> None:
        """Revokes leases in a heartbeat that the worker should not hold. Requeues or ends the tasks of lost leases."""
        held: dict[int, None] = {}
        unknown, saved = [], list[Lease]()
        for h in event.leases:
            lease = worker.leases.get(h.lease_id)
            if lease is None:
                unknown.append(h.lease_id)
            else:
                held[h.lease_id] = None
                if self._observe(lease, h, now):
                    saved.append(lease)
        self._commands.revoke(event.session, unknown, STALE)
        if len(worker.leases) > len(held):
            received = [x for x in worker.leases.values() if x.dispatch_number <= event.last_dispatch_number]
            gone = [x for x in received if x.lease_id not in held]
            for lease in reversed(gone):  # the youngest first: so put_back() passes few older tasks
                self._attempts.revoke_uncharged(lease, f"worker {worker.worker_id} lost the lease", now)
        self._checkpoints_saved(saved, now)

    def _checkpoints_saved(self, leases: Iterable[Lease], now: float) -> None:
        for lease in leases:
            if lease.task.lease is lease:  # else it has ended since, perhaps at an earlier checkpoint of its task
                self._gangs.checkpoint_saved(lease, now)

    def _replace_catalog(self, worker: Worker, catalog: ev.Catalog) -> None:
        """Replaces the capabilities and models that the worker offers, if they changed."""
        info = worker.info
        if (catalog.capabilities, catalog.models) == (info.capabilities, info.models):
            return
        self._fleet.set_info(worker, replace(info, capabilities=catalog.capabilities, models=catalog.models))
        if worker.residency.operator_pins:  # the ids of the pinned models may have changed
            self._commands.send_desired_state(worker)
        self._commands.worker_changed(worker, save=True)

    # --- reports -----------------------------------------------------------------------------------------------------

    def reports(self, event: ev.Reports, now: float) -> None:
        fleet = self._fleet
        worker = fleet.sessions.get(event.session)
        if worker is None:
            self._ledger.counters.stale_reports += len(event.succeeded) + len(event.failures)
            return
        if not event.by_master:
            worker.heard_s = now
        for lease_id, log in event.logs.items():
            if lease_id in worker.leases:
                worker.leases[lease_id].log = log
        if event.results and max(map(len, event.results)) > OUTCOME_BYTES_MAX - PARTIALS_BYTES_MAX:
            event = _without_large_outcomes(worker, event)
        models: Iterable[str] = ()
        if worker.residency.loading_since_s:
            models = dict.fromkeys(worker.leases[x].model for x in event.succeeded if x in worker.leases)
        succeeded, charged = self._succeeded(worker, event, now), self._failed(worker, event, now)
        worker.succeeded += len(succeeded)
        worker.failed += len(charged)
        units, failed_units = sum([task.units for task in succeeded]), sum([task.units for task in charged])
        failed_s = event.device_s * failed_units / max(1, units + failed_units)
        self._usage.add_succeeded(succeeded, event.device_s - failed_s)
        self._usage.add_failed(charged, failed_s)
        if not event.by_master:
            worker.pace.report(worker.info, len(succeeded) + len(charged), now)
        # If some of the reported leases were stale, the run time of the others is unknown.
        if succeeded and len(succeeded) == len(event.succeeded) and 0.0 < event.start_s < event.finish_s:
            spec = succeeded[0].spec
            seconds = event.finish_s - event.start_s
            fleet.record_run(worker, (spec.kind, spec.model), len(succeeded), units, seconds, now)
        for model in models:
            self._reservations.task_succeeded_on(worker, model, now)
        fleet.room_changed(worker)  # its window may have grown, even if every report was stale

    def _succeeded(self, worker: Worker, event: ev.Reports, now: float) -> list[Task]:
        """Settles the tasks reported as succeeded whose leases the worker still holds. Returns these tasks."""
        # The worker's clock may be ahead of the master's: no outcome ends in the future.
        finish_s, start_s, content_type = min(event.finish_s or now, now), event.start_s, event.content_type
        worker_id, device_id = worker.info.worker_id, worker.info.device_id
        leases = []
        stale = 0
        pop = worker.leases.pop
        energy = dict(zip(event.succeeded, event.energy, strict=True)) if event.energy else {}
        for lease_id, result in zip(event.succeeded, event.results, strict=True):
            lease = pop(lease_id, None)
            if lease is None:
                stale += 1
            else:
                leases.append(lease)
                dispatch_s, began_s, ended_s = lease.dispatch_s, start_s, finish_s
                if not dispatch_s <= began_s <= ended_s:
                    dispatch_s, began_s, ended_s = lease.stages(start_s, finish_s)
                outcome = Outcome(
                    OutcomeState.SUCCEEDED, ended_s, result, content_type, None,
                    dispatch_s, began_s, worker_id, device_id,
                )  # fmt: skip
                if lease.gang is None:
                    if energy:
                        outcome.energy = energy[lease_id]
                    lease.task.outcome = outcome
                elif not self._rank_succeeded(lease, lease.gang, outcome, event.device_s, energy.get(lease_id)):
                    leases.pop()
        self._ledger.counters.stale_reports += stale
        return self._ledger.succeed(worker, leases, now)

    def _rank_succeeded(
        self, lease: Lease, gang: Gang, outcome: Outcome, device_s: float, energy: Energy | None
    ) -> bool:
        """Notes the success of a rank. The caller has removed its lease from worker.leases. Returns whether it was the
        last rank: then task.outcome is set (rank 0's, with the energy of all ranks if all were measured), and
        task.lease is this lease.
        """
        gang.succeeded += 1
        if energy is not None:
            gang.energy.append(energy)
        if lease.rank == 0:
            gang.outcome = outcome
            if not lease.running:  # no heartbeat has said so, but the attempt has begun
                lease.running, lease.running_since_s = True, outcome.start_s or outcome.dispatch_s
        if gang.succeeded < len(gang.leases):
            self._fleet.subtract_leases(lease.worker, [lease])
            self._usage.add_rank_s(lease.task, device_s)
            gang.device_s += device_s
            return False
        task, first = lease.task, gang.outcome
        assert first is not None, "rank 0 has succeeded"
        first.finish_s = max(first.finish_s, outcome.finish_s)
        if len(gang.energy) == gang.succeeded:
            first.energy = sum_energy(gang.energy)
            self._usage.add_measured_s(task, gang.device_s)
        lease.log = gang.leases[0].log
        task.outcome, task.lease = first, lease
        return True

    def _failed(self, worker: Worker, event: ev.Reports, now: float) -> list[Task]:
        """Releases the leases of tasks that did not succeed, and requeues or ends these tasks. Returns the tasks whose
        attempts failed, without those of returned leases.
        """
        attempts, charged, finish_s = self._attempts, list[Task](), min(event.finish_s or now, now)
        for failure in event.failures:
            lease = worker.leases.get(failure.lease_id)
            if lease is None:
                self._ledger.counters.stale_reports += 1
                continue
            self._ledger.release(lease)
            if failure.returned:
                extra = lease.task.ensure_extra()
                extra.returned_lease_ids = (*extra.returned_lease_ids[1 - LEASE_IDS_KEPT :], lease.lease_id)
            if failure.returned and failure.error.type in (MAKES_ROOM, PAYLOAD_NOT_READABLE):
                attempts.requeue_uncharged(lease, now, REQUEUE_S)
            elif failure.returned and failure.error.type == RECALLED and lease.recalled_in:
                attempts.requeue_uncharged(lease, now, 0.0)
            elif failure.returned:
                message = f"worker {worker.worker_id} returned the task"
                attempts.lost(lease, message, now, sick=not worker.health.fit)
            else:
                charged.append(lease.task)
                lease.task.ensure_extra().failed_attempt = lease.attempt
                condemned = failure.broke_engine and self._quarantine.broke_engine(lease, now)
                attempts.failed(lease, failure.error, event.start_s, finish_s, now, condemned=condemned)
        return charged

    def partials(self, event: ev.Partials, now: float) -> None:
        """Records partial outputs, and forwards the new ones to the streams that follow their tasks."""
        worker = self._fleet.sessions.get(event.session)
        if worker is None:
            return
        worker.heard_s = now
        fresh: dict[Task, ev.ForwardPartials] = {}
        saved = list[Lease]()
        for partial in event.partials:
            lease = worker.leases.get(partial.lease_id)
            if lease is None or lease.rank:  # of a gang, rank 0 alone has outputs and checkpoints
                continue
            task = lease.task
            known = len(task.ensure_extra().partials)
            if partial.index < known:
                continue  # repeated after a reconnect
            if partial.index > known:
                # Only a new attempt sends the missing outputs.
                why = f"the master lacks earlier partial outputs of the attempt on {worker.worker_id}"
                self._attempts.revoke_uncharged(lease, why, now)
                continue
            size = len(partial.data) + len(partial.content_type) + PARTIAL_OVERHEAD_BYTES
            error = self._exceeded_limit(task, size)
            if error is not None:
                self._attempts.revoke_charged(lease, error, now)
                continue
            self._ledger.add_partial(task, partial.data, partial.content_type, size)
            if partial.checkpoint and self._ledger.keep_checkpoint(task, partial.checkpoint):
                saved.append(lease)
            if task.streams:
                forward = fresh.setdefault(task, ev.ForwardPartials(task))
                forward.partials.append((partial.index, partial.data, partial.content_type))
        for forward in fresh.values():
            self._commands.add(forward)
        self._checkpoints_saved(saved, now)

    def _exceeded_limit(self, task: Task, size: int) -> TaskError | None:
        """Returns why a partial output of this size exceeds a limit; None if it does not."""
        limit = self._ledger.limits.bytes_max
        if task.ensure_extra().outputs_and_log_bytes + size > PARTIALS_BYTES_MAX:
            message = (
                f"the task's partial outputs and log exceed {PARTIALS_BYTES_MAX} bytes (each output counts "
                f"{PARTIAL_OVERHEAD_BYTES} bytes more than its data)"
            )
            return TaskError("ResultTooLarge", message, retryable=False)
        if self._ledger.unsettled_bytes + size > limit:
            message = f"payloads and partial outputs exceed the master's limit of {limit} bytes (queue_bytes_max)"
            return TaskError("ResourceExhausted", message)
        return None

    # --- a session ends ----------------------------------------------------------------------------------------------

    def closed(self, event: ev.SessionClosed, now: float) -> None:
        worker = self._fleet.sessions.get(event.session)
        if worker is not None:
            self._lose(worker, now)

    def _lose(self, worker: Worker, now: float, kept: Container[int] = ()) -> None:
        """Marks the worker as lost. Releases its leases, except those with lease_ids in `kept`, which the worker's next
        session has brought along. Requeues or ends the tasks, the youngest first: so put_back() passes few older tasks.
        """
        leases = [x for x in worker.leases.values() if x.lease_id not in kept]
        leases.sort(key=lambda x: -x.task.task_id)
        for lease in leases:
            self._ledger.release(lease)
        self._fleet.close_session(worker)
        for lease in leases:
            self._attempts.worker_lost(lease, now)
        self._commands.worker_changed(worker, save=True)

    def _watch_silence(self, worker: Worker, due_s: float, *, suspected: bool = False) -> None:
        """Checks at due_s whether the worker has been silent. A worker that one check finds silent is `suspected`. If
        the next check finds it silent, too, it is lost. But a check that is more than _grace_s late is repeated: the
        master was paused, and may not have read yet what the worker has sent meanwhile.
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
                self._commands.add(ev.EndSession(session, f"nothing heard for {now - worker.heard_s:.1f} s"))
                self._lose(worker, now)

        self._timers.at(due_s, check)


def _is_over(extra: Extra, held: ev.HeldLease) -> bool:
    """Whether the end of a lease was reported, or the lease preceded the requeue of the dead letter."""
    if held.attempt <= extra.failed_attempt or held.lease_id in extra.returned_lease_ids:
        return True
    return held.lease_id < extra.first_lease_id


def _without_large_outcomes(worker: Worker, event: ev.Reports) -> ev.Reports:
    """Returns the event, with each success whose outcome is too large changed to a failure."""
    kept: list[int] = []
    failures = [*event.failures]
    for index, (lease_id, result) in enumerate(zip(event.succeeded, event.results, strict=True)):
        lease = worker.leases.get(lease_id)
        extra = lease.task.extra if lease is not None else None
        size = len(result) + (extra.outputs_and_log_bytes if extra is not None else 0)
        if size <= OUTCOME_BYTES_MAX:
            kept.append(index)
            continue
        message = f"the result, partial outputs and log have {size} bytes together; at most {OUTCOME_BYTES_MAX} fit"
        failures.append(ev.Failure(lease_id, TaskError("ResultTooLarge", message, retryable=False)))
    return replace(
        event, failures=failures, succeeded=[event.succeeded[index] for index in kept],
        results=[event.results[index] for index in kept],
        energy=[event.energy[index] for index in kept] if event.energy else (),
    )  # fmt: skip
