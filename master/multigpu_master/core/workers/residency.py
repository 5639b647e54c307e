"""Which models are loaded on one worker, and which may be.

A worker loads a model when a lease on it arrives, and first unloads models without leases, the least recently used
first, until there is enough memory. So the master controls loading through the leases that it grants. A model is
*placed* where the last heartbeat lists it as loading or ready, and no lease granted since makes the worker unload it,
or where a lease on it is live or not yet acknowledged. Models *in use* can't be unloaded: those with leases, pinned
models, those being loaded, and the model with a load reservation (load_reservations.py). A lease on another model is
granted only where that model fits beside those in use, or none is in use. If models must be unloaded for it, the worker
must also be idle, or have spent as much time since its last loading as that took, its cooldown: so a busy worker spends
at most half of its time on loading.

The master does not plan loading for workers that offer no models by id, or report no limit of their memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from multigpu_master.core.workers.info import Model, ModelState, Resident

# Assumed where nothing is measured: loading time, and memory for each byte of a model's files.
LOAD_S = 3.0
MEMORY_PER_FILE_BYTE = 1.3
# Limit of each table of measurements; beyond it, the model that was added first is removed.
MEASURED_MAX = 10_000
# An unwanted model is considered unloaded when this many heartbeats in a row do not list it: the first of them may have
# been sent before the model was loaded.
GONE_BEATS = 2
# A measurement that differs from the known value by at most this share of it is ignored.
SAME_SHARE = 0.1


class Block(Enum):
    """The reason why a model gets no lease on a worker now."""

    UNWANTED = "an operator unloads it there"
    RETIRING = "it makes room there for a model that has waited longer"
    RESERVED = "another model, which has waited longer, is to be loaded there first"
    NO_ROOM = "there is no room for it"
    COOLING_DOWN = "another would have to be unloaded, and the worker loads one or has just loaded one"


class ModelSizes:
    """Measured sizes and loading times of models, from all workers. `changes` counts changed values."""

    def __init__(self) -> None:
        self.changes = 0
        self.memory_bytes: dict[str, float] = {}
        self.load_s: dict[str, float] = {}

    def learn(self, model: str, memory_bytes: float, load_s: float) -> None:
        """Records a measurement; 0: not measured."""
        for table, value in (self.memory_bytes, memory_bytes), (self.load_s, load_s):
            known = table.get(model, 0.0)
            if value and abs(value - known) > SAME_SHARE * known:
                table[model] = value
                if len(table) > MEASURED_MAX:
                    del table[next(iter(table))]
                self.changes += 1


@dataclass(slots=True, eq=False)
class Residency:
    """The models of one worker. Times are in seconds since 1970."""

    sizes: ModelSizes = field(default_factory=ModelSizes)
    limit_bytes: int = 0  # for all loaded models; 0: unknown
    offered: dict[str, Model] = field(default_factory=dict)  # by id
    id_of_name: dict[str, str] = field(default_factory=dict)  # name or id in a task -> id
    id_of_key: dict[tuple[str, str], str] = field(default_factory=dict)  # (kind, model) -> id: cache of Fleet.model_id
    reported: dict[str, Resident] = field(default_factory=dict)  # in the last heartbeat
    lease_counts: dict[str, int] = field(default_factory=dict)  # model -> live leases
    # Model -> dispatch_number of its newest lease, until a heartbeat acknowledges this number.
    unacknowledged_dispatches: dict[str, int] = field(default_factory=dict)
    replaced_by: dict[str, str] = field(default_factory=dict)  # model to be unloaded -> model that replaces it
    last_uses: dict[str, int] = field(default_factory=dict)  # model -> sequence number of its last grant or release
    loading_since_s: dict[str, float] = field(default_factory=dict)  # model -> when its loading began
    operator_pins: dict[str, None] = field(default_factory=dict)  # names or ids that an operator wants loaded
    unwanted: dict[str, int] = field(default_factory=dict)  # ids to unload -> heartbeats in a row without them
    cooling_down: bool = False  # the worker has just loaded a model
    cooldown_until_s: float = 0.0
    reserved_model: str = ""  # the model with a load reservation
    # Models that get no new leases, so that they can be unloaded for reserved_model.
    retiring: dict[str, None] = field(default_factory=dict)
    # For workers that offer no models by id: (kind, model) of the leases granted since the worker was last idle. These
    # models are loaded, or will be.
    granted_without_id: dict[tuple[str, str], None] = field(default_factory=dict)
    _use_counter: int = 0
    _sizes_version: int = 0  # value of sizes.changes when fits() last emptied the caches
    # Caches; None: stale.
    _in_use: dict[str, None] | None = None
    _in_use_bytes: int | None = None
    _placed_bytes: int | None = None

    # --- offered and placed models -----------------------------------------------------------------------------------

    def offer(self, models: Iterable[Model], limit_bytes: int) -> None:
        """Replaces the models that the worker offers, and its memory limit."""
        self.limit_bytes = limit_bytes
        self.offered = {m.model_id: m for m in models}
        self.id_of_name = {model_id: model_id for model_id in self.offered}
        self.id_of_name |= {m.name: model_id for model_id, m in self.offered.items() if m.current or not m.version}
        self.id_of_key = {}
        self.last_uses = {m: nth for m, nth in self.last_uses.items() if m in self.offered}
        self.invalidate()

    def invalidate(self) -> None:
        self._in_use = self._in_use_bytes = self._placed_bytes = None

    def memory_of(self, model: str) -> int:
        """The model's memory here, measured or estimated; at least 1."""
        reported, offered = self.reported.get(model), self.offered.get(model) or Model(name=model)
        if reported is not None and reported.memory_bytes:
            return reported.memory_bytes
        if offered.memory_bytes:
            return offered.memory_bytes
        guess = offered.expected_bytes or offered.files_bytes * MEMORY_PER_FILE_BYTE
        return max(1, int(self.sizes.memory_bytes.get(model, guess)))

    def load_s(self, model: str) -> float:
        offered = self.offered.get(model)
        return (offered.load_s if offered is not None else 0.0) or self.sizes.load_s.get(model, LOAD_S)

    def placed(self, model: str) -> bool:
        reported = self.reported.get(model)
        if reported is not None and reported.state is not ModelState.UNLOADING and model not in self.replaced_by:
            return True
        return model in self.unacknowledged_dispatches or model in self.lease_counts

    def loading(self, model: str) -> bool:
        """Whether the worker reports that it loads the model now."""
        reported = self.reported.get(model)
        return reported is not None and reported.state is ModelState.LOADING

    def operator_pinned_ids(self) -> dict[str, None]:
        """The ids of the models that an operator pinned and the worker offers."""
        return {self.id_of_name[name]: None for name in self.operator_pins if name in self.id_of_name}

    def pinned(self) -> dict[str, None]:
        """The ids of the models that an operator pinned, or that the worker reports as pinned."""
        return self.operator_pinned_ids() | {r.model: None for r in self.reported.values() if r.pinned}

    def in_use(self) -> dict[str, None]:
        """The ids of the models that can't be unloaded."""
        if self._in_use is None:
            self._in_use = dict.fromkeys(self.lease_counts) | self.pinned() | dict.fromkeys(self.loading_since_s)
            if self.reserved_model:
                self._in_use[self.reserved_model] = None
        return self._in_use

    # --- which models may be loaded ----------------------------------------------------------------------------------

    def blocked(self, model: str, *, idle: bool, for_rank: bool = False) -> Block | None:
        """Returns why the model gets no lease here now; None: it may get one. `idle`: the worker holds no lease.
        `for_rank`: the lease is of a gang's rank, which begins once the worker is idle and has unloaded all other
        models.
        """
        if model in self.unwanted:
            return Block.UNWANTED
        if not self.limit_bytes:
            return None
        if model in self.retiring:
            return Block.RETIRING
        if for_rank:
            return Block.RESERVED if self.reserved_model not in ("", model) else None
        if model in self.lease_counts:
            return None
        if not self.fits(model):
            return Block.NO_ROOM
        if model == self.reserved_model or self.placed(model):
            return None
        if self.reserved_model:
            return Block.RESERVED
        if idle or not (self.cooling_down or self.loading_since_s):
            return None
        return Block.COOLING_DOWN if self.excess_bytes(model) > 0 else None

    def fits(self, model: str) -> bool:
        """Whether the model fits into memory beside the other models in use. True if there are no others."""
        self._use_newest_sizes()
        if self._in_use_bytes is None:
            self._in_use_bytes = sum(self.memory_of(m) for m in self.in_use())
        mine = self.memory_of(model)
        others = self._in_use_bytes - (mine if model in self.in_use() else 0)
        return others <= 0 or others + mine <= self.limit_bytes

    def _use_newest_sizes(self) -> None:
        if self._sizes_version != self.sizes.changes:
            self._sizes_version = self.sizes.changes
            self.invalidate()

    def excess_bytes(self, model: str) -> int:
        """How many bytes of other models must be unloaded for the model; 0 or less: none must."""
        if not self.limit_bytes or self.placed(model):
            return 0
        self._use_newest_sizes()
        if self._placed_bytes is None:
            known = dict.fromkeys((*self.reported, *self.unacknowledged_dispatches, *self.lease_counts))
            self._placed_bytes = sum(self.memory_of(m) for m in known if self.placed(m))
        return self._placed_bytes + self.memory_of(model) - self.limit_bytes

    def evicted_for(self, model: str) -> list[str]:
        """The models that the worker will unload for this one, the least recently used first."""
        excess, evicted = self.excess_bytes(model), list[str]()
        if excess > 0:
            used = self.in_use()
            idle = [m for m in (self.reported | self.unacknowledged_dispatches) if m not in used and self.placed(m)]
            for other in sorted(idle, key=self.last_use):
                if excess <= 0:
                    break
                evicted.append(other)
                excess -= self.memory_of(other)
        return evicted

    def last_use(self, model: str) -> tuple[int, float]:
        """Sort key by which the least recently used model comes first."""
        reported = self.reported.get(model)
        return self.last_uses.get(model, 0), reported.last_use_s if reported is not None else 0.0

    def cost_s(self, model: str) -> float:
        """The model's loading time, plus those of the models evicted for it, because they will be loaded again."""
        return sum(map(self.load_s, self.evicted_for(model)), self.load_s(model))

    # --- leases and heartbeats ---------------------------------------------------------------------------------------

    def grant(self, model: str, dispatch_number: int, now: float) -> bool:
        """Records a lease on the model. Returns whether the worker has to load it."""
        uses = self.lease_counts.get(model, 0)
        loads = not uses and not self.placed(model)
        if loads:
            # Evicted models do not count as placed until a heartbeat lists `model`, or the leases on it have ended.
            for other in self.evicted_for(model):
                self.replaced_by[other] = model
                self.unacknowledged_dispatches.pop(other, None)
        self.lease_counts[model] = uses + 1
        self.unacknowledged_dispatches[model] = dispatch_number
        self._note_use(model)
        if not uses:
            self.invalidate()
        if loads:
            self.loading_since_s[model] = now
        return loads

    def _note_use(self, model: str) -> None:
        self._use_counter += 1
        self.last_uses[model] = self._use_counter

    def release(self, model: str) -> bool:
        """Records the end of a lease. Returns whether the model is no longer placed."""
        uses = self.lease_counts[model] - 1
        self._note_use(model)
        if uses:
            self.lease_counts[model] = uses
        else:
            del self.lease_counts[model]
            self.invalidate()
        return not uses and not self.placed(model)

    def record_loaded(self, model: str, now: float) -> None:
        """Records that the model is loaded. The worker's cooldown then takes as long as the loading took."""
        took_s = now - self.loading_since_s.pop(model)
        self.invalidate()
        if self.limit_bytes:
            self.cooling_down = True
            self.cooldown_until_s = max(self.cooldown_until_s, now + took_s)

    def apply_models(self, models: Iterable[Resident], last_dispatch_number: int, now: float) -> bool:
        """Applies the models of a heartbeat. Returns whether the placed models or a reported size changed."""
        before = {m for m in (*self.reported, *self.unacknowledged_dispatches) if self.placed(m)}
        sizes = {r.model: r.memory_bytes for r in self.reported.values()}
        self.reported = {r.model: r for r in models}
        for model in [m for m, number in self.unacknowledged_dispatches.items() if number <= last_dispatch_number]:
            del self.unacknowledged_dispatches[model]
        for model, other in list(self.replaced_by.items()):
            if other in self.reported or other not in self.lease_counts:
                del self.replaced_by[model]
        for resident in self.reported.values():
            if resident.state is ModelState.LOADING:
                self.loading_since_s.setdefault(resident.model, now)
            elif resident.state is ModelState.READY and resident.model in self.loading_since_s:
                self.record_loaded(resident.model, now)
        for model in [m for m in self.loading_since_s if not self.placed(m)]:
            del self.loading_since_s[model]  # it could not be loaded
        self.invalidate()
        after = {m for m in (*self.reported, *self.unacknowledged_dispatches) if self.placed(m)}
        return before != after or sizes != {r.model: r.memory_bytes for r in self.reported.values()}

    def end_session(self) -> None:
        """Drops what the session's heartbeats reported and its grants changed. Keeps the models that the worker offers,
        the counts of leases that its next session keeps, the order of use, `operator_pins` and `unwanted`.
        """
        self.reported, self.unacknowledged_dispatches, self.replaced_by = {}, {}, {}
        self.loading_since_s, self.granted_without_id = {}, {}
        self.cooling_down, self.cooldown_until_s = False, 0.0
        self.reserved_model, self.retiring = "", {}
        self.invalidate()

    # --- reservations and operators' requests ------------------------------------------------------------------------

    def reserve(self, model: str, retiring: Iterable[str]) -> None:
        """Reserves the worker for loading the model next; the retiring models get no new leases."""
        self.reserved_model, self.retiring = model, dict.fromkeys(retiring)

    def end_reservation(self) -> None:
        self.reserved_model, self.retiring = "", {}

    def pin(self, name: str) -> None:
        self.operator_pins[name] = None
        self.unwanted.pop(self.id_of_name.get(name, name), None)

    def unload(self, name: str) -> None:
        """Unloads the model, or all its versions, for an operator. A model that is not loaded is only unpinned."""
        for pin in [p for p in self.operator_pins if is_version(p, name) or self.id_of_name.get(p) == name]:
            del self.operator_pins[pin]
        known = dict.fromkeys(
            (*self.reported, *self.unacknowledged_dispatches, *self.lease_counts, *self.loading_since_s)
        )
        for model in [m for m in known if is_version(m, name)]:
            self.unwanted[model] = 0

    def forget_unloaded(self) -> bool:
        """Call after a heartbeat. Forgets unwanted models that are unloaded by now. Returns whether there were any."""
        gone = []
        for model in self.unwanted:
            loaded = model in self.reported or model in self.lease_counts
            self.unwanted[model] = 0 if loaded else self.unwanted[model] + 1
            if self.unwanted[model] >= GONE_BEATS:
                gone.append(model)
        for model in gone:
            del self.unwanted[model]
        return bool(gone)


def is_version(model: str, name: str) -> bool:
    """Whether `model` is the id `name`, or a version of the model `name`."""
    return model == name or model.startswith(f"{name}:")
