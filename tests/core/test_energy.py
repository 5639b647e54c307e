"""What tasks took of their device's energy ends up with the right ones."""

from multigpu_master.core import events as ev
from multigpu_master.core.model import Energy

from tests.core.stage import Stage, lease_of

JOULES = [Energy(float(n), 1, 0.1) for n in range(1, 4)]


def test_energy_goes_to_its_task_whatever_is_stale_beside_it() -> None:
    stage = Stage()
    stage.worker(slots=8)
    first, second = stage.submit(2)
    leases = [lease_of(first).lease_id, 12345, lease_of(second).lease_id]
    stage.handle(ev.Reports(stage.sessions, leases, [b"", b"", b""], energy=JOULES))
    assert first.outcome is not None
    assert second.outcome is not None
    assert (first.outcome.energy, second.outcome.energy) == (JOULES[0], JOULES[2])
    assert stage.core.counters.stale_reports == 1


def test_a_report_without_energy_leaves_none() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    stage.report(lease_of(task))
    assert task.outcome is not None
    assert task.outcome.energy is None
