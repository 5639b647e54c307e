"""Decides when an engine process must be ended: run timeout, no progress, a cancelled call that goes on.

Pure. The agent samples what each slot runs (processes/ipc/slots.py) and calls `Limits.check`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from multigpu_worker.processes.batch import EngineBatch, running_leases
from multigpu_worker.processes.ipc.slots import SlotState
from multigpu_worker.session.lease import Lease
from multigpu_worker.session.session import TaskError

# Limits are checked 20 times a second. If no check was made for longer than this, the agent was suspended, and
# perhaps the engine with it; or it did not read from the engine, which may have waited for that.
UNCHECKED_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """The engine process must be ended, because of what the named slots run."""

    # (batch_id, lease_id) of each; the lease_id is 0 where the batch runs together.
    slots: frozenset[tuple[int, int]]
    error: TaskError


@dataclass(slots=True)
class Standstill:
    """The state of a slot, and since when it has not changed."""

    state: SlotState
    since_ns: int


class Limits:
    def __init__(self, *, progress_timeout_s: float, cancel_grace_s: float) -> None:
        self.progress_timeout_s = progress_timeout_s
        self.cancel_grace_s = cancel_grace_s
        self._standstills: dict[int, Standstill] = {}
        # The instant of the last check.
        self._checked_ns = 0

    def reset(self) -> None:
        """Forget the standstills."""
        self._standstills.clear()

    def check(
        self,
        now_ns: int,
        slots: list[SlotState],
        batches: Mapping[int, EngineBatch],
        cancelled_ns: Mapping[int, int],
    ) -> Violation | None:
        """The limit that a slot breaks, if any. `cancelled_ns`: when each lease was cancelled, on the slots' clock."""
        unchecked_ns, self._checked_ns = now_ns - self._checked_ns, now_ns
        if unchecked_ns > UNCHECKED_S * 1e9:
            for standstill in self._standstills.values():
                standstill.since_ns += unchecked_ns
        stalled: TaskError | None = None
        still: set[tuple[int, int]] = set()
        for slot, state in enumerate(slots):
            batch = batches.get(state.batch_id)
            running = running_leases(state, batch)
            if batch is None or not running:
                self._standstills.pop(slot, None)
                continue
            key = slot_key(state, batch)
            stalled = self._no_progress(now_ns, slot, state) or stalled
            # One task may hold up several slots, which are not all seen to stop in the same check. So a violation also
            # names slots that have stood still for half the timeout.
            if slot in self._standstills and self._still_s(now_ns, slot) >= self.progress_timeout_s / 2:
                still.add(key)
            error = self._run_timeout(now_ns, state, running) or self._cancelled(now_ns, running, cancelled_ns)
            if error is not None:
                return Violation(slots=frozenset([key]), error=error)
        return None if stalled is None else Violation(slots=frozenset(still), error=stalled)

    def _still_s(self, now_ns: int, slot: int) -> float:
        return (now_ns - self._standstills[slot].since_ns) / 1e9

    def _run_timeout(self, now_ns: int, state: SlotState, running: list[Lease]) -> TaskError | None:
        timeout_s = running[0].spec.run_timeout_s
        if timeout_s == 0 or now_ns - state.started_ns < timeout_s * 1e9:
            return None
        message = f"the attempt ran for longer than its run timeout of {timeout_s:g} s, so its engine was ended"
        return TaskError(type="RunTimeout", message=message, retryable=True)

    def _no_progress(self, now_ns: int, slot: int, state: SlotState) -> TaskError | None:
        if self.progress_timeout_s == 0:
            return None
        standstill = self._standstills.get(slot)
        if standstill is None or standstill.state != state:
            self._standstills[slot] = Standstill(state, now_ns)
            return None
        if self._still_s(now_ns, slot) < self.progress_timeout_s:
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


def slot_key(state: SlotState, batch: EngineBatch) -> tuple[int, int]:
    """What a slot runs, as an entry of Violation.slots."""
    return state.batch_id, state.lease_id if batch.one_by_one else 0
