"""Why an engine is ended, what it died of, and which of its leases answer for it.

Pure. The agent says why it ends an engine before it does, and hands over the failures that an engine whose CUDA context
is lost still tells; when the engine is dead, `judge` has the verdict. Who is to blame among the leases that ran is
watch.py's to say.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from multigpu_worker.processes.cuda_errors import context_is_lost, hardware_failed, mps_rejected
from multigpu_worker.processes.host import Death
from multigpu_worker.processes.watch import DEATHS_MAX, EngineBatch, Verdict, blame, condemn, spare
from multigpu_worker.session.session import Lease, Report, ReportState, TaskError

# A fault under MPS that nobody is blamed for may be this engine's; a lease is not spared more often than that.
UNKNOWN_FAULTS_MAX = 3


@dataclass(frozen=True, slots=True)
class Judgement:
    """Reports of those that failed with the engine, and the leases that go on in the next one."""

    reports: list[Report]
    again: list[Lease]
    # What ended it, in a word.
    reason: str
    # A task's error that tells of the device's hardware; empty: none does.
    hardware: str
    # It did not end by itself: somebody killed it, or the GPU's MPS server took it along.
    by_others: bool


class Deaths:
    """`suspected`: whether a lease ran when an XID of the application's kind came."""

    def __init__(self, suspected: Callable[[int], bool], memory_bytes: int) -> None:
        self._suspected = suspected
        self._memory_bytes = memory_bytes
        # Why the engine is being ended.
        self.verdict: Verdict | None = None
        self.out_of_memory = False
        # Attempts that failed because the engine's context is lost, and their errors. They answer for it, under MPS if
        # the server's log says so.
        self._lost: dict[int, TaskError] = {}
        # When the first of them were told.
        self._lost_ns = 0

    @property
    def pending(self) -> bool:
        """Failures were kept back: the engine's context is lost."""
        return bool(self._lost)

    def forget(self) -> None:
        """All leases were given back."""
        self._lost.clear()

    def replace(self) -> None:
        """The engine is ended by no fault of what it runs."""
        error = TaskError(type="EngineReplaced", message="the engine was replaced", retryable=True)
        self.verdict = Verdict(accused=frozenset(), error=error)

    def keep_back(self, failed: list[Any], *, one_by_one: bool, said_ns: int) -> list[Any]:
        """Keeps the failures of an engine whose context is lost, till it is dead. Returns the others.

        `said_ns`: when they were told, by the slots' clock.

        Of tasks that ran one by one only the first answers for it, as far as none ran beside it: those after it found
        the context lost.
        """
        kept = [failure for failure in failed if context_is_lost(failure[2]) or self._suspected(failure[0])]
        if kept and not self._lost:
            self._lost_ns = said_ns
        for lease_id, error_type, text, _, traceback in kept:
            if not self._lost or not one_by_one or self._suspected(lease_id):
                self._lost[lease_id] = TaskError(type=error_type, message=text, retryable=True, traceback=traceback)
        return [failure for failure in failed if failure not in kept] if kept else failed

    def judge(self, death: Death, batches: Mapping[int, EngineBatch]) -> Judgement:
        """The engine is dead. Forgets what was said before."""
        verdict, self.verdict = self.verdict, None
        if self.out_of_memory:
            limit = f"the engine needed more than engine_memory_bytes ({self._memory_bytes})"
            died = TaskError(type="OutOfMemory", message=f"{limit}, so it was ended", retryable=True)
        else:
            words = f"the engine process {death.words} while it ran the task"
            died = TaskError(type="EngineDied", message=words, retryable=True)
        self.out_of_memory = False
        lost, self._lost = self._lost, {}
        failed, again = self._blame(death, batches, verdict, died, lost, self._lost_ns)
        reports = [
            Report(lease, ReportState.FAILED, error=error, broke_engine=self._broke(death, verdict, lease, error))
            for lease, error in failed
        ]
        hardware = next((error.message for error in lost.values() if hardware_failed(error.message)), "")
        by_others = death.killed or death.fault is not None or verdict is not None
        return Judgement(reports, again, verdict.error.type if verdict else died.type, hardware, by_others)

    @staticmethod
    def _blame(
        death: Death,
        batches: Mapping[int, EngineBatch],
        verdict: Verdict | None,
        died: TaskError,
        lost: Mapping[int, TaskError],
        lost_ns: int,
    ) -> tuple[list[tuple[Lease, TaskError]], list[Lease]]:
        """Which leases failed with the engine, and which go on in the next one."""
        guilty = {lease_id: error for lease_id, error in lost.items() if not mps_rejected(error.message)}
        if death.fault is not None:
            died = TaskError(type="MpsFault", message=death.fault.message, retryable=True)
            if not death.fault.ours:
                return spare(batches, died, DEATHS_MAX if death.fault.known else UNKNOWN_FAULTS_MAX)
        elif lost and not guilty:
            return spare(batches, next(iter(lost.values())))
        if guilty:
            return condemn([state for state in death.slots if state.started_ns < lost_ns], batches, guilty)
        by_itself = verdict is None and not death.killed
        return blame(death.slots, batches, verdict, died, death.prepared, by_itself=by_itself)

    def _broke(self, death: Death, verdict: Verdict | None, lease: Lease, error: TaskError) -> bool:
        """Whether it was the attempt that took the engine, or its device's context, down with it.

        Not if we ended the engine because the attempt ran too long, or took too much of the host's memory. And a kill
        that we did not ask for comes from outside: an operator, or the kernel short of memory.
        """
        if self._suspected(lease.lease_id) or error.type == "NoProgress" or death.fault is not None:
            return True
        return verdict is None and error.type != "OutOfMemory" and not (death.killed and error.type == "EngineDied")
