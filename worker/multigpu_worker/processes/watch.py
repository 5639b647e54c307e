"""When an engine must be ended, and who is to blame when it has ended.

Pure. The agent samples what each slot runs (ipc.SlotPage) and asks `Watch.check` whether to end the engine; after a
death, wished for or not, `blame` says which leases failed with it and which go on in the next engine.

Only a lease that ran alone is to blame for a death, so that no innocent is charged an attempt. Of a batch that ran
together nobody knows, so the batch is halved: its leases go on in batches at most half as large, until the one that
ends its engine is alone. Leases that ran one by one, but at the same time in several slots, become *suspects*: they go
on one after the other. A suspect runs beside nobody but those that are cleared, and is cleared itself once it has told
more outputs, as it is past the point then at which the engine died; so eight answers that are generated together are
together again after eight first steps. Should an engine die all the same, the one that was not cleared goes first, and
so alone; and who was a suspect too often is not cleared any more. A batch that was being prepared is accused
with those that ran. A batch whose context is lost is accused with the next one, whose work the device may have begun.
An engine that dies while it runs nothing is nobody's fault, until it has happened too often to the same lease; but if
it was not killed, the only lease in it answers.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from multigpu_worker.processes.ipc import SlotState
from multigpu_worker.session.session import TOGETHER_MAX, Lease, Spec, TaskError

# More than it takes to halve the largest batch down to one.
DEATHS_MAX = 20
# Outputs that clear a suspect: more than may get lost on their way when an engine dies.
CLEARING_OUTPUTS = 8
# A suspect for so many times stays one.
SUSPECTED_MAX = 2


@dataclass(slots=True)
class EngineBatch:
    """A batch in the engine."""

    batch_id: int
    # Not settled yet.
    leases: dict[int, Lease]
    one_by_one: bool
    spec: Spec
    settled: int = 0
    # Since when it has worked without settling anything, in nanoseconds since 1970; 0: it has just settled something.
    unsettled_ns: int = 0
    # The engine was asked to give it back, as far as it is not begun.
    asked_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """End the engine, because of what these slots run."""

    # Batch and lease of each; the lease is 0 where the batch runs together.
    accused: frozenset[tuple[int, int]]
    error: TaskError


@dataclass(slots=True)
class Beats:
    """How long a slot's counter has stood still."""

    state: SlotState
    since_ns: int


class Watch:
    def __init__(self, *, progress_timeout_s: float, cancel_grace_s: float) -> None:
        self.progress_timeout_s = progress_timeout_s
        self.cancel_grace_s = cancel_grace_s
        self._beats: dict[int, Beats] = {}

    def reset(self) -> None:
        """Forget the engine that was."""
        self._beats.clear()

    def check(
        self,
        now_ns: int,
        slots: list[SlotState],
        batches: Mapping[int, EngineBatch],
        cancelled_ns: Mapping[int, int],
    ) -> Verdict | None:
        """Say whether the engine must be ended. `cancelled_ns`: when each cancelled lease was, by the slots' clock."""
        stalled: TaskError | None = None
        still: set[tuple[int, int]] = set()
        for slot, state in enumerate(slots):
            batch = batches.get(state.batch_id)
            running = running_leases(state, batch)
            if not running:
                self._beats.pop(slot, None)
                continue
            accused = (state.batch_id, _lease_id(state, batch))
            stalled = self._no_progress(now_ns, slot, state) or stalled
            # Where one holds up all, they were not all seen to stop in the same look.
            if slot in self._beats and now_ns - self._beats[slot].since_ns >= self.progress_timeout_s * 1e9 / 2:
                still.add(accused)
            error = self._run_timeout(now_ns, state, running) or self._cancelled(now_ns, running, cancelled_ns)
            if error is not None:
                return Verdict(accused=frozenset([accused]), error=error)
        return None if stalled is None else Verdict(accused=frozenset(still), error=stalled)

    def _run_timeout(self, now_ns: int, state: SlotState, running: list[Lease]) -> TaskError | None:
        timeout_s = running[0].spec.run_timeout_s
        if timeout_s == 0 or now_ns - state.started_ns < timeout_s * 1e9:
            return None
        message = f"the attempt ran for longer than its run timeout of {timeout_s:g} s, so its engine was ended"
        return TaskError(type="RunTimeout", message=message, retryable=True)

    def _no_progress(self, now_ns: int, slot: int, state: SlotState) -> TaskError | None:
        if self.progress_timeout_s == 0:
            return None
        beats = self._beats.get(slot)
        if beats is None or beats.state != state:
            self._beats[slot] = Beats(state, now_ns)
            return None
        if now_ns - beats.since_ns < self.progress_timeout_s * 1e9:
            return None
        message = (
            f"the attempt made no progress for {self.progress_timeout_s:g} s, so its engine was ended; "
            "a handler shows that it moves by calling ctx.progress"
        )
        return TaskError(type="NoProgress", message=message, retryable=True)

    def _cancelled(self, now_ns: int, running: list[Lease], cancelled_ns: Mapping[int, int]) -> TaskError | None:
        instants = [cancelled_ns.get(lease.lease_id) for lease in running]
        if any(instant is None or now_ns - instant < self.cancel_grace_s * 1e9 for instant in instants):
            return None
        message = f"the attempt went on for {self.cancel_grace_s:g} s after it was cancelled, so its engine was ended"
        return TaskError(type="Cancelled", message=message, retryable=True)


def running_leases(state: SlotState, batch: EngineBatch | None) -> list[Lease]:
    """The unsettled leases that a slot is running now."""
    if batch is None:
        return []
    if not batch.one_by_one:
        return list(batch.leases.values())
    lease = batch.leases.get(state.lease_id)
    return [] if lease is None else [lease]


def _lease_id(state: SlotState, batch: EngineBatch | None) -> int:
    return state.lease_id if batch is not None and batch.one_by_one else 0


def blame(
    slots: Iterable[SlotState],
    batches: Mapping[int, EngineBatch],
    verdict: Verdict | None,
    died: TaskError,
    prepared: int = 0,
    *,
    by_itself: bool = False,
) -> tuple[list[tuple[Lease, TaskError]], list[Lease]]:
    """Which leases failed with the engine, and which go on in the next one: suspects first, else as they came.

    With a verdict only the slots that it names are to blame; without one, all that ran something, with `died`, and the
    batch that was being `prepared`. `by_itself`: nobody killed it.
    """
    together: list[list[Lease]] = []
    beside: list[Lease] = []
    for state in slots:
        batch = batches.get(state.batch_id)
        if batch is not None and (verdict is None or (state.batch_id, _lease_id(state, batch)) in verdict.accused):
            running = running_leases(state, batch)
            if batch.one_by_one:
                beside += running
            else:
                together.append(running)
    if verdict is None and prepared in batches:
        together.append(list(batches[prepared].leases.values()))
    failed: dict[int, tuple[Lease, TaskError]] = {}
    if verdict is None and not beside and not any(together):
        everyone = [lease for inside in batches.values() for lease in inside.leases.values()]
        if by_itself and len(everyone) == 1:
            beside = everyone
        else:
            for inside in batches.values():
                _note_death(inside, died, failed)
    _accuse(together, beside, died if verdict is None else verdict.error, failed)
    return list(failed.values()), _rest(batches, failed)


def _accuse(
    together: list[list[Lease]], beside: list[Lease], error: TaskError, failed: dict[int, tuple[Lease, TaskError]]
) -> None:
    """One of these ended the engine: of batches that ran together, or of leases that ran each by itself beside them.

    Which one is certain only if there is one.
    """
    everyone = [*beside, *(lease for leases in together for lease in leases)]
    if len(everyone) == 1:
        failed[everyone[0].lease_id] = (everyone[0], error)
        return
    for leases in together:
        for lease in leases:
            lease.together_max = max(1, len(leases) // 2)
    for lease in [lease for lease in beside if not lease.cleared] or (beside if not any(together) else []):
        lease.together_max = 1
        lease.cleared = False
        lease.suspected += 1


def _rest(batches: Mapping[int, EngineBatch], failed: Container[int]) -> list[Lease]:
    again = [lease for batch in batches.values() for lease in batch.leases.values() if lease.lease_id not in failed]
    return sorted(again, key=lambda lease: not lease.suspect)


def clears(lease: Lease) -> bool:
    """Clear a suspect that has told enough outputs since it was dispatched. True: it just was."""
    told = lease.partials_made - lease.partials_dispatched
    if not lease.suspect or lease.suspected >= SUSPECTED_MAX or told < CLEARING_OUTPUTS:
        return False
    lease.together_max = TOGETHER_MAX
    lease.cleared = True
    return True


def spare(
    batches: Mapping[int, EngineBatch], died: TaskError, deaths_max: int = DEATHS_MAX
) -> tuple[list[tuple[Lease, TaskError]], list[Lease]]:
    """The same for an engine that died by no doing of its own: all go on, until it has happened too often to one."""
    failed, again = [], []
    for lease in [lease for batch in batches.values() for lease in batch.leases.values()]:
        lease.deaths += 1
        if lease.deaths >= deaths_max:
            failed.append((lease, died))
        else:
            again.append(lease)
    return failed, again


def condemn(
    slots: Iterable[SlotState], batches: Mapping[int, EngineBatch], guilty: Mapping[int, TaskError]
) -> tuple[list[tuple[Lease, TaskError]], list[Lease]]:
    """The same for leases that said themselves what ended their engine; they found out beside what ran in `slots`."""
    running = {state.batch_id: running_leases(state, batches.get(state.batch_id)) for state in slots}
    together: list[list[Lease]] = []
    beside: list[Lease] = []
    begun = any(not b.one_by_one and not guilty.keys().isdisjoint(b.leases) for b in batches.values())
    for batch in batches.values():
        if batch.one_by_one:
            said = [lease for lease in batch.leases.values() if lease.lease_id in guilty]
            beside += said or running.get(batch.batch_id, [])
        elif begun:
            together.append(list(batch.leases.values()))
    failed: dict[int, tuple[Lease, TaskError]] = {}
    _accuse(together, beside, next(iter(guilty.values())), failed)
    return list(failed.values()), _rest(batches, failed)


def _note_death(batch: EngineBatch, died: TaskError, failed: dict[int, tuple[Lease, TaskError]]) -> None:
    """Note that the engine died with this batch inside, and not while it ran."""
    together_max = max(1, len(batch.leases) // 2)
    for lease in batch.leases.values():
        lease.deaths += 1
        lease.together_max = together_max
        if lease.deaths >= DEATHS_MAX:
            failed[lease.lease_id] = (lease, died)
