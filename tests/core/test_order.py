"""The order in which tasks go, where it shows in large numbers only."""

from multigpu_master.core import events as ev
from multigpu_master.core.model import Task
from multigpu_master.core.placement.resource_classes import SORTED_IN

from tests.core.stage import Stage, lease_of


def test_what_a_lost_worker_held_goes_back_in_order_however_much_it_is() -> None:
    stage = Stage()
    count = 3 * SORTED_IN
    stage.worker("a", slots=count)
    tasks = stage.submit(count)
    stage.handle(ev.SessionClosed(stage.sessions))
    stage.worker("b", slots=1)
    order: list[Task] = []
    while len(order) < count:
        held = sorted((t for t in tasks if t.lease is not None), key=lambda t: lease_of(t).lease_id)
        order += held
        for task in held:
            stage.report(lease_of(task))
    assert [t.task_id for t in order] == [t.task_id for t in tasks]
