"""The operators' events: cordon, drain, forget, strategies, queues."""

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Worker
from multigpu_master.core.workers.sessions import desire


class Operators:
    """See the module. Names are checked before they come here."""

    def __init__(self, ledger: Ledger, attempts: Attempts) -> None:
        self._ledger = ledger
        self._attempts = attempts

    # --- workers -----------------------------------------------------------------------------------------------------

    def register(self, event: ev.RegisterWorker, now: float) -> None:
        worker = self._ledger.fleet.register(event.info)
        worker.cordoned, worker.cordon_reason = event.cordoned, event.cordon_reason
        worker.quarantined, worker.checks_asked = event.quarantined, event.checks_asked
        worker.residency.pins = dict.fromkeys(event.pins)
        worker.heard_s = now
        if event.expected:
            self._ledger.expected[worker.worker_id] = None

    def cordon(self, event: ev.Cordon, now: float) -> None:
        worker = self._ledger.fleet.workers[event.worker_id]
        worker.cordoned, worker.cordon_reason = True, event.reason
        self._changed(worker)

    def uncordon(self, event: ev.Uncordon, now: float) -> None:
        worker = self._ledger.fleet.workers[event.worker_id]
        if worker.draining and worker.session:
            self._ledger.out.append(ev.Desire(worker.session, draining=False))
        worker.cordoned, worker.cordon_reason = False, ""
        worker.draining, worker.drain_deadline_s = False, None
        self._changed(worker)

    def drain(self, event: ev.Drain, now: float) -> None:
        worker, deadline_s = self._ledger.fleet.workers[event.worker_id], event.deadline_s
        worker.cordoned, worker.draining, worker.drain_deadline_s = True, True, deadline_s
        worker.cordon_reason = "drained"
        if worker.session:
            self._ledger.out.append(ev.Desire(worker.session, draining=True, drain_deadline_s=deadline_s))

        def end(now: float) -> None:
            # A later drain, or an uncordon, has overruled this one.
            if worker.draining and worker.drain_deadline_s == deadline_s:
                self._attempts.take_back_all(worker, now)

        if deadline_s is not None:
            self._ledger.timers.at(deadline_s, end)
        self._changed(worker)

    def forget(self, event: ev.Forget, now: float) -> None:
        ledger = self._ledger
        worker = ledger.fleet.workers[event.worker_id]
        assert not worker.session, "a connected worker is not forgotten"
        ledger.fleet.forget(worker)
        if ledger.expected.pop(event.worker_id, event) is None and not ledger.expected:
            ledger.hold_until_s = min(ledger.hold_until_s, now)
        ledger.out.append(ev.WorkerChanged(worker, remember=True, gone=True))

    def _changed(self, worker: Worker) -> None:
        self._ledger.fleet.members_changed(worker)
        self._ledger.out.append(ev.WorkerChanged(worker, remember=True))

    # --- models ------------------------------------------------------------------------------------------------------

    def load_model(self, event: ev.LoadModel, now: float) -> None:
        worker = self._ledger.fleet.workers[event.worker_id]
        residency = worker.residency
        residency.pins[event.model] = None
        residency.unwanted.pop(residency.names.get(event.model, event.model), None)
        self._models_changed(worker)

    def unload_model(self, event: ev.UnloadModel, now: float) -> None:
        """What is not loaded, nor about to be, is pinned no more, and that is all."""
        worker = self._ledger.fleet.workers[event.worker_id]
        residency, name = worker.residency, event.model
        for pin in [p for p in residency.pins if is_version(p, name) or residency.names.get(p) == name]:
            del residency.pins[pin]
        known = dict.fromkeys((*residency.said, *residency.granted, *residency.uses, *residency.began_s))
        for model in [m for m in known if is_version(m, name)]:
            residency.unwanted[model] = 0
        self._models_changed(worker)

    def _models_changed(self, worker: Worker) -> None:
        self._ledger.fleet.models_changed(worker)
        self._ledger.freed[worker] = None
        if worker.session:
            self._ledger.out.append(desire(worker))
        self._ledger.out.append(ev.WorkerChanged(worker, remember=True))

    # --- rules -------------------------------------------------------------------------------------------------------

    def set_strategy(self, event: ev.SetStrategy, now: float) -> None:
        ledger = self._ledger
        assert not event.name or event.name in ledger.strategies, "names are checked before they come here"
        if event.queue:
            ledger.queue(event.queue).strategy = event.name
            self._retry(event.queue)
        else:
            assert event.name, "the fleet has a strategy"
            ledger.strategy = event.name
            ledger.retry_all = True

    def configure_queue(self, event: ev.ConfigureQueue, now: float) -> None:
        queue = self._ledger.queue(event.queue)
        if event.paused is not None:
            queue.paused = event.paused
        if event.tasks_max is not None:
            queue.tasks_max = event.tasks_max
        if event.bytes_max is not None:
            queue.bytes_max = event.bytes_max
        if event.paused is False:
            self._retry(event.queue)

    def _retry(self, queue: str) -> None:
        """Has the queue's tasks tried again. Those of other queues are not affected."""
        lanes = self._ledger.lanes
        for lane in [lane for lane in lanes.by_key.values() if lane.queue.name == queue]:
            lanes.offer_anew(lane)


def is_version(model: str, name: str) -> bool:
    """Whether an id is meant by a name: it is that id, or a version of that name."""
    return model == name or model.startswith(f"{name}:")
