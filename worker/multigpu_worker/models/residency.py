"""Which models are in memory: what is loaded next, what has to go for it.

Pure. The rules: a model is loaded when tasks wait for it, or when an operator pinned it, and stays until its room is
needed. Models that wait for room are served in the order in which they began to wait, so that a small one never holds
up a large one for ever. Room is made by the least recently used models that nobody holds a lease on. If these do not
suffice, and the model has waited for PATIENCE_S, models in use retire too: they take nothing new, and go when what runs
on them is done. A model retires only after it has been ready for as long as the loading of the one that wants its room
is going to take, so that at most half of the time goes into loading, and every model that waits has its turn. Pinned
models never go. What a model takes is known only when it was loaded once: where that is more than was expected, the
least recently used that are idle go until all is within the limit again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from multigpu.repository.model import ModelSpec

PATIENCE_S = 0.5
# Models that are loaded at the same time: one that hangs does not hold up all others.
LOADS_MAX = 2
# A model that failed to load is not tried again before so long, doubling up to a limit: the second one where its files
# are at fault. When they change it is another model, and tried at once.
RETRY_S = 1.0
RETRY_MAX_S, RETRY_FAULTY_MAX_S = 60.0, 3600.0


class ModelState(Enum):
    """The values but ABSENT's are those of multigpu.v1.ModelState."""

    ABSENT = 0
    LOADING = 1
    READY = 2
    UNLOADING = 3


@dataclass(slots=True, kw_only=True)
class Resident:
    """A model of this worker's, in memory or not."""

    # Its id; with a number behind it, for one that takes the place of another of the same id.
    key: str
    spec: ModelSpec
    state: ModelState = ModelState.ABSENT
    # As measured since it was last loaded; before that, as expected.
    memory_bytes: int = 0
    measured: bool = False
    # When that was begun, on the monotonic clock.
    measured_s: float = 0.0
    # How long the last loading took. 0: it never was.
    load_s: float = 0.0
    loads: int = 0
    pinned: bool = False
    # It is to take the place of an older version that is in memory.
    upcoming: bool = False
    # It must go, and not be loaded again.
    unwanted: bool = False
    # On the monotonic clock: since when it is in its state, since when it is waited for, when a task last ended on it.
    since_s: float = 0.0
    wanted_s: float | None = None
    used_s: float = 0.0
    # The same since 1970, in nanoseconds; 0: never.
    used_ns: int = 0
    # Held for it, waiting or running. Counted when a plan is made.
    leases: int = 0
    # Why it could not be loaded the last time, how often that has happened running, and when it may be tried again.
    error: str = ""
    hopeless: bool = False
    failures: int = 0
    retry_s: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    # SHA-256 over its files; empty: not computed yet.
    digest: str = ""

    @property
    def model(self) -> str:
        """What others know it by."""
        return self.spec.id

    def enter(self, state: ModelState, now_s: float) -> None:
        self.state, self.since_s = state, now_s

    def loaded(self, load_s: float, facts: dict[str, str], now_s: float) -> None:
        """All its instances are ready."""
        self.enter(ModelState.READY, now_s)
        self.load_s, self.facts, self.used_s = load_s, facts, now_s
        self.loads += 1
        self.failures, self.error, self.retry_s, self.wanted_s = 0, "", 0.0, None

    def failed(self, error: str, now_s: float, *, hopeless: bool = False, faulty: bool = False) -> None:
        """It could not be loaded: `faulty`, because of its files; and can't be on any worker, if that is hopeless."""
        self.enter(ModelState.ABSENT, now_s)
        self.error, self.hopeless = error, hopeless
        limit_s = RETRY_FAULTY_MAX_S if hopeless or faulty else RETRY_MAX_S
        self.retry_s = now_s + min(RETRY_S * 2.0**self.failures, limit_s)
        self.failures += 1


@dataclass(slots=True)
class Plan:
    """What to do now, by model."""

    load: list[Resident] = field(default_factory=list)
    # Nobody holds a lease on these.
    unload: list[Resident] = field(default_factory=list)
    # These are in use.
    retire: list[Resident] = field(default_factory=list)
    # Not even an empty worker has room for these; the numbers say how much it would have.
    too_large: list[tuple[Resident, int]] = field(default_factory=list)


def plan(residents: Iterable[Resident], limit_bytes: int, now_s: float) -> Plan:
    """What to do now, for those that are wanted. `limit_bytes`: of all models together; 0: none."""
    everyone = list(residents)
    found = Plan()
    inside = [r for r in everyone if r.state is not ModelState.ABSENT]
    used_bytes = sum(r.memory_bytes for r in inside)
    going_bytes = sum(r.memory_bytes for r in inside if r.state is ModelState.UNLOADING)
    pinned_bytes = sum(r.memory_bytes for r in inside if r.pinned)
    loads = sum(r.state is ModelState.LOADING for r in inside)
    if limit_bytes and used_bytes - going_bytes > limit_bytes:  # one took more than was expected
        found.unload = _shed(inside, used_bytes - going_bytes - limit_bytes)
        return found
    for wanted in _in_turn(everyone, now_s):
        room_bytes = limit_bytes - pinned_bytes
        if limit_bytes and wanted.memory_bytes > room_bytes:
            found.too_large.append((wanted, room_bytes))
            continue
        if loads >= LOADS_MAX:
            break
        lacking_bytes = used_bytes + wanted.memory_bytes - limit_bytes
        if limit_bytes == 0 or lacking_bytes <= 0:
            found.load.append(wanted)
            used_bytes += wanted.memory_bytes
            pinned_bytes += wanted.memory_bytes if wanted.pinned else 0
            loads += 1
            continue
        _make_room(found, inside, wanted, lacking_bytes - going_bytes, now_s)
        break  # the others wait for their turn
    return found


def _in_turn(residents: list[Resident], now_s: float) -> list[Resident]:
    """Those that wait to be loaded, in their order."""
    waiting = [r for r in residents if r.state is ModelState.ABSENT and r.wanted_s is not None and now_s >= r.retry_s]
    return sorted(waiting, key=lambda r: (not r.pinned, r.wanted_s, r.key))


def _shed(inside: list[Resident], excess_bytes: int) -> list[Resident]:
    """The least recently used that nobody uses, until what is left is within the limit."""
    chosen: list[Resident] = []
    idle = (r for r in inside if r.state is ModelState.READY and not r.pinned and not r.leases)
    for victim in sorted(idle, key=lambda r: r.used_s):
        if excess_bytes > 0:
            chosen.append(victim)
            excess_bytes -= victim.memory_bytes
    return chosen


def _make_room(found: Plan, inside: list[Resident], wanted: Resident, lacking_bytes: int, now_s: float) -> None:
    victims = sorted(
        (r for r in inside if r.state is ModelState.READY and not r.pinned), key=lambda r: (r.leases > 0, r.used_s)
    )
    chosen: list[Resident] = []
    for victim in victims:
        if lacking_bytes <= 0:
            break
        if victim.leases and not _may_retire(victim, wanted, now_s):
            continue
        chosen.append(victim)
        lacking_bytes -= victim.memory_bytes
    if lacking_bytes > 0:  # in vain: what is being loaded, or has only just been, has to have its turn first
        return
    found.unload += [victim for victim in chosen if not victim.leases]
    found.retire += [victim for victim in chosen if victim.leases]


def _may_retire(victim: Resident, wanted: Resident, now_s: float) -> bool:
    assert wanted.wanted_s is not None
    served_s = now_s - victim.since_s
    return now_s - wanted.wanted_s >= PATIENCE_S and served_s >= max(PATIENCE_S, wanted.load_s)
