"""When an engine must be ended, and who is to blame when it has ended.

Pure. The agent samples what each slot runs (ipc.SlotPage) and asks `Watch.check` whether to end the engine; after a
death, wished for or not, `blame` says which leases failed with it and which go on in the next engine.

Blame is exact where it can be. Of a kind that runs one by one, the lease that ran is to blame, and no other. Of a batch
that ran together nobody knows, so the batch is halved: its leases go on in batches at most half as large, until the one
that ends its engine is alone, and no innocent is charged an attempt. An engine that dies while no slot runs anything
(preparing a batch, or killed from outside) is nobody's fault, until it has happened too often to the same lease.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from multigpu_worker.ipc import SlotState
from multigpu_worker.session import Lease, Spec, TaskError

# More than it takes to halve the largest batch down to one.
DEATHS_MAX = 20


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """End the engine, because of what this slot runs."""

    batch_id: int
    # Of a kind that runs one by one; 0: the batch runs together.
    lease_id: int
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
        for slot, state in enumerate(slots):
            batch = batches.get(state.batch_id)
            running = running_leases(state, batch)
            if not running:
                self._beats.pop(slot, None)
                continue
            error = (
                self._run_timeout(now_ns, state, running)
                or self._no_progress(now_ns, slot, state)
                or self._cancelled(now_ns, running, cancelled_ns)
            )
            if error is not None:
                return Verdict(batch_id=state.batch_id, lease_id=_lease_id(state, batch), error=error)
        return None

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
    slots: Iterable[SlotState], batches: Mapping[int, EngineBatch], verdict: Verdict | None, died: TaskError
) -> tuple[list[tuple[Lease, TaskError]], list[Lease]]:
    """Which leases failed with the engine, and which go on in the next one, in the order in which they came.

    With a verdict only its slot is to blame; without one, every slot that ran something, with `died`.
    """
    failed: dict[int, tuple[Lease, TaskError]] = {}
    explained = verdict is not None
    for state in slots:
        batch = batches.get(state.batch_id)
        if verdict is not None and (state.batch_id, _lease_id(state, batch)) != (verdict.batch_id, verdict.lease_id):
            continue
        running = running_leases(state, batch)
        if len(running) == 1:
            failed[running[0].lease_id] = (running[0], died if verdict is None else verdict.error)
        for lease in running:
            explained = True
            lease.together_max = max(1, len(running) // 2)
    if not explained:
        for inside in batches.values():
            _suspect(inside, died, failed)
    again = [lease for batch in batches.values() for lease in batch.leases.values() if lease.lease_id not in failed]
    return list(failed.values()), again


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
    batches: Mapping[int, EngineBatch], guilty: Mapping[int, TaskError]
) -> tuple[list[tuple[Lease, TaskError]], list[Lease]]:
    """The same for leases that said themselves what ended their engine; a batch that ran together is halved."""
    failed, again = [], []
    for batch in batches.values():
        together = not batch.one_by_one and len(batch.leases) > 1
        for lease in batch.leases.values():
            error = guilty.get(lease.lease_id)
            if error is None or together:
                again.append(lease)
            else:
                failed.append((lease, error))
            if error is not None and together:
                lease.together_max = max(1, len(batch.leases) // 2)
    return failed, again


def _suspect(batch: EngineBatch, died: TaskError, failed: dict[int, tuple[Lease, TaskError]]) -> None:
    """Note that the engine died with this batch inside, and not while it ran."""
    together_max = max(1, len(batch.leases) // 2)
    for lease in batch.leases.values():
        lease.deaths += 1
        lease.together_max = together_max
        if lease.deaths >= DEATHS_MAX:
            failed[lease.lease_id] = (lease, died)
