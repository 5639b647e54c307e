"""Decides which models to load and which to unload for them.

Pure. The rules:

- A model is loaded when tasks wait for it or an operator has pinned it, and stays until its memory is needed.
- Waiting models are loaded in the order in which they began to wait, so that small models cannot delay a large one
  forever.
- To make room, the least recently used models without leases are unloaded.
- If these do not suffice and the model has waited for PATIENCE_S, models in use retire too: they take no new tasks, and
  are unloaded when their running tasks are done. A model retires only after it was ready for as long as the waiting
  model takes to load, so that at most half of the time goes into loading.
- Pinned models are never unloaded, except for a rank of a gang: until it ends, no model but the rank's is in memory.
- If a loaded model takes more memory than expected, idle models are unloaded until all are within the limit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.signature import UNKNOWN, Signature

PATIENCE_S = 0.5
# The number of concurrent loads. A load that hangs must not delay all others.
LOADS_MAX = 2
# Delay before a failed load is retried; it doubles up to a limit. The second limit is for models whose files are at
# fault: when the files change, the model counts as new and is loaded without a delay.
RETRY_S = 1.0
RETRY_MAX_S, RETRY_FILES_AT_FAULT_MAX_S = 60.0, 3600.0
# Enough for both limits: 2.0 to the power of 1,024 is an OverflowError.
DOUBLINGS_MAX = 32


class ModelState(Enum):
    """Values as in multigpu.v1.ModelState, except ABSENT."""

    ABSENT = 0
    LOADING = 1
    READY = 2
    UNLOADING = 3


@dataclass(slots=True, kw_only=True)
class Resident:
    """A model of this worker, in memory or not."""

    # The model id, with a number if it replaces another version with the same id.
    key: str
    spec: ModelSpec
    state: ModelState = ModelState.ABSENT
    # Expected until it has been measured after a load.
    memory_bytes: int = 0
    measured: bool = False
    # Time of the last measurement, on the monotonic clock.
    measured_at: float = 0.0
    # Duration of the last load; 0: it was never loaded.
    load_s: float = 0.0
    loads: int = 0
    pinned: bool = False
    # It will replace an older version that is in memory.
    upcoming: bool = False
    # The master wants it unloaded, and not loaded again.
    unwanted: bool = False
    # On the monotonic clock: when it entered its state, began to be waited for, and was last used.
    entered_at: float = 0.0
    wanted_at: float | None = None
    used_at: float = 0.0
    # When it was last used, in nanoseconds since 1970; 0: never.
    used_ns: int = 0
    # Leases held for it, waiting or running.
    leases: int = 0
    # Why the last load failed; whether it would fail on every worker; failures in a row; when it may be retried.
    error: str = ""
    fails_everywhere: bool = False
    failures: int = 0
    retry_at: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    # As the last load reported it, even if that was before a restart of the worker.
    signature: Signature = UNKNOWN
    # SHA-256 over its files; empty: not computed yet.
    digest: str = ""

    @property
    def model(self) -> str:
        return self.spec.id

    def enter(self, state: ModelState, now_s: float) -> None:
        self.state, self.entered_at = state, now_s

    def loaded(self, load_s: float, facts: dict[str, str], now_s: float) -> None:
        """All its instances are ready."""
        self.enter(ModelState.READY, now_s)
        self.load_s, self.facts, self.used_at = load_s, facts, now_s
        self.loads += 1
        self.failures, self.error, self.retry_at, self.wanted_at = 0, "", 0.0, None

    def record_failure(
        self, error: str, now_s: float, *, fails_everywhere: bool = False, files_at_fault: bool = False
    ) -> None:
        """A load failed. `fails_everywhere`: it would fail on every worker."""
        self.enter(ModelState.ABSENT, now_s)
        self.error, self.fails_everywhere = error, fails_everywhere
        limit_s = RETRY_FILES_AT_FAULT_MAX_S if fails_everywhere or files_at_fault else RETRY_MAX_S
        self.retry_at = now_s + min(RETRY_S * 2.0 ** min(self.failures, DOUBLINGS_MAX), limit_s)
        self.failures += 1


@dataclass(slots=True)
class Plan:
    load: list[Resident] = field(default_factory=list)
    # Models without leases, to be unloaded now.
    unload: list[Resident] = field(default_factory=list)
    # Models in use, to be unloaded when their running tasks are done.
    retire: list[Resident] = field(default_factory=list)
    # Models that are larger than the memory beside the pinned models, and the size of that memory.
    too_large: list[tuple[Resident, int]] = field(default_factory=list)


def plan(residents: Iterable[Resident], limit_bytes: int, now_s: float) -> Plan:
    """What to do now. `limit_bytes`: for all models together; 0: no limit."""
    everyone = list(residents)
    found = Plan()
    inside = [r for r in everyone if r.state is not ModelState.ABSENT]
    used_bytes = sum(r.memory_bytes for r in inside)
    going_bytes = sum(r.memory_bytes for r in inside if r.state is ModelState.UNLOADING)
    pinned_bytes = sum(r.memory_bytes for r in inside if r.pinned)
    loads = sum(r.state is ModelState.LOADING for r in inside)
    if limit_bytes and used_bytes - going_bytes > limit_bytes:  # a model takes more than expected
        found.unload = _idle_to_unload(inside, used_bytes - going_bytes - limit_bytes)
        return found
    for wanted in _loads_due(everyone, now_s):
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
        break  # later models wait until this one is loaded
    return found


def _loads_due(residents: list[Resident], now_s: float) -> list[Resident]:
    """The models to load, in order."""
    waiting = [r for r in residents if r.state is ModelState.ABSENT and r.wanted_at is not None and now_s >= r.retry_at]
    return sorted(waiting, key=lambda r: (not r.pinned, r.wanted_at, r.key))


def _idle_to_unload(inside: list[Resident], excess_bytes: int) -> list[Resident]:
    """The least recently used idle models, enough to get within the limit."""
    chosen: list[Resident] = []
    idle = (r for r in inside if r.state is ModelState.READY and not r.pinned and not r.leases)
    for victim in sorted(idle, key=lambda r: r.used_at):
        if excess_bytes > 0:
            chosen.append(victim)
            excess_bytes -= victim.memory_bytes
    return chosen


def _make_room(found: Plan, inside: list[Resident], wanted: Resident, lacking_bytes: int, now_s: float) -> None:
    victims = sorted(
        (r for r in inside if r.state is ModelState.READY and not r.pinned), key=lambda r: (r.leases > 0, r.used_at)
    )
    chosen: list[Resident] = []
    for victim in victims:
        if lacking_bytes <= 0:
            break
        if victim.leases and not _may_retire(victim, wanted, now_s):
            continue
        chosen.append(victim)
        lacking_bytes -= victim.memory_bytes
    if lacking_bytes > 0:  # wait: the other models are loading, or have not been ready for long enough to retire
        return
    found.unload += [victim for victim in chosen if not victim.leases]
    found.retire += [victim for victim in chosen if victim.leases]


def _may_retire(victim: Resident, wanted: Resident, now_s: float) -> bool:
    assert wanted.wanted_at is not None
    served_s = now_s - victim.entered_at
    return now_s - wanted.wanted_at >= PATIENCE_S and served_s >= max(PATIENCE_S, wanted.load_s)
