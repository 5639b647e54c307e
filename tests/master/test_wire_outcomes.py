"""Outcomes on the wire: energy and content type belong to one task only."""

from multigpu.v1 import task_pb2
from multigpu_master.core.model import Energy, Outcome, OutcomeState, Task
from multigpu_master.core.spec import Spec
from multigpu_master.journal.protocol import LargeBody
from multigpu_master.wire.outcomes import OutcomeWriter


def test_energy_is_in_the_outcome_of_its_task_only() -> None:
    writer = OutcomeWriter()
    bodies = []
    for energy in (Energy(1.5, 1, 0.25), None, Energy(2.5, 2, 0.5)):
        task = Task(Spec(kind="k"), "", b"", task_id=1, attempts=1)
        task.outcome = Outcome(OutcomeState.SUCCEEDED, 1.0, b"r", energy=energy)
        body = writer.write(task)
        assert not isinstance(body, LargeBody)
        bodies.append(task_pb2.Outcome.FromString(body))
    assert [b.HasField("energy") for b in bodies] == [True, False, True]
    assert (bodies[0].energy.joules, bodies[0].energy.method, bodies[0].energy.uncertainty) == (1.5, 1, 0.25)
    assert bodies[2].energy.joules == 2.5


def test_a_result_keeps_its_content_type_after_an_outcome_without_a_result() -> None:
    writer = OutcomeWriter()
    types = []
    for result in (b"", b"{}", b""):
        task = Task(Spec(kind="k"), "", b"", task_id=1, attempts=1)
        task.outcome = Outcome(OutcomeState.SUCCEEDED, 1.0, result, content_type="application/json")
        body = writer.write(task)
        assert not isinstance(body, LargeBody)
        types.append(task_pb2.Outcome.FromString(body).content_type)
    assert types == ["", "application/json", ""]
