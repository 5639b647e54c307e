"""State of MPS on a worker's GPU, as the master is told."""

from dataclasses import dataclass
from enum import Enum


class MpsState(Enum):
    """Values as in multigpu.v1.MpsState."""

    OFF = 1
    RUNNING = 2
    FAULT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsStatus:
    """Fields as in multigpu.v1.MpsStatus."""

    state: MpsState
    message: str = ""
    clients: int = 0
    clients_max: int = 0
