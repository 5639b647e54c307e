"""The disk below: full for a while, held by another master, damaged, or of a newer multigpu."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from multigpu._calls.core import ADMIN_TIMEOUT_S
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu_master.write_buffer import DURABLE_S

from tests.fleet import Daemon, Fleet, rejected, until
from tests.integration.streams import Feed, collect, run_frame
from tests.master.journal.journals import fill, mounted

EXIT_NOT_DONE = 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "8m") as disk:
        yield disk


def test_a_full_disk_rejects_new_tasks_and_nothing_else(small_disk: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    options: Any = {"workers": 1, "handlers": ["trial_handlers"], "worker_flags": ["--slots", "2"]}
    with Fleet(tmp_path / "fleet", data_dir=small_disk / "data", **options) as fleet:
        feed = Feed(run_frame("trial.gate", ("running", str(gate).encode())))
        stream = fleet.tasks.Run(feed, timeout=60)
        running = next(stream).accepted[0].task_id
        ballast = fill(small_disk)
        # What is in the file already may still take some; then there is no more.
        until(lambda: fleet.submit_raw("echo", bytes(200_000)).results[0].HasField("rejection"))
        results = fleet.submit_raw("echo", b"small", bytes(100_000)).results
        assert [r.rejection.code for r in results] == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]] * 2
        assert "disk is full" in results[0].rejection.message
        assert "EPHEMERAL" in results[0].rejection.message
        assert "never delete files in data_dir" in results[0].rejection.message
        assert results[0].rejection.retry_delay.ToNanoseconds() > 0
        assert not fleet.stats().journal_writable

        # Running work goes on, and its outcome is written with the room of the reserve.
        (brief,) = fleet.submit("echo", b"brief", durability=task_pb2.DURABILITY_EPHEMERAL)
        assert fleet.outcome(brief).result == b"brief"
        gate.touch()
        feed.close()
        (outcome,) = collect(stream).outcomes
        assert (outcome.task_id, outcome.result) == (running, b"opened")
        assert fleet.outcome(running).result == b"opened"
        heard = collect(fleet.tasks.Run(iter([run_frame("echo", ("late", b"x"))]), timeout=30))
        assert [r.code for r in heard.rejected] == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]

        # Service returns when there is room.
        ballast.unlink()
        until(lambda: fleet.stats().journal_writable)
        (task_id,) = fleet.submit("echo", b"again", request_ids=["late"])
        assert fleet.outcome(task_id).result == b"again"
        watch = fleet.tasks.Watch(task_service_pb2.WatchRequest(), timeout=20)
        watched: set[int] = set()
        for frame in watch:
            watched |= {o.task_id for o in frame.outcomes}
            if {running, task_id} <= watched:
                break
        watch.cancel()
        fleet.restart_master()
        assert fleet.outcome(running).result == b"opened"
        assert not fleet.faults()


@pytest.mark.slow
def test_a_full_disk_is_emptied_through_the_api_also_after_a_restart(small_disk: Path, tmp_path: Path) -> None:
    data_dir = small_disk / "data"
    with Fleet(tmp_path / "fleet", workers=1, data_dir=data_dir, handlers=["trial_handlers"]) as fleet:
        letters = fleet.submit("trial.raise", *(bytes(50_000) for _ in range(40)), attempts_max=1)
        assert {fleet.outcome(i).state for i in letters} == {task_pb2.OUTCOME_STATE_DEAD_LETTERED}
        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="held"), timeout=20)
        queued = fleet.submit("echo", *(bytes(20_000) for _ in range(20)), queue="held")
        fill(small_disk)
        until(lambda: fleet.submit_raw("echo", bytes(200_000), queue="held").results[0].HasField("rejection"))

        def operate(part: int) -> None:
            fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue=f"paused {part}"), timeout=5)
            some = queued[part::2]
            answer = fleet.tasks.Cancel(task_service_pb2.CancelRequest(task_ids=some), timeout=5)
            assert sorted(answer.cancelled_task_ids) == some
            request = admin_pb.DeleteDeadLettersRequest(task_ids=letters[part::2])
            assert fleet.admin.DeleteDeadLetters(request, timeout=5).deleted == len(request.task_ids)

        operate(0)
        fleet.master.kill()
        fill(small_disk)
        fleet.start_master()
        assert fleet.outcome(queued[0], 0.1).state == task_pb2.OUTCOME_STATE_CANCELLED
        operate(1)
        until(lambda: fleet.stats().journal_writable)  # with that ballast on the disk all the while
        fleet.wait_for_workers()
        (task_id,) = fleet.submit("echo", b"again")
        assert fleet.outcome(task_id).result == b"again"
        queues = {q.queue for q in fleet.admin.ListQueues(admin_pb.ListQueuesRequest(), timeout=20).queues if q.paused}
        assert queues == {"held", "paused 0", "paused 1"}


def test_a_disk_that_is_full_of_queued_tasks_empties_as_they_end(small_disk: Path, tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=1, data_dir=small_disk / "data") as fleet:
        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="held"), timeout=20)
        inputs: dict[int, bytes] = {}
        while True:
            payload = os.urandom(150_000)
            (result,) = fleet.submit_raw("echo", payload, queue="held").results
            if result.HasField("rejection"):
                break
            inputs[result.task_id] = payload
        fill(small_disk)
        fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue="held"), timeout=20)
        assert len(inputs) > 20
        assert all(fleet.outcome(task_id).result == payload for task_id, payload in inputs.items())
        assert not fleet.faults()


def test_the_sdk_waits_out_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=1, data_dir=small_disk / "data") as fleet:
        ballast = fill(small_disk)
        until(lambda: fleet.submit_raw("echo", bytes(200_000)).results[0].HasField("rejection"))
        with fleet.client() as client:
            results = client.map("echo", [b"%d" % n for n in range(20)])
            ballast.unlink()
            assert list(results) == [b"%d" % n for n in range(20)]


def test_one_request_twice_on_a_disk_that_has_just_filled_up_is_rejected_and_not_half_taken(
    small_disk: Path, tmp_path: Path
) -> None:
    with Fleet(tmp_path / "fleet", workers=0, data_dir=small_disk / "data") as fleet:
        ballast = fill(small_disk)
        frames = [run_frame("echo", ("twice", bytes(1 << 20)), wait_for_worker=True) for _ in range(2)]
        frames[0].MergeFrom(frames[1])
        feed = Feed(frames[0])
        stream = fleet.tasks.Run(feed, timeout=20)
        first = next(stream)
        assert [r.request_id for r in first.rejected] == ["twice"]
        ballast.unlink()
        until(lambda: fleet.stats().journal_writable)
        time.sleep(0.3)  # acceptances are gathered for a moment
        feed.close()
        # Nothing is owed, so the stream ends; and nothing was accepted.
        heard = collect(stream)
        assert not heard.accepted
        assert not first.accepted
        assert fleet.stats().queued == 0


@pytest.mark.slow
def test_a_backup_of_a_running_master_is_restored(tmp_path: Path) -> None:
    """The drill of docs/deploy.md."""
    with Fleet(tmp_path / "fleet", workers=1) as fleet:
        pause = admin_pb.PauseQueueRequest(queue="held")
        fleet.admin.PauseQueue(pause, timeout=20)
        large = os.urandom(300_000)
        queued = fleet.submit("echo", *(b"%d" % n for n in range(5)), large, queue="held")
        done = fleet.submit("echo", b"done", large)
        assert [fleet.outcome(i).result for i in done] == [b"done", large]
        until(lambda: fleet.stats().outcomes_retained == 2)
        copy = tmp_path / "copy"
        command = [sys.executable, "-m", "multigpu_master.main", "--data-dir", str(fleet.data_dir), "backup", str(copy)]
        subprocess.run(command, check=True, timeout=400)
        later = fleet.submit("echo", b"later", queue="held")
        fleet.master.kill()
        fleet.data_dir.rename(tmp_path / "damaged")
        shutil.copytree(copy, fleet.data_dir)
        fleet.start_master()
        fleet.wait_for_workers()
        assert [fleet.outcome(i).result for i in done] == [b"done", large]
        resume = admin_pb.ResumeQueueRequest(queue="held")
        fleet.admin.ResumeQueue(resume, timeout=20)
        assert [fleet.outcome(i).result for i in queued] == [*(b"%d" % n for n in range(5)), large]
        with rejected(grpc.StatusCode.NOT_FOUND, "no task"):
            fleet.get(later[0])
        (new,) = fleet.submit("echo", b"new")
        assert new not in later
        assert fleet.outcome(new).result == b"new"


def exit_code(daemon: Daemon) -> int | None:
    """What it ends with; None if it lives on."""
    try:
        return daemon.process.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        return None


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, and the log's index, which is SQLite's own and is made anew from the log."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and p.name != "LOCK" and not p.name.endswith("-shm")]
    return {p.name: p.read_bytes() for p in files}


@pytest.mark.slow
def test_a_journal_of_a_newer_multigpu_is_rejected_and_left_alone(tmp_path: Path) -> None:
    """Also if the newer multigpu was killed before its log was copied into the file."""
    fleet = Fleet(tmp_path / "fleet", workers=0)
    fleet.start_master()
    fleet.submit("sleep", b"1", wait_for_worker=True)
    assert fleet.master.stop() == 0
    code = (
        "import os, sqlite3, sys; j = sqlite3.connect(sys.argv[1]); j.execute('PRAGMA user_version = 99'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, fleet.data_dir / "journal.sqlite3"], check=True)
    before = contents(fleet.data_dir)
    master = fleet.start_master(wait=False)
    assert exit_code(master) == EXIT_NOT_DONE
    assert "schema version 99" in master.log()
    assert "Traceback" not in master.log()
    assert contents(fleet.data_dir) == before


def test_a_second_master_is_rejected_and_names_the_first(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=0) as fleet:
        other = Fleet(tmp_path / "other", workers=0, data_dir=fleet.data_dir)
        second = other.start_master(wait=False)
        assert exit_code(second) == EXIT_NOT_DONE
        assert f"held by another master or by salvage (pid {fleet.master.pid} on {socket.gethostname()}" in second.log()
        assert "--data-dir" in second.log()
        assert fleet.stats().workers_active == 0
        # And when the first is gone, however it went, there is room.
        fleet.master.kill()
        other.start_master()
        other.close()


def test_a_port_in_use_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=0) as fleet:
        other = Fleet(tmp_path / "other", workers=0)
        other.address = fleet.address
        second = other.start_master(wait=False)
        assert exit_code(second) == EXIT_NOT_DONE
        assert "--listen" in second.log()
        assert "Traceback" not in second.log()


def test_a_data_dir_that_can_not_be_used_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    fleet = Fleet(tmp_path / "fleet", workers=0, data_dir=tmp_path / "file" / "data")
    master = fleet.start_master(wait=False)
    assert exit_code(master) == EXIT_NOT_DONE
    assert "directory" in master.log()
    assert "Traceback" not in master.log()


def test_a_second_signal_ends_nothing_by_force(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=0) as fleet:
        fleet.master.signal(signal.SIGTERM)
        fleet.master.signal(signal.SIGTERM)
        assert fleet.master.process.wait(60) == 0
        fleet.start_master()
        assert fleet.stats().journal_writable


def test_mgpuctl_waits_for_longer_than_the_master_does() -> None:
    """A failed write is reported with its reason, not as a call that timed out."""
    assert ADMIN_TIMEOUT_S >= DURABLE_S + 2
