"""Why an engine process ended, and which of its leases are charged for it.

Pure. Before the agent ends a process it records the reason here; failures from an engine whose CUDA context is lost are
kept here, too. When the process is dead, `judge` decides by charge.py's rules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from multigpu_worker.engines.common.cuda_errors import caused_elsewhere, context_is_lost, hardware_failed
from multigpu_worker.processes.batch import EngineBatch
from multigpu_worker.processes.blame.charge import (
    DEATHS_MAX,
    Charges,
    Suspects,
    charge,
    requeue_all,
    suspects_of_lost_context,
    suspects_of_slots,
)
from multigpu_worker.processes.blame.limits import Violation
from multigpu_worker.processes.death import Death
from multigpu_worker.session.lease import Lease
from multigpu_worker.session.session import Report, ReportState, TaskError

# Under MPS, a fault without a known cause may come from this engine: a lease fails at this number of such faults.
UNKNOWN_FAULTS_MAX = 3


@dataclass(frozen=True, slots=True)
class Judgement:
    """Reports of the leases that failed with the process, and the leases that go on in the next one."""

    reports: list[Report]
    again: list[Lease]
    # The type of the error that ended the process.
    reason: str
    # A task's error that shows a hardware error of the device; empty: there is none.
    hardware: str
    # The agent or another program killed the process, or a fault of the GPU's MPS server ended it.
    ended_from_outside: bool


class Evidence:
    """`ran_at_xid`: whether a lease ran when an XID of class APPLICATION was reported."""

    def __init__(self, ran_at_xid: Callable[[int], bool], memory_bytes: int) -> None:
        self._ran_at_xid = ran_at_xid
        self._memory_bytes = memory_bytes
        # Why the agent ends the process: a violation, or its memory.
        self.violation: Violation | None = None
        self.out_of_memory = False
        # Errors of attempts that failed because the context is lost, by lease; and when the first was reported.
        self._context_errors: dict[int, TaskError] = {}
        self._context_lost_ns = 0

    @property
    def context_lost(self) -> bool:
        return bool(self._context_errors)

    def forget(self) -> None:
        """All leases were given back."""
        self._context_errors.clear()

    def end_uncharged(self) -> None:
        """The agent ends the process, and no lease is charged."""
        error = TaskError(type="EngineReplaced", message="the engine was replaced", retryable=True)
        self.violation = Violation(slots=frozenset(), error=error)

    def keep_back(self, failed: list[Any], *, one_by_one: bool, reported_ns: int) -> list[Any]:
        """Keep the failures that show a lost context until the process is dead. Returns the others.

        `reported_ns`: when they were reported, on the slots' clock. If tasks run one by one, only the first failure
        that shows the loss counts: the later tasks failed because the context was already lost.
        """
        kept = [failure for failure in failed if context_is_lost(failure[2]) or self._ran_at_xid(failure[0])]
        if kept and not self._context_errors:
            self._context_lost_ns = reported_ns
        for lease_id, error_type, text, _, traceback in kept:
            if not self._context_errors or not one_by_one or self._ran_at_xid(lease_id):
                error = TaskError(type=error_type, message=text, retryable=True, traceback=traceback)
                self._context_errors[lease_id] = error
        return [failure for failure in failed if failure not in kept] if kept else failed

    def judge(self, death: Death, batches: Mapping[int, EngineBatch]) -> Judgement:
        """Decide which leases are charged for the dead process. Forgets the evidence."""
        died = self._error(death)
        charges = self._charge(death, batches, died)
        reports = [
            Report(lease, ReportState.FAILED, error=error, broke_engine=self._broke_engine(death, lease, error))
            for lease, error in charges.failed
        ]
        messages = [error.message for error in self._context_errors.values() if hardware_failed(error.message)]
        ended_from_outside = death.killed or death.fault is not None or self.violation is not None
        self.violation, self.out_of_memory, self._context_errors = None, False, {}
        return Judgement(reports, charges.again, died.type, next(iter(messages), ""), ended_from_outside)

    def _error(self, death: Death) -> TaskError:
        if self.violation is not None:
            return self.violation.error
        if self.out_of_memory:
            limit = f"the engine needed more than engine_memory_bytes ({self._memory_bytes})"
            return TaskError(type="OutOfMemory", message=f"{limit}, so it was ended", retryable=True)
        message = f"the engine process {death.summary} while it ran the task"
        return TaskError(type="EngineDied", message=message, retryable=True)

    def _charge(self, death: Death, batches: Mapping[int, EngineBatch], died: TaskError) -> Charges:
        lost = self._context_errors
        reported = {lease_id: error for lease_id, error in lost.items() if not caused_elsewhere(error.message)}
        if death.fault is not None:
            fault = TaskError(type="MpsFault", message=death.fault.message, retryable=True)
            if not death.fault.ours:
                deaths_max = DEATHS_MAX if death.fault.cause_known else UNKNOWN_FAULTS_MAX
                return requeue_all(batches, fault, deaths_max, halve=False)
            if self.violation is None:
                died = fault
        elif lost and not reported:
            return requeue_all(batches, next(iter(lost.values())), halve=False)
        if reported:
            before = [state for state in death.slots if state.started_ns < self._context_lost_ns]
            suspects = suspects_of_lost_context(before, batches, reported)
            return charge(suspects, next(iter(reported.values())), batches)
        suspects = suspects_of_slots(death.slots, batches, self.violation, death.prepared)
        if self.violation is None and not suspects.all():
            inside = [lease for batch in batches.values() for lease in batch.leases.values()]
            if death.killed or len(inside) != 1:
                return requeue_all(batches, died, halve=True)
            suspects = Suspects(alone=inside)
        return charge(suspects, died, batches)

    def _broke_engine(self, death: Death, lease: Lease, error: TaskError) -> bool:
        """Whether the attempt ended the process or broke its CUDA context.

        False if the agent ended the process for any reason but a lack of progress, or if nothing is known but that it
        was killed: by an operator, or by the kernel short of memory.
        """
        if self._ran_at_xid(lease.lease_id) or error.type == "NoProgress" or death.fault is not None:
            return True
        return (
            self.violation is None and error.type != "OutOfMemory" and not (death.killed and error.type == "EngineDied")
        )
