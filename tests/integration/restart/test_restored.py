"""The data directory is moved away, or an older copy of it restored, while workers and clients remember the master of
before: what they name must not be taken for something else.
"""

import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from multigpu import CursorExpiredError
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb

from tests.fleet import Fleet, rejected, until
from tests.integration.restart.test_restart import watch
from tests.integration.streams import Feed
from tests.integration.test_bad_input import hello

FIRST, SECOND = b"111", b"222"
NAP = {"seconds": "1.5"}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, workers=1, handlers=["trial_handlers"]) as running:
        yield running
        assert not running.faults()


def runs(fleet: Fleet, task_id: int) -> None:
    until(lambda: fleet.get(task_id).state == task_pb2.TASK_STATE_LEASED)


def restart_with(fleet: Fleet, backup: Path | None) -> None:
    """Kills the master and starts another on a copy of its data directory, or on an empty one. The worker sees nothing
    of that before it is sent SIGCONT.
    """
    fleet.master.kill()
    fleet.workers["w0"].signal(signal.SIGSTOP)
    shutil.rmtree(fleet.data_dir)
    time.sleep(1.0)  # Epochs are seconds: within one, the master on an empty directory would count from the same id.
    if backup is not None:
        shutil.copytree(backup, fleet.data_dir)
    fleet.start_master()


def test_no_task_gets_the_result_of_another_after_the_data_directory_was_moved_away(fleet: Fleet) -> None:
    (first,) = fleet.submit("trial.nap", FIRST, parameters=NAP)
    runs(fleet, first)
    restart_with(fleet, None)
    later = fleet.submit("trial.nap", SECOND, SECOND, wait_for_worker=True)
    fleet.workers["w0"].signal(signal.SIGCONT)
    assert [fleet.outcome(task_id).result for task_id in later] == [SECOND[::-1], SECOND[::-1]]
    assert first not in later
    with rejected(grpc.StatusCode.NOT_FOUND):
        fleet.get(first)


@pytest.mark.slow
def test_a_cursor_of_outcomes_that_the_restored_copy_lacks_is_out_of_range(fleet: Fleet, tmp_path: Path) -> None:
    (old,) = fleet.submit("echo", b"old")
    fleet.outcome(old)
    seen, within = watch(fleet, "", 1)
    fleet.master.kill()
    shutil.copytree(fleet.data_dir, tmp_path / "backup")
    fleet.start_master()
    fleet.wait_for_workers()
    for task_id in fleet.submit("echo", *[b"lost"] * 3):
        fleet.outcome(task_id)
    cursors = [watch(fleet, within, count)[1] for count in (1, 3)]
    restart_with(fleet, tmp_path / "backup")
    fleet.workers["w0"].signal(signal.SIGCONT)
    later = fleet.submit("echo", *[b"later"] * 9, wait_for_worker=True)
    for task_id in later:
        fleet.outcome(task_id)
    for cursor in cursors:
        with rejected(grpc.StatusCode.OUT_OF_RANGE, "restored"):
            next(fleet.tasks.Watch(task_service_pb2.WatchRequest(cursor=cursor), timeout=30, wait_for_ready=True))
    with fleet.client() as client, pytest.raises(CursorExpiredError):
        next(client.watch(cursor=cursors[0]))
    # The copy holds all that this cursor stands for.
    assert [o.task_id for o in watch(fleet, within, 9)[0]] == later
    assert [o.task_id for o in seen] == [old]


def begin_session(
    fleet: Fleet, held: Sequence[worker_pb.HeldLease] = (), incarnation: str = "", worker_id: str = "by hand"
) -> tuple[Any, Any]:
    """A worker's session by hand, and the welcome."""
    frame = hello(
        worker_id=worker_id, capabilities=[worker_pb.Capability(kind="echo")], window_tasks=5, leases=held,
        incarnation=incarnation,
    )  # fmt: skip
    session = fleet.sessions.Session(Feed(frame), timeout=20, wait_for_ready=True)
    return session, next(session).welcome


def held_of(batch: worker_pb.LeaseBatch) -> list[worker_pb.HeldLease]:
    columns = zip(batch.lease_ids, batch.task_ids, batch.attempts, batch.proofs, strict=True)
    return [worker_pb.HeldLease(lease_id=x, task_id=t, attempt=a, running=True, proof=p) for x, t, a, p in columns]


def test_a_worker_takes_back_no_lease_that_it_was_not_granted(tmp_path: Path) -> None:
    with Fleet(tmp_path, workers=0) as fleet:
        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="paused"), timeout=30)
        (queued,) = fleet.submit("echo", b"queued", queue="paused")
        session, welcome = begin_session(fleet)
        fleet.submit("echo", b"held")
        held = held_of(next(b for frame in session for b in frame.lease_batches))
        session.cancel()
        until(lambda: fleet.stats().leased == 0)
        (own,) = held
        guessed = worker_pb.HeldLease(lease_id=queued + 1, task_id=queued, attempt=1)
        reused = worker_pb.HeldLease(lease_id=own.lease_id + 1, task_id=queued, attempt=1, proof=own.proof)
        later = worker_pb.HeldLease(lease_id=own.lease_id, task_id=own.task_id, attempt=2, proof=own.proof)
        for worker_id, claims in (("another", [guessed, own]), ("by hand", [guessed, reused]), ("by hand", [later])):
            session, frame = begin_session(fleet, claims, welcome.incarnation, worker_id)
            assert not frame.adopted_lease_ids
            session.cancel()
            until(lambda: fleet.stats().leased == 0)
        fleet.restart_master()
        session, frame = begin_session(fleet, held, welcome.incarnation)
        assert list(frame.adopted_lease_ids) == [own.lease_id]
        session.cancel()
