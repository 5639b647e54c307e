"""What is loaded on one worker, and what may be.

A worker loads a model when a lease on it comes, and makes room by unloading those without leases, the least recently
used first. So the master plans by what it grants. A model is *in place* where the worker's last word lists it, or a
lease on it was granted since. Models *in use* can't be unloaded: those with leases, those that are pinned, those that
load, and the one whose turn it is (see load_reservations.py). A lease on another model is granted only where that one
fits in beside those in use; and if others must be unloaded for it, only once the worker has rested from its last
loading for as long as that took, or when it has nothing else to do. Thus a busy worker loads for half of its time at
most.

Workers that offer no models, or know no limit of their memory, aren't planned for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum

# Taken for the loading of a model where nothing was measured yet.
LOAD_S = 3.0
# What a model takes in memory for each byte of its files, where nothing was measured yet and its worker has no guess.
MEMORY_PER_FILE_BYTE = 1.3
# Of how many models the figures are known at most: of more, those met first are forgotten.
FIGURES_MAX = 10_000
# A model that was to go is gone when so many heartbeats in a row don't list it: one may have been on its way already.
GONE_BEATS = 2
# Figures that differ by less than this share are the same.
SAME = 0.1


class ModelState(IntEnum):
    """The numbers are those of multigpu.v1.ModelState."""

    LOADING = 1
    READY = 2
    UNLOADING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One version of a model, as a worker offers it. 0 and 0.0: never measured there."""

    name: str
    version: str = ""
    current: bool = False
    files_bytes: int = 0
    memory_bytes: int = 0
    expected_bytes: int = 0  # what it will take in memory, as the worker guesses
    load_s: float = 0.0
    error: str = ""  # why it can't be loaded
    wire: bytes = b""  # the serialized multigpu.v1.Model, with all that the core doesn't read

    @property
    def model_id(self) -> str:
        return f"{self.name}:{self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A model in a worker's memory, or on its way in or out, as its last heartbeat says."""

    model: str
    state: ModelState = ModelState.READY
    memory_bytes: int = 0
    last_use_s: float = 0.0
    loads: int = 0
    pinned: bool = False


class Block(Enum):
    """Why a model gets no lease on a worker now, in words."""

    UNWANTED = "it is being unloaded there, as an operator wants"
    RETIRING = "it makes room there for a model that has waited longer"
    TURN = "another model, which has waited longer, is to be loaded there first"
    NO_ROOM = "there is no room for it"
    RESTING = "another would have to be unloaded, and the worker has just loaded one"


class Figures:
    """What was measured of models, anywhere in the fleet, the last time."""

    def __init__(self) -> None:
        self.changes = 0
        self.memory_bytes: dict[str, float] = {}
        self.load_s: dict[str, float] = {}

    def learn(self, table: dict[str, float], model: str, figure: float) -> None:
        """Takes a figure; 0: there is none."""
        known = table.get(model, 0.0)
        if not figure or abs(figure - known) <= SAME * known:
            return
        table[model] = figure
        if len(table) > FIGURES_MAX:
            del table[next(iter(table))]
        self.changes += 1


@dataclass(slots=True, eq=False)
class Residency:
    """See the module. Times in seconds since the epoch."""

    figures: Figures = field(default_factory=Figures)
    limit_bytes: int = 0  # of all that is loaded; 0: no limit is known
    offered: dict[str, Model] = field(default_factory=dict)  # by id
    names: dict[str, str] = field(default_factory=dict)  # what tasks may call them -> id
    ids: dict[tuple[str, str], str] = field(default_factory=dict)  # (kind, model) of tasks -> id, as found before
    said: dict[str, Resident] = field(default_factory=dict)  # what the last heartbeat lists
    uses: dict[str, int] = field(default_factory=dict)  # live leases
    granted: dict[str, int] = field(default_factory=dict)  # in which frame; forgotten when a heartbeat knows of it
    going: dict[str, str] = field(default_factory=dict)  # what the worker will unload -> for which model
    used: dict[str, int] = field(default_factory=dict)  # the order in which leases were granted and ended last
    began_s: dict[str, float] = field(default_factory=dict)  # since when those that load do
    pins: dict[str, None] = field(default_factory=dict)  # names or ids that an operator wants to stay loaded
    unwanted: dict[str, int] = field(default_factory=dict)  # ids that must go -> heartbeats in a row without them
    resting: bool = False  # it has just loaded one
    rest_until_s: float = 0.0
    room_for: str = ""  # the model whose turn it is
    retiring: dict[str, None] = field(default_factory=dict)  # models that go for it once their leases are done
    _uses: int = 0
    _figures: int = 0  # the changes of figures that the sums are by
    _used: dict[str, None] | None = None  # None: to be found anew
    _used_bytes: int = -1  # -1: to be summed up anew
    _placed_bytes: int = -1

    # --- what there is -----------------------------------------------------------------------------------------------

    def offer(self, models: Iterable[Model], limit_bytes: int) -> None:
        """What the worker offers, in place of what it offered before."""
        self.limit_bytes = limit_bytes
        self.offered = {m.model_id: m for m in models}
        self.names = {model_id: model_id for model_id in self.offered}
        self.names |= {m.name: model_id for model_id, m in self.offered.items() if m.current or not m.version}
        self.ids = {}
        self.used = {m: nth for m, nth in self.used.items() if m in self.offered}
        self.changed()

    def changed(self) -> None:
        """Sums have to be made anew."""
        self._used = None
        self._used_bytes = self._placed_bytes = -1

    def memory_of(self, model: str) -> int:
        """What a model takes here, as far as is known; at least 1."""
        said, offered = self.said.get(model), self.offered.get(model)
        if said is not None and said.memory_bytes:
            return said.memory_bytes
        if offered is None:
            offered = Model(name=model)
        if offered.memory_bytes:
            return offered.memory_bytes
        guess = offered.expected_bytes or offered.files_bytes * MEMORY_PER_FILE_BYTE
        return max(1, int(self.figures.memory_bytes.get(model, guess)))

    def load_s(self, model: str) -> float:
        """How long its loading takes, as far as is known."""
        offered = self.offered.get(model)
        return (offered.load_s if offered is not None else 0.0) or self.figures.load_s.get(model, LOAD_S)

    def placed(self, model: str) -> bool:
        """Whether it is loaded, or about to be."""
        said = self.said.get(model)
        if said is not None and said.state is not ModelState.UNLOADING and model not in self.going:
            return True
        return model in self.granted or model in self.uses

    def loading(self, model: str) -> bool:
        """Whether the worker says that it loads it now."""
        said = self.said.get(model)
        return said is not None and said.state is ModelState.LOADING

    def pinned(self) -> dict[str, None]:
        """The ids of what an operator wants to stay loaded; of those that the worker offers."""
        return {self.names[name]: None for name in self.pins if name in self.names}

    def in_use(self) -> dict[str, None]:
        """The ids of what can't be unloaded."""
        if self._used is None:
            self._used = dict.fromkeys(self.uses) | self.pinned() | dict.fromkeys(self.began_s)
            self._used |= {r.model: None for r in self.said.values() if r.pinned}
            if self.room_for:
                self._used[self.room_for] = None
        return self._used

    # --- what may be -------------------------------------------------------------------------------------------------

    def blocked(self, model: str, *, idle: bool) -> Block | None:
        """Why the model gets no lease here now. `idle`: the worker holds none at all."""
        if model in self.unwanted:
            return Block.UNWANTED
        if not self.limit_bytes:
            return None
        if model in self.retiring:
            return Block.RETIRING
        if model in self.uses:
            return None
        if not self.fits(model):
            return Block.NO_ROOM
        if model == self.room_for or self.placed(model):
            return None
        if self.room_for:
            return Block.TURN
        if idle or not (self.resting or self.began_s):
            return None
        return Block.RESTING if self.excess_bytes(model) > 0 else None

    def fits(self, model: str) -> bool:
        """Whether there is room beside what is in use. Where nothing is, the worker may try."""
        if self._figures != self.figures.changes:
            self._figures = self.figures.changes
            self.changed()
        if self._used_bytes < 0:
            self._used_bytes = sum(self.memory_of(m) for m in self.in_use())
        mine = self.memory_of(model)
        others = self._used_bytes - (mine if model in self.in_use() else 0)
        return others <= 0 or others + mine <= self.limit_bytes

    def excess_bytes(self, model: str) -> int:
        """How much must be unloaded for it. 0 or less: nothing."""
        if not self.limit_bytes or self.placed(model):
            return 0
        if self._placed_bytes < 0:
            placed = [m for m in dict.fromkeys((*self.said, *self.granted, *self.uses)) if self.placed(m)]
            self._placed_bytes = sum(self.memory_of(m) for m in placed)
        return self._placed_bytes + self.memory_of(model) - self.limit_bytes

    def idle_models(self) -> list[str]:
        """What may be unloaded, the least recently used first."""
        used = self.in_use()
        return sorted((m for m in (self.said | self.granted) if m not in used and self.placed(m)), key=self.last_use)

    def last_use(self, model: str) -> tuple[int, float]:
        """When it was used last: comes first for the one that goes first."""
        said = self.said.get(model)
        return self.used.get(model, 0), said.last_use_s if said is not None else 0.0

    def cost_s(self, model: str) -> float:
        """How long its loading takes, with that of what is unloaded for it: somebody will want that again."""
        excess, cost_s = self.excess_bytes(model), self.load_s(model)
        if excess > 0:
            for other in self.idle_models():
                cost_s += self.load_s(other)
                excess -= self.memory_of(other)
                if excess <= 0:
                    break
        return cost_s

    # --- what happens ------------------------------------------------------------------------------------------------

    def grant(self, model: str, frame: int, now: float) -> bool:
        """A lease on it is granted. Whether the worker has to load it for that."""
        uses = self.uses.get(model, 0)
        loads = not uses and not self.placed(model)
        if loads:
            self._make_way(model)
        self.uses[model] = uses + 1
        self.granted[model] = frame
        self._note_use(model)
        if not uses:
            self.changed()
        if loads:
            self.began_s[model] = now
        return loads

    def _make_way(self, model: str) -> None:
        """Notes what the worker will unload for a model, so that nobody counts on it until the worker says more."""
        excess = self.excess_bytes(model)
        for other in self.idle_models() if excess > 0 else ():
            if excess <= 0:
                break
            excess -= self.memory_of(other)
            self.going[other] = model
            self.granted.pop(other, None)

    def _note_use(self, model: str) -> None:
        self._uses += 1
        self.used[model] = self._uses

    def release(self, model: str) -> bool:
        """A lease on it is over. Whether nothing tells any more that the model is in place."""
        uses = self.uses[model] - 1
        self._note_use(model)
        if uses:
            self.uses[model] = uses
        else:
            del self.uses[model]
            self.changed()
        return not uses and not self.placed(model)

    def ready(self, model: str, now: float) -> None:
        """It is loaded. The worker rests for as long as that took."""
        took_s = now - self.began_s.pop(model)
        self.changed()
        if self.limit_bytes:
            self.resting = True
            self.rest_until_s = max(self.rest_until_s, now + took_s)

    def heard(self, models: Iterable[Resident], last_frame: int, now: float) -> bool:
        """The worker says what is loaded. Whether that differs from what was thought."""
        before = {m for m in (*self.said, *self.granted) if self.placed(m)}
        sizes = {r.model: r.memory_bytes for r in self.said.values()}
        self.said = {r.model: r for r in models}
        for model in [m for m, frame in self.granted.items() if frame <= last_frame]:
            del self.granted[model]
        for model in [m for m, other in self.going.items() if other in self.said or other not in self.uses]:
            del self.going[model]
        for said in self.said.values():
            if said.state is ModelState.LOADING:
                self.began_s.setdefault(said.model, now)
            elif said.state is ModelState.READY and said.model in self.began_s:
                self.ready(said.model, now)
        for model in [m for m in self.began_s if not self.placed(m)]:
            del self.began_s[model]  # it could not be loaded
        self.changed()
        after = {m for m in (*self.said, *self.granted) if self.placed(m)}
        return before != after or sizes != {r.model: r.memory_bytes for r in self.said.values()}

    def unloaded(self) -> bool:
        """Forgets what was to go and is gone by the last heartbeats. Whether there was any."""
        gone = []
        for model in self.unwanted:
            self.unwanted[model] = 0 if model in self.said or model in self.uses else self.unwanted[model] + 1
            if self.unwanted[model] >= GONE_BEATS:
                gone.append(model)
        for model in gone:
            del self.unwanted[model]
        return bool(gone)

    def lost(self) -> None:
        """The worker is: nothing is known of it until it says something. What operators want stays wanted."""
        self.said, self.granted, self.going, self.began_s = {}, {}, {}, {}
        self.resting, self.rest_until_s = False, 0.0
        self.room_for, self.retiring = "", {}
        self.changed()
