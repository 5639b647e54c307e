"""A handler that ignores its cancellation keeps its slot: no task waits behind it while another worker is idle."""

from pathlib import Path

from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Fleet, until

# Until the engine of the cancelled call is ended.
GRACE_S = 60
FLEET = {"handlers": ["trial_handlers"], "worker_flags": ["--cancel-grace-s", str(GRACE_S)]}


def test_tasks_do_not_wait_behind_a_cancelled_call_while_a_worker_is_idle(fleet: Fleet, tmp_path: Path) -> None:
    engines = {name: worker.children() for name, worker in fleet.workers.items()}
    log = tmp_path / "log"
    (blocks,) = fleet.submit("trial.logged", b"blocks", parameters={"log": str(log), "seconds": str(10 * GRACE_S)})
    until(log.exists, what="the task's beginning")
    stuck = fleet.get(blocks).worker_id
    fleet.tasks.Cancel(task_service_pb2.CancelRequest(task_ids=[blocks]), timeout=20)
    with fleet.client() as client:
        outcomes = list(client.map_outcomes("trial.nap", [b"x"] * 10, ordered=False))
    (free,) = fleet.workers.keys() - {stuck}
    assert {outcome.worker_id for outcome in outcomes} == {free}
    limited = fleet.submit("trial.nap", *[b"x"] * 4, run_timeout={"seconds": 20})
    for task_id in limited:
        assert fleet.outcome(task_id).state == task_pb2.OUTCOME_STATE_SUCCEEDED
        assert (fleet.get(task_id).worker_id, fleet.get(task_id).attempts) == (free, 1)
    assert engines == {name: worker.children() for name, worker in fleet.workers.items()}, "it still blocks"
