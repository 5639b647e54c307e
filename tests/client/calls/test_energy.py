"""The energy of a task in the SDK's Outcome and in the output of mgpuctl."""

import pickle

import multigpu
from multigpu.cli.tasks.tasks import task_facts
from multigpu.v1 import task_pb2


def outcome(**energy: float) -> task_pb2.Outcome:
    return task_pb2.Outcome(
        task_id=1,
        state=task_pb2.OUTCOME_STATE_SUCCEEDED,
        energy=task_pb2.Energy(**energy) if energy else None,  # type: ignore[arg-type]  # numbers, as on the wire
    )


def test_an_outcome_has_its_energy() -> None:
    found = multigpu.Outcome(outcome(joules=12.34, method=1, uncertainty=0.2))
    assert found.energy == multigpu.Energy(12.34, multigpu.EnergyMethod.COUNTER, 0.2)
    assert pickle.loads(pickle.dumps(found)).energy == found.energy
    assert multigpu.Outcome(outcome()).energy is None
    of_a_newer_master = multigpu.Outcome(outcome(joules=1.0, method=77, uncertainty=0.2)).energy
    assert of_a_newer_master == (1.0, multigpu.EnergyMethod.UNSPECIFIED, 0.2)


def test_mgpuctl_shows_it_with_its_uncertainty() -> None:
    task = task_pb2.Task(task_id=1, outcome=outcome(joules=12.34, method=1, uncertainty=0.2))
    assert ("Energy", "12.3 J ± 20% by the device's counter") in task_facts(multigpu.Task(task))
    sampled = task_pb2.Task(task_id=1, outcome=outcome(joules=0.00125, method=2, uncertainty=0.5))
    assert ("Energy", "0.00125 J ± 50% from sampled power") in task_facts(multigpu.Task(sampled))
    unknown = task_pb2.Task(task_id=1, outcome=outcome())
    assert "Energy" not in dict(task_facts(multigpu.Task(unknown)))
