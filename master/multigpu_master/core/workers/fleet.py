"""The registry of workers: which exist, what each can run, how fast, and which leases and models each holds.

A worker offers models *by id* if it lists them in info.models, with their sizes; then the master knows and controls
which models the worker has loaded (residency.py). Otherwise the worker only names models in its capabilities.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from multigpu_master.core.model import SLOT, Lease, Shape, Worker
from multigpu_master.core.workers.info import Capability, ModelState, Resident, WorkerInfo
from multigpu_master.core.workers.pace import (
    MODEL_KEYS_MAX,
    PACE_S,
    WINDOW_S,
    Key,
    SteppedAverages,
    narrow_window,
    update_average,
)
from multigpu_master.core.workers.residency import LOAD_S, Block, ModelSizes

# Seconds assumed for a unit of work until a task of its (kind, model) has succeeded.
UNIT_S = 0.01
# A lease is late when it has taken more than this many times its expected time.
LATE = 1.25
# Limit of the cache of eligible workers by shape; beyond it the cache is emptied.
ELIGIBLE_SHAPES_MAX = 8192
# Limit of lost workers, and of lost workers whose last sessions had the same token: a peer that invents worker_ids
# takes at most half of the places. Cordoned workers do not count.
LOST_WORKERS_MAX, LOST_WORKERS_TOKEN_MAX = 1000, 500


class Fleet:
    def __init__(self, memory_threshold: float) -> None:
        self.memory_threshold = memory_threshold
        self.workers: dict[str, Worker] = {}
        self.sessions: dict[int, Worker] = {}
        self.with_room: dict[Worker, None] = {}  # accepting workers with room in their windows
        self.maybe_freed: dict[Worker, None] = {}  # workers that may have gained room since the last pop_maybe_freed
        self.eligibility_changes = 0  # counts the calls of eligibility_changed
        self.estimates_changes = 0  # counts changes of the averages, and of the models' sizes and loading times
        self.resident_changes = 0  # counts changes of models or leases that may have changed resident_workers()
        self.any_offered_by_id = False  # whether any worker has ever offered models by id
        self.sizes = ModelSizes()
        self._leases_granted = 0  # number of leases granted so far
        self._unit_s = SteppedAverages()  # seconds for each unit of work, over all workers
        self._units = SteppedAverages()  # units of work of a task
        self._eligible: dict[Shape, dict[Worker, None]] = {}  # cache of eligible()
        self._groups: dict[tuple[Worker, ...], dict[Worker, None]] = {}  # each different value of _eligible
        self._resident: dict[Shape, int] = {}  # cache of resident_workers()

    # --- members -----------------------------------------------------------------------------------------------------

    def register(self, info: WorkerInfo) -> Worker:
        """Returns the worker with the worker_id of `info`, creating it if it is new, and sets its info."""
        worker = self.workers.get(info.worker_id)
        if worker is None:
            worker = self.workers[info.worker_id] = Worker(info)
            worker.residency.sizes = self.sizes
        self.set_info(worker, info)
        return worker

    def set_info(self, worker: Worker, info: WorkerInfo) -> None:
        worker.info = info
        worker.kinds = {}
        for capability in info.capabilities:
            worker.kinds.setdefault(capability.kind, []).append(capability)
        worker.shares = {c.kind: max(1, SLOT // c.concurrency) for c in info.capabilities if c.concurrency > 1}
        worker.residency.offer(info.models, info.model_memory_bytes)
        self.any_offered_by_id = self.any_offered_by_id or bool(info.models)
        self._record_sizes((m.model_id, m.memory_bytes, m.load_s) for m in info.models)
        self.eligibility_changed(worker)

    def evict_lost_worker_for(self, worker_id: str, token_id: str = "") -> Worker | None:
        """Call before a worker joins. If the worker is new, and the lost workers have reached their limit
        (LOST_WORKERS_MAX, or LOST_WORKERS_TOKEN_MAX with this token), deletes and returns one of them, the one that has
        been silent longest. Never deletes a cordoned worker: it could reconnect and would get tasks.
        """
        if worker_id in self.workers:
            return None
        lost = [w for w in self.workers.values() if not (w.session or w.cordon)]
        same_token = [w for w in lost if w.token_id == token_id]
        if token_id and len(same_token) >= LOST_WORKERS_TOKEN_MAX:
            lost = same_token
        elif len(lost) < LOST_WORKERS_MAX:
            return None
        gone = min(lost, key=lambda w: w.heard_s)
        del self.workers[gone.worker_id]
        return gone

    def forget(self, worker: Worker) -> None:
        del self.workers[worker.worker_id]
        self.eligibility_changed(worker)

    def open_session(self, worker: Worker, session: int, now: float) -> None:
        worker.session = session
        worker.dispatches_sent = 0
        worker.stopping = False
        worker.health_reported = False
        worker.occupied_slots = 0
        worker.connect_s = worker.heard_s = now
        worker.pace.restart(worker.info, now)
        self.sessions[session] = worker
        self.eligibility_changed(worker)

    def close_session(self, worker: Worker) -> None:
        """Marks the worker as lost. The caller has released its leases, except those that its next session keeps."""
        self.sessions.pop(worker.session, None)
        worker.session = 0
        worker.residency.end_session()
        self.eligibility_changed(worker)

    # --- changes -----------------------------------------------------------------------------------------------------

    def eligibility_changed(self, worker: Worker) -> None:
        """Call when a worker joined or left, or when the tasks that it can run or may be granted have changed."""
        self.eligibility_changes += 1
        self._groups.clear()
        self._eligible.clear()
        self._resident.clear()
        self.score_changed(worker)

    def score_changed(self, worker: Worker) -> None:
        """Call when a worker's score may have changed, or when it may have lost room. If it may have gained room, call
        room_changed instead.
        """
        worker.change_count += 1
        if worker.accepting and not worker.full:
            self.with_room[worker] = None
        else:
            self.with_room.pop(worker, None)

    def room_changed(self, worker: Worker) -> None:
        """Call when a worker may have gained room: backlogs that wait for it are tried again. Calls score_changed."""
        self.maybe_freed[worker] = None
        self.score_changed(worker)

    def pop_maybe_freed(self) -> dict[Worker, None]:
        """Returns the workers that may have gained room since the last call."""
        maybe_freed, self.maybe_freed = self.maybe_freed, {}
        return maybe_freed

    def models_changed(self, worker: Worker) -> None:
        """Call when a worker's models, or its room for them, changed."""
        worker.residency.invalidate()
        self._resident_changed()
        self.room_changed(worker)

    def _resident_changed(self) -> None:
        self._resident.clear()
        self.resident_changes += 1

    # --- eligible workers --------------------------------------------------------------------------------------------

    @staticmethod
    def capability(worker: Worker, shape: Shape) -> Capability | None:
        """The worker's capability that covers the shape's kind and model; None: the worker has no such capability."""
        for c in worker.kinds.get(shape.kind, ()):
            if not c.models or not shape.model or shape.model in c.models:
                return c
        return None

    def ineligibility(self, worker: Worker, shape: Shape) -> str | None:
        """Returns why this worker could never run tasks of this shape; None if it could."""
        if self.capability(worker, shape) is None:
            if shape.kind not in worker.kinds:
                return f"does not run kind {shape.kind!r}"
            return f"does not have model {shape.model!r}"
        for key, value in shape.labels:
            if worker.info.labels.get(key) != value:
                has = worker.info.labels.get(key)
                return f"needs the label {key}={value}, has {'none' if has is None else repr(has)}"
        total_bytes = worker.info.memory_total_bytes
        if shape.memory_bytes > total_bytes:
            return f"needs {shape.memory_bytes:,} bytes of device memory, has {total_bytes:,}"
        if shape.world_size > 1 and not worker.info.store_address:
            return "takes no ranks of tasks that several workers run (it announces no store_address)"
        return None

    def load_error(self, name: str) -> tuple[Worker, str] | None:
        """The first worker that offers this model, or a version of it, but can't load it; and the error. None: there is
        no such worker.
        """
        for worker in self.workers.values():
            for model in worker.info.models:
                if model.error and name in (model.name, model.model_id):
                    return worker, model.error
        return None

    def eligible(self, shape: Shape) -> dict[Worker, None]:
        """The workers that could take tasks of this shape, lost workers too. Shapes with the same workers share one
        dict.
        """
        found = self._eligible.get(shape)
        if found is None:
            if len(self._eligible) > ELIGIBLE_SHAPES_MAX:
                self._eligible.clear()
                self._groups.clear()
                self._resident.clear()
            found = {w: None for w in self.workers.values() if self.ineligibility(w, shape) is None}
            found = self._eligible[shape] = self._groups.setdefault(tuple(found), found)
        return found

    def device_count(self, shape: Shape) -> int:
        """How many ranks of such a task could run: one for each device of the eligible workers, lost ones included."""
        return len({worker.device_key for worker in self.eligible(shape)})

    def placeable(self, shape: Shape) -> bool:
        """Whether enough workers could run such a task, lost workers included."""
        if shape.world_size_min == 1:
            return bool(self.eligible(shape))
        return self.device_count(shape) >= shape.world_size_min

    # --- models ------------------------------------------------------------------------------------------------------

    def model_of(self, worker: Worker, shape: Shape) -> str:
        """The name of the model on which this worker would run the shape's tasks; "": they need no model."""
        if shape.model:
            return shape.model
        capability = self.capability(worker, shape)
        return capability.models[0] if capability is not None and capability.models else ""

    def model_id(self, worker: Worker, kind: str, model: str) -> str:
        """The id of the worker's model on which tasks of this kind and model run; "": the tasks need no model,
        or the worker offers it without an id.
        """
        residency = worker.residency
        if not residency.offered:
            return ""
        found = residency.id_of_key.get((kind, model))
        if found is None:
            if len(residency.id_of_key) > MODEL_KEYS_MAX:
                residency.id_of_key.clear()
            name = self.model_of(worker, _plain_shape((kind, model)))
            found = residency.id_of_key[kind, model] = residency.id_of_name.get(name, "")
        return found

    def model_block(self, worker: Worker, shape: Shape) -> Block | None:
        """The reason why the shape's model can't be used on this worker now; None: it can."""
        residency = worker.residency
        model = residency.id_of_key.get((shape.kind, shape.model))
        if model is None:
            model = self.model_id(worker, shape.kind, shape.model)
        return residency.blocked(model, idle=not worker.leases, for_rank=shape.world_size > 1) if model else None

    def reserved(self, worker: Worker, shape: Shape) -> bool:
        """Whether the worker has a load reservation for the shape's model."""
        reserved_model = worker.residency.reserved_model
        return bool(reserved_model) and reserved_model == self.model_id(worker, shape.kind, shape.model)

    def load_s(self, worker: Worker, shape: Shape) -> float:
        """The expected time to load the shape's model, plus the time to reload later the models that must be unloaded
        for it, in seconds. 0.0: it is loaded and is not to be unloaded, or a granted lease already makes the worker
        load it, or the tasks need no model.
        """
        residency = worker.residency
        model = residency.id_of_key.get((shape.kind, shape.model)) if self.any_offered_by_id else ""
        if model is None:
            model = self.model_id(worker, shape.kind, shape.model)
        if model:
            stays = model not in residency.unwanted and model not in residency.retiring
            return 0.0 if stays and residency.placed(model) else residency.cost_s(model)
        if (shape.kind, shape.model) in residency.granted_without_id:
            return 0.0
        model = self.model_of(worker, shape)
        return LOAD_S if model and model not in residency.reported else 0.0

    def resident_workers(self, shape: Shape) -> int:
        """The number of accepting workers that need not load the shape's model (load_s is 0.0)."""
        count = self._resident.get(shape)
        if count is None:
            count = sum(1 for w in self.eligible(shape) if w.accepting and self.load_s(w, shape) == 0.0)
            self._resident[shape] = count
        return count

    def apply_models(self, worker: Worker, models: Sequence[Resident], last_dispatch_number: int, now: float) -> None:
        """Applies the list of models in a heartbeat."""
        if worker.residency.apply_models(models, last_dispatch_number, now):
            self._resident_changed()
            self._record_sizes((r.model, r.memory_bytes, 0.0) for r in models if r.state is ModelState.READY)

    def forget_models_of_leases(self, worker: Worker) -> None:
        """Call when the worker holds no lease. Then its heartbeats list all models that are loaded, so the record of
        the models of granted leases is deleted.
        """
        granted, worker.residency.granted_without_id = worker.residency.granted_without_id, {}
        if any(self.load_s(worker, _plain_shape(key)) > 0 for key in granted):
            self._resident_changed()

    def _record_sizes(self, sizes: Iterable[tuple[str, int, float]]) -> None:
        """Records measurements: (model id, memory in bytes, loading time in seconds). 0: not measured."""
        before = self.sizes.changes
        for model, memory_bytes, load_s in sizes:
            self.sizes.learn(model, memory_bytes, load_s)
        # Dispatch tries all backlogs again: the loading time decides how many tasks must wait before a worker loads
        # the model, and the size decides whether there is room for it.
        self.estimates_changes += self.sizes.changes != before

    # --- run times ---------------------------------------------------------------------------------------------------

    def expected_s(self, worker: Worker, shape: Shape, units: float = 0.0) -> float:
        """The expected run time of a task, in seconds. See strategy.FleetView."""
        key = (shape.kind, shape.model)
        unit_s = worker.pace.unit_s.get(key) or self._unit_s.values.get(key, UNIT_S)
        return unit_s * (units or self._units.values.get(key, 1.0))

    def record_run(self, worker: Worker, key: Key, n: int, units: int, ran_s: float, now: float) -> None:
        """Records that n tasks of one (kind, model), which had `units` units of work in all, together ran for ran_s
        seconds.
        """
        units = max(units, 1)
        update_average(worker.pace.unit_s, key, ran_s / units)
        changed = self._unit_s.learn(key, ran_s / units, now)
        if self._units.learn(key, units / n, now) or changed:
            self.estimates_changes += 1

    def adjust_silent_worker(self, worker: Worker, now: float) -> None:
        """Call now and then for a worker that holds more leases than it has slots. If it has reported nothing for
        PACE_S, assumes that a round (one batch in each slot) takes as long as the silence so far: lowers its window to
        the leases that it would then end in WINDOW_S, and raises the expected time of its late leases.

        Only the leases that likely run are checked: the first ones, as many as the worker has slots, or as many as it
        ended in its last report if these are more. The new expected time of a late lease is the time since its
        dispatch, or since the last report if that was later, divided by the tasks of a slot.
        """
        pace, slots = worker.pace, worker.info.slots
        silent_s = now - pace.reported_s
        if silent_s < PACE_S:
            return
        slot_tasks = max(1.0, pace.last_report_tasks / slots)  # estimated size of the batch of a slot
        window = max(narrow_window(worker.info), int(min(pace.leases_max, slot_tasks * slots * WINDOW_S / silent_s)))
        first = islice(worker.leases.values(), max(slots, pace.last_report_tasks))
        late = [x for x in first if min(silent_s, now - x.dispatch_s) > LATE * x.cost_s * slot_tasks]
        for lease in late:
            cost_s = min(silent_s, now - lease.dispatch_s) / slot_tasks
            worker.leased_s += cost_s - lease.cost_s
            lease.cost_s = cost_s
        if late or window < pace.leases_max:
            pace.leases_max = min(pace.leases_max, window)
            self.score_changed(worker)

    # --- leases ------------------------------------------------------------------------------------------------------

    def add_lease(self, worker: Worker, lease: Lease, now: float) -> bool:
        """Adds a lease to the worker's window. Returns whether the worker has to load the task's model."""
        task = lease.task
        first = task.lease  # of a gang: the lease of rank 0
        assert first is None or (lease.rank and first.gang is lease.gang), "the task has a lease already"
        assert task.outcome is None, "the task is settled"
        if not worker.leases:
            worker.pace.end_idle(now)
        if not lease.rank:
            task.lease = lease
        worker.leases[lease.lease_id] = lease
        worker.leased_bytes += len(task.payload)
        worker.leased_memory_bytes += task.spec.memory_bytes
        worker.leased_s += lease.cost_s
        lease.share = worker.shares.get(task.spec.kind, SLOT)
        worker.leased_shares += lease.share
        self._leases_granted += 1
        worker.newest_lease_number = self._leases_granted
        key, residency, loads = (task.spec.kind, task.spec.model), worker.residency, False
        if self.any_offered_by_id and (model := self.model_id(worker, *key)):
            lease.model = model
            loads = residency.grant(model, lease.dispatch_number, now)
        elif key not in residency.granted_without_id:
            loads = self.load_s(worker, _plain_shape(key)) > 0
            residency.granted_without_id[key] = None
            if len(residency.granted_without_id) > MODEL_KEYS_MAX:
                del residency.granted_without_id[next(iter(residency.granted_without_id))]
        if loads:
            self._resident_changed()
        self.score_changed(worker)
        return loads

    def remove_lease(self, lease: Lease) -> None:
        """Removes a lease from its worker and its task."""
        first = lease.task.lease  # of a gang: the lease of rank 0, or None if that was released before
        assert first is lease or (lease.rank and (first is None or first.gang is lease.gang)), (
            "the task has another lease, or none"
        )
        del lease.worker.leases[lease.lease_id]
        if not lease.rank:
            lease.task.lease = None
        self.subtract_leases(lease.worker, [lease])
        self.room_changed(lease.worker)

    def subtract_leases(self, worker: Worker, leases: Sequence[Lease]) -> None:
        """Subtracts leases that were in worker.leases from the worker's sums. For a gang, lifts leases_limit."""
        if leases and leases[0].gang is not None:
            worker.leases_limit = None
        worker.leased_bytes -= sum([len(lease.task.payload) for lease in leases])
        worker.leased_memory_bytes -= sum([lease.task.spec.memory_bytes for lease in leases])
        worker.leased_shares -= sum([lease.share for lease in leases])
        if self.any_offered_by_id:
            for lease in leases:
                if lease.model and worker.residency.release(lease.model):
                    self._resident_changed()
        cost_s = sum([lease.cost_s for lease in leases])
        worker.leased_s = max(0.0, worker.leased_s - cost_s) if worker.leases else 0.0


def _plain_shape(key: Key) -> Shape:
    """The shape of tasks that require nothing but this kind and model."""
    kind, model = key
    return Shape(kind, model, labels=(), memory_bytes=0)
