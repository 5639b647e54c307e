"""What the simulated master sends: dispatches, and outcomes from its journal."""

from __future__ import annotations

from dataclasses import dataclass

from multigpu.v1 import task_pb2
from multigpu_master import ids
from multigpu_master.core import events as ev
from multigpu_master.core.model import Outcome, OutcomeState, TaskError
from multigpu_master.journal.protocol import SettleRecord

PROOFS = ids.LeaseProofs(b"of every master of the simulation")


@dataclass(slots=True)
class Grant:
    """A dispatch as it goes over the wire: copied when it is sent."""

    session: int
    frame: int
    leases: list[tuple[int, int, int, bytes, int, bytes, int, float]]

    @classmethod
    def of(cls, command: ev.Dispatch) -> Grant:
        leases = []
        granted = command.leases
        columns = [x.lease_id for x in granted], [x.task.task_id for x in granted], [x.attempt for x in granted]
        proofs = PROOFS.of(granted[0].worker.worker_id, *columns)
        for x, proof in zip(granted, proofs, strict=True):
            task = x.task
            checkpoint, partials = (task.extra.checkpoint, len(task.extra.partials)) if task.extra else (b"", 0)
            leases.append((
                x.lease_id, task.task_id, x.attempt, task.payload, proof, checkpoint, partials,
                task.spec.run_timeout_s or 0.0,
            ))  # fmt: skip
        return cls(command.session, command.number, leases)


def stored_outcome(record: SettleRecord) -> Outcome:
    assert isinstance(record.body, bytes), "simulated outcomes are small"
    message = task_pb2.Outcome.FromString(record.body)
    error = TaskError(message.error.type, "") if message.error.type else None
    return Outcome(OutcomeState(record.state), record.settle_time_s, message.result, error=error)
