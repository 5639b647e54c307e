"""The workers: who they are, how much each may hold, and how fast each is.

A window grows and shrinks with the measured pace: a worker may hold as many leases as it finishes in WINDOW_S, at
least one more than it has slots, at most what it said it takes. So fast tasks are sent ahead by the thousand, and slow
ones wait in the queue, where any worker can still have them.

`changes` is a log of workers in the order they changed; the rankings in core/placement/ranking.py read on from where
they were.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from multigpu_master.core.model import Capability, Lease, Shape, Worker, WorkerInfo
from multigpu_master.core.workers.residency import LOAD_S, Block, Figures, ModelState, Resident

WINDOW_S = 0.5
# Taken for the time of a unit of work where nothing was measured yet.
UNIT_S = 0.01
# A pace is measured over at least this long: tasks that ran together are reported together, which says nothing of it.
# The first time a shorter while must do, so that fast tasks soon have a window.
PACE_S, FIRST_PACE_S = 0.1, 0.005
# The weight of the newest sample in the moving averages.
GAIN = 0.5
# A lease is late when it has run for this many times its expected duration.
LATE = 1.25
# Of how many pairs of kind and model a pace is known at most: of more, the one that was met first is forgotten.
PACES_MAX = 10_000
CHANGES_MAX = 8192
LOST_WORKERS_MAX = 1000


class _Average:
    """Moving averages by (kind, model). What is told moves in steps, since every worker's rank may hang on it."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], float] = {}
        self._exact: dict[tuple[str, str], float] = {}

    def learn(self, key: tuple[str, str], sample: float) -> bool:
        """Takes a sample; whether what is told changed."""
        exact = _average(self._exact, key, sample)
        told = self.told.get(key)
        if told is not None and told * 0.8 <= exact <= told * 1.25:
            return False
        self.told[key] = exact
        if len(self.told) > PACES_MAX:
            del self.told[next(iter(self.told))]
        return True


class Fleet:
    """The registry of workers."""

    def __init__(self, memory_threshold: float) -> None:
        self.memory_threshold = memory_threshold
        self.workers: dict[str, Worker] = {}
        self.sessions: dict[int, Worker] = {}
        self.changes: list[Worker] = []
        self.changes_base = 0  # how many changes were dropped from the front
        self.membership = 0  # counts the times that a worker came, went, or changed what it can take
        self.dispatches = 0
        self.began_loading: tuple[str, str] | None = None  # (kind, model) that a worker was given for the first time
        self.averages = 0  # counts the times that an average of the fleet moved enough to matter
        self._unit_s = _Average()
        self._units = _Average()
        self._eligible: dict[Shape, dict[Worker, None]] = {}
        self._groups: dict[tuple[Worker, ...], dict[Worker, None]] = {}
        self.open: dict[Worker, None] = {}  # workers that take work and have room in their windows
        self._resident: dict[Shape, int] = {}
        self.figures = Figures()  # of models
        self.planned = False  # whether any worker offers models by id
        self.forgotten: list[Worker] = []  # to make room, and nobody was told yet

    # --- who ---------------------------------------------------------------------------------------------------------

    def register(self, info: WorkerInfo) -> Worker:
        """The worker of that id, made if it is new, with what it says of itself now."""
        worker = self.workers.get(info.worker_id)
        if worker is None:
            self._make_room()
            worker = self.workers[info.worker_id] = Worker(info)
            worker.residency.figures = self.figures
        else:
            worker.info = info
        self.offered(worker)
        return worker

    def offered(self, worker: Worker) -> None:
        """Notes what a worker offers, as its info says."""
        info = worker.info
        worker.kinds = {}
        for capability in info.capabilities:
            worker.kinds.setdefault(capability.kind, []).append(capability)
        worker.residency.offer(info.models, info.model_memory_bytes)
        self.planned = self.planned or bool(info.models)
        self.measured((m.model_id, m.memory_bytes, m.load_s) for m in info.models)
        self.members_changed(worker)

    def measured(self, figures: Iterable[tuple[str, int, float]]) -> None:
        """Learns (id, memory in bytes, loading time) of models, 0 for what isn't known."""
        known = self.figures
        for model, memory_bytes, load_s in figures:
            before = known.changes
            known.learn(known.memory_bytes, model, memory_bytes)
            known.learn(known.load_s, model, load_s)
            if known.changes != before:
                self.averages += 1  # other workers may be worth more or less for that

    def _make_room(self) -> None:
        """Forgets the worker that was lost longest ago when too many lost ones pile up; none that an operator cordoned,
        which would come back as one that takes work.
        """
        lost = [w for w in self.workers.values() if not (w.session or w.cordoned)]
        if len(lost) >= LOST_WORKERS_MAX:
            gone = min(lost, key=lambda w: w.heard_s)
            del self.workers[gone.worker_id]
            self.forgotten.append(gone)

    def forget(self, worker: Worker) -> None:
        del self.workers[worker.worker_id]
        self.members_changed(worker)

    def members_changed(self, worker: Worker) -> None:
        """Notes that a worker came, went, or changed in what it can take."""
        self.membership += 1
        self._groups.clear()
        self._eligible.clear()
        self._resident.clear()
        self.touch(worker)

    def touch(self, worker: Worker) -> None:
        """Notes that something changed that a ranking may depend on."""
        worker.version += 1
        if worker.accepting and not worker.full:
            self.open[worker] = None
        else:
            self.open.pop(worker, None)
        self.changes.append(worker)
        if len(self.changes) > CHANGES_MAX:
            del self.changes[: CHANGES_MAX // 2]
            self.changes_base += CHANGES_MAX // 2

    # --- what they can run -------------------------------------------------------------------------------------------

    @staticmethod
    def capability(worker: Worker, shape: Shape) -> Capability | None:
        """What lets this worker run the shape's kind on its model."""
        for c in worker.kinds.get(shape.kind, ()):
            if not c.models or not shape.model or shape.model in c.models:
                return c
        return None

    def unfit(self, worker: Worker, shape: Shape) -> str | None:
        """Why this worker could never take such a task; None if it could."""
        if self.capability(worker, shape) is None:
            if shape.kind not in worker.kinds:
                return f"does not run kind {shape.kind!r}"
            return f"does not have model {shape.model!r}"
        for key, value in shape.labels:
            if worker.info.labels.get(key) != value:
                has = worker.info.labels.get(key)
                return f"needs the label {key}={value}, has {'none' if has is None else repr(has)}"
        if shape.memory_bytes > worker.info.memory_total_bytes:
            there = worker.info.memory_total_bytes
            return f"needs {shape.memory_bytes:,} bytes of device memory, has {there:,}"
        return None

    def load_error(self, name: str) -> tuple[Worker, str] | None:
        """A worker that offers this model, or a version of it, but can't load it, and why."""
        for worker in self.workers.values():
            for model in worker.info.models:
                if model.error and name in (model.name, model.model_id):
                    return worker, model.error
        return None

    def eligible(self, shape: Shape) -> dict[Worker, None]:
        """The workers that could take such a task, lost ones too. The same object for all shapes that the same can."""
        found = self._eligible.get(shape)
        if found is None:
            if len(self._eligible) > CHANGES_MAX:
                self._eligible.clear()
                self._groups.clear()
            found = {w: None for w in self.workers.values() if self.unfit(w, shape) is None}
            found = self._eligible[shape] = self._groups.setdefault(tuple(found), found)
        return found

    def model_of(self, worker: Worker, shape: Shape) -> str:
        """The model this worker would run the shape on; "" if the kind needs none."""
        if shape.model:
            return shape.model
        capability = self.capability(worker, shape)
        return capability.models[0] if capability is not None and capability.models else ""

    def model_id(self, worker: Worker, kind: str, model: str) -> str:
        """The id of the worker's model that tasks of this kind and model run on; "" if it offers none by id."""
        residency = worker.residency
        if not residency.offered:
            return ""
        found = residency.ids.get((kind, model))
        if found is None:
            if len(residency.ids) > PACES_MAX:
                residency.ids.clear()
            name = self.model_of(worker, Shape(kind, model, (), 0, -1))
            found = residency.ids[kind, model] = residency.names.get(name, "")
        return found

    def blocked(self, worker: Worker, shape: Shape) -> Block | None:
        """Why the worker gets no tasks of this shape now for want of room for its model; None if it may."""
        residency = worker.residency
        model = residency.ids.get((shape.kind, shape.model))
        if model is None:
            model = self.model_id(worker, shape.kind, shape.model)
        return residency.blocked(model, idle=not worker.leases) if model else None

    def has_turn(self, worker: Worker, shape: Shape) -> bool:
        """Whether the worker makes room for the shape's model, which has waited long enough."""
        room_for = worker.residency.room_for
        return bool(room_for) and room_for == self.model_id(worker, shape.kind, shape.model)

    def models_changed(self, worker: Worker) -> None:
        """Notes that a worker has other models than it had, or other room for them."""
        worker.residency.changed()
        self._resident.clear()
        self.touch(worker)

    # --- how fast ----------------------------------------------------------------------------------------------------

    def expected_s(self, worker: Worker, shape: Shape, units: float = 0.0) -> float:
        """See strategies.base.FleetView."""
        key = (shape.kind, shape.model)
        unit_s = worker.unit_s.get(key) or self._unit_s.told.get(key, UNIT_S)
        return unit_s * (units or self._units.told.get(key, 1.0))

    def load_s(self, worker: Worker, shape: Shape) -> float:
        """See strategies.base.FleetView."""
        residency = worker.residency
        model = residency.ids.get((shape.kind, shape.model)) if self.planned else ""
        if model is None:
            model = self.model_id(worker, shape.kind, shape.model)
        if model:
            stays = model not in residency.unwanted and model not in residency.retiring
            return 0.0 if stays and residency.placed(model) else residency.cost_s(model)
        if (shape.kind, shape.model) in worker.loading:
            return 0.0
        model = self.model_of(worker, shape)
        return LOAD_S if model and model not in residency.said else 0.0

    def resident_workers(self, shape: Shape) -> int:
        """See strategies.base.FleetView."""
        count = self._resident.get(shape)
        if count is None:
            count = sum(1 for w in self.eligible(shape) if w.accepting and self.load_s(w, shape) == 0.0)
            self._resident[shape] = count
        return count

    def paced(self, worker: Worker, now: float, n: int) -> None:
        """Learns from n reports how fast the worker gets through its window, and sizes the window by that."""
        worker.reported_s = now
        worker.together = n
        worker.finished += n
        elapsed_s = now - worker.paced_s
        if elapsed_s < (PACE_S if worker.pace_s else FIRST_PACE_S) or not worker.finished:
            return
        # Averaged as a rate: one slow start (a model being loaded) must not narrow the window for long.
        rate = worker.finished / elapsed_s
        if worker.pace_s:
            rate = GAIN * rate + (1 - GAIN) / worker.pace_s
        worker.pace_s = 1 / rate
        worker.paced_s = now
        worker.finished = 0
        info = worker.info
        worker.allowed = max(min(info.slots + 1, info.window_tasks), min(int(rate * WINDOW_S), info.window_tasks))

    def learn_from_silence(self, worker: Worker, now: float) -> None:
        """Narrows the window of a worker that has reported nothing for longer than its leases were expected to take,
        and expects each running lease to take as long as it has run already.
        """
        silent_s, slots = now - worker.reported_s, worker.info.slots
        if silent_s < PACE_S:
            return
        narrow = min(slots + 1, worker.info.window_tasks)
        share = max(1.0, worker.together / slots)  # tasks of a batch, or reported together, for each slot
        window = max(narrow, int(min(worker.allowed, share * slots * WINDOW_S / silent_s)))
        first = islice(worker.leases.values(), int(share * slots))
        late = [x for x in first if min(silent_s, now - x.dispatch_s) > LATE * x.cost_s * share]
        for lease in late:
            cost_s = min(silent_s, now - lease.dispatch_s) / share
            worker.backlog_s += cost_s - lease.cost_s
            lease.cost_s = cost_s
        if late or window < worker.allowed:
            worker.allowed = min(worker.allowed, window)
            self.touch(worker)

    def learned(self, worker: Worker, key: tuple[str, str], n: int, units: int, ran_s: float) -> None:
        """Learns from n tasks, `units` of work of one (kind, model), that took the engine ran_s together."""
        units = max(units, 1)
        _average(worker.unit_s, key, ran_s / units)
        moved = self._unit_s.learn(key, ran_s / units)
        if self._units.learn(key, units / n) or moved:
            self.averages += 1

    # --- what they hold ----------------------------------------------------------------------------------------------

    def grant(self, worker: Worker, lease: Lease, now: float) -> None:
        """Puts a lease into the worker's window."""
        task = lease.task
        assert task.lease is None, "a task is leased once at a time"
        assert task.outcome is None, "a settled task is not leased"
        if not worker.leases:
            worker.paced_s += now - worker.reported_s  # it was idle
            worker.reported_s = now
        task.lease = lease
        worker.leases[lease.lease_id] = lease
        worker.leased_bytes += len(task.payload)
        worker.leased_memory_bytes += task.spec.memory_bytes
        worker.backlog_s += lease.cost_s
        self.dispatches += 1
        worker.dispatched += 1
        worker.last_dispatch = self.dispatches
        key = (task.spec.kind, task.spec.model)
        if self.planned and (model := self.model_id(worker, *key)):
            lease.model = model
            if worker.residency.grant(model, lease.frame, now):
                self._resident.clear()
                self.began_loading = key
        elif key not in worker.loading:
            loads = self.load_s(worker, Shape(*key, (), 0, -1)) > 0
            worker.loading[key] = None
            if len(worker.loading) > PACES_MAX:
                del worker.loading[next(iter(worker.loading))]
            if loads:
                self._resident.clear()
                self.began_loading = key
        self.touch(worker)

    def settled_down(self, worker: Worker) -> None:
        """The worker has nothing to do: what it says of its models is all there is to know."""
        loading, worker.loading = worker.loading, {}
        if any(self.load_s(worker, Shape(*key, (), 0, -1)) > 0 for key in loading):
            self._resident.clear()

    def release(self, lease: Lease) -> None:
        """Takes a lease, already off worker.leases, out of the worker's account."""
        worker, task = lease.worker, lease.task
        assert task.lease is lease, "a live lease is its task's"
        task.lease = None
        worker.leased_bytes -= len(task.payload)
        worker.leased_memory_bytes -= task.spec.memory_bytes
        if lease.model and worker.residency.release(lease.model):
            self._resident.clear()
        worker.backlog_s = max(0.0, worker.backlog_s - lease.cost_s) if worker.leases else 0.0

    def released(self, worker: Worker, leases: Sequence[Lease], payload_bytes: int) -> None:
        """Takes leases of settled tasks, already off worker.leases, out of the worker's account."""
        worker.leased_bytes -= payload_bytes
        worker.leased_memory_bytes -= sum([lease.task.spec.memory_bytes for lease in leases])
        if self.planned:
            for lease in leases:
                if lease.model and worker.residency.release(lease.model):
                    self._resident.clear()
        cost_s = sum([lease.cost_s for lease in leases])
        worker.backlog_s = max(0.0, worker.backlog_s - cost_s) if worker.leases else 0.0

    def heard(self, worker: Worker, models: Sequence[Resident], last_frame: int, now: float) -> None:
        """What a heartbeat says of the worker's models."""
        if worker.residency.heard(models, last_frame, now):
            self._resident.clear()
            self.measured((r.model, r.memory_bytes, 0.0) for r in models if r.state is ModelState.READY)

    def new_session(self, worker: Worker, session: int, now: float) -> None:
        """A fresh connected life: a narrow window until it shows its pace."""
        worker.session = session
        worker.frame = 0
        worker.allowed = min(worker.info.slots + 1, worker.info.window_tasks)
        worker.pace_s = 0.0
        worker.finished = 0
        worker.stopping = False
        worker.occupied = 0
        worker.connect_s = worker.heard_s = worker.reported_s = worker.paced_s = now
        self.sessions[session] = worker
        self.members_changed(worker)

    def close_session(self, worker: Worker) -> None:
        """The worker is lost. Its leases were taken back before, except those that its next session goes on with."""
        self.sessions.pop(worker.session, None)
        worker.session = 0
        worker.residency.lost()
        worker.loading = {}
        self.members_changed(worker)


def _average(table: dict[tuple[str, str], float], key: tuple[str, str], sample: float) -> float:
    old = table.get(key)
    new = table[key] = sample if old is None else GAIN * sample + (1 - GAIN) * old
    if len(table) > PACES_MAX:
        del table[next(iter(table))]
    return new
