"""Handles the events of operators (cordon, drain, forget, models, strategies, queues), and registers the workers that
the journal knows when a master starts. The caller has checked the names in the events.
"""

from dataclasses import replace

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.events import Commands
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Cordon, Worker
from multigpu_master.core.restart import RecoveryHold
from multigpu_master.core.timers import Timers
from multigpu_master.core.workers.fleet import Fleet


class Operators:
    def __init__(
        self, ledger: Ledger, fleet: Fleet, timers: Timers, commands: Commands, hold: RecoveryHold, attempts: Attempts
    ) -> None:
        self._ledger, self._fleet, self._timers, self._commands = ledger, fleet, timers, commands
        self._hold = hold
        self._attempts = attempts
        self._workers = fleet.workers

    # --- workers -----------------------------------------------------------------------------------------------------

    def register(self, event: ev.RegisterWorker, now: float) -> None:
        worker = self._fleet.register(event.info)
        worker.cordon = event.cordon
        self._interrupt_at_drain_deadline(worker)
        worker.quarantined, worker.requested_check = event.quarantined, event.requested_check
        worker.check_at_once = event.check_at_once
        worker.residency.operator_pins = dict.fromkeys(event.pinned_models)
        if event.expected:
            # The heard_s of the other workers stays 0.0, so that evict_lost_worker_for() deletes those first.
            worker.heard_s = now
            self._hold.expect(worker.worker_id)

    def cordon(self, event: ev.Cordon, now: float) -> None:
        worker = self._workers[event.worker_id]
        worker.cordon = replace(worker.cordon or Cordon(""), reason=event.reason)
        self._changed(worker)

    def uncordon(self, event: ev.Uncordon, now: float) -> None:
        worker = self._workers[event.worker_id]
        was_draining, worker.cordon = worker.draining, None
        if was_draining:
            self._commands.send_desired_state(worker)
        self._changed(worker)

    def drain(self, event: ev.Drain, now: float) -> None:
        worker, deadline_s = self._workers[event.worker_id], event.deadline_s
        worker.cordon = Cordon("drained", draining=True, drain_deadline_s=deadline_s)
        self._commands.send_desired_state(worker)
        self._interrupt_at_drain_deadline(worker)
        self._changed(worker)

    def _interrupt_at_drain_deadline(self, worker: Worker) -> None:
        deadline_s = worker.drain_deadline_s

        def interrupt(now: float) -> None:
            # A later drain or uncordon may have replaced this drain.
            if worker.draining and worker.drain_deadline_s == deadline_s:
                self._attempts.interrupt_all(worker, now)

        if deadline_s is not None:
            self._timers.at(deadline_s, interrupt)

    def forget(self, event: ev.Forget, now: float) -> None:
        worker = self._workers[event.worker_id]
        assert not worker.session, "a connected worker is not forgotten"
        self._fleet.forget(worker)
        self._hold.stop_expecting(event.worker_id, now)
        self._commands.worker_changed(worker, save=True, gone=True)

    def _changed(self, worker: Worker) -> None:
        self._fleet.eligibility_changed(worker)
        self._commands.worker_changed(worker, save=True)

    # --- models ------------------------------------------------------------------------------------------------------

    def load_model(self, event: ev.LoadModel, now: float) -> None:
        worker = self._workers[event.worker_id]
        worker.residency.pin(event.model)
        self._models_changed(worker)

    def unload_model(self, event: ev.UnloadModel, now: float) -> None:
        worker = self._workers[event.worker_id]
        worker.residency.unload(event.model)
        self._models_changed(worker)

    def _models_changed(self, worker: Worker) -> None:
        self._fleet.models_changed(worker)
        self._commands.send_desired_state(worker)
        self._commands.worker_changed(worker, save=True)

    # --- rules -------------------------------------------------------------------------------------------------------

    def set_strategy(self, event: ev.SetStrategy, now: float) -> None:
        ledger = self._ledger
        assert event.name in ledger.strategies or (event.queue and not event.name), "names are checked before"
        if event.queue:
            ledger.queue(event.queue).strategy = event.name
        else:
            ledger.strategy = event.name
        self._ledger.classes.regroup(event.queue)

    def configure_queue(self, event: ev.ConfigureQueue, now: float) -> None:
        queue = self._ledger.queue(event.queue)
        if event.paused is not None:
            queue.paused = event.paused
            self._ledger.classes.regroup(event.queue)
        if event.tasks_max is not None:
            queue.tasks_max = event.tasks_max
        if event.bytes_max is not None:
            queue.bytes_max = event.bytes_max
