"""How an engine process ended."""

import signal
from dataclasses import dataclass

from multigpu_worker.mps.engines import Fault
from multigpu_worker.processes.ipc.slots import SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    # As subprocess reports it: negative for a signal.
    returncode: int
    # What each slot ran at that moment, or when the agent began to end the process.
    slots: list[SlotState]
    # The batch that the process was preparing; 0: none.
    prepared: int = 0
    # The fault of the GPU's MPS server that ended the process.
    fault: Fault | None = None
    # Why the system could not start the process; empty: it did.
    start_error: str = ""

    @property
    def killed(self) -> bool:
        """Whether SIGKILL or SIGTERM ended it: from the agent, an operator, or the kernel short of memory. Errors of
        the engine or device end a process in other ways.
        """
        return self.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def summary(self) -> str:
        if self.start_error:
            return f"could not start ({self.start_error})"
        if -self.returncode in list(signal.Signals):
            return f"was killed by {signal.Signals(-self.returncode).name}"
        if self.returncode < 0:  # a real-time signal, most of which have no name
            return f"was killed by signal {-self.returncode}"
        return f"ended with exit code {self.returncode}"
