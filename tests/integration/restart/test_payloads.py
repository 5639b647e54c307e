"""Large payloads by reference, on real processes: every mixture of peers who share and peers who don't, references that
lie, and a kill -9 of anyone. Afterwards no outcome is missing, and nothing is left lying around.
"""

import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from multigpu._transport.payloads import LARGE_BYTES, NAME, SEGMENT_BYTES, Directory, Writer
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Daemon, Fleet, rejected, until
from tests.integration.streams import Feed, Heard, collect, run_frame

FLEET = {"handlers": ["trial_handlers"]}
MIB = 1 << 20
SUCCEEDED, DEAD_LETTERED = task_pb2.OUTCOME_STATE_SUCCEEDED, task_pb2.OUTCOME_STATE_DEAD_LETTERED


def payloads(count: int, size: int = MIB) -> list[bytes]:
    return [os.urandom(16) + bytes([n]) * (size - 16) for n in range(count)]


def segments(fleet: Fleet) -> list[str]:
    folder = fleet.data_dir / "payloads"
    return sorted(path.name for path in folder.iterdir() if path.name != "KEY")


def locked(fleet: Fleet, name: str) -> bool:
    """Whether a process holds on to a segment."""
    with contextlib.suppress(FileNotFoundError), (fleet.data_dir / "payloads" / name).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def key(fleet: Fleet) -> bytes:
    return (fleet.data_dir / "payloads" / "KEY").read_bytes()


def refer(request_id: str, segment: str, offset: int, size: int, **spec: Any) -> task_service_pb2.RunRequest:
    """A frame with one task, whose payload is only referred to."""
    at = task_pb2.PayloadReference(segment=segment, offset=offset, size=size)
    inputs = [task_pb2.TaskInput(request_id=request_id, payload_place=at)]
    batch = task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind="echo", **spec), inputs=inputs)
    return task_service_pb2.RunRequest(batches=[batch])


def run_by_hand(fleet: Fleet, *frames: Any) -> Heard:
    return collect(fleet.tasks.Run(iter(frames), timeout=60))


@contextlib.contextmanager
def closed_off(fleet: Fleet) -> Iterator[None]:
    """A worker that can't see the master's folder, as on another host: over there lies something else, for it."""
    probe = ["unshare", "--mount", "true"]
    if os.geteuid() or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("only root may give a process mounts of its own")
    hide = f'mount -t tmpfs tmpfs "{fleet.data_dir / "payloads"}" && exec "$0" "$@"'
    flags = ["--master", fleet.address, "--device", "cpu", "--worker-id", "far", "--log-format", "json"]
    prefix = ["unshare", "--mount", "sh", "-c", hide]
    fleet.workers["far"] = Daemon("multigpu_worker.main", flags, fleet.folder / "far.log", {}, prefix)
    fleet.wait_for_workers("far")
    yield
    fleet.workers.pop("far").stop()


@pytest.mark.parametrize("ephemeral", [False, True])
def test_payloads_and_results_go_as_files_and_come_back_as_they_were(fleet: Fleet, ephemeral: bool) -> None:
    tasks = payloads(40) + payloads(3, LARGE_BYTES) + payloads(3, LARGE_BYTES - 1) + payloads(1, SEGMENT_BYTES + 1)
    with fleet.client() as client:
        assert list(client.map("echo", tasks, ephemeral=ephemeral)) == tasks
        mine = [name for name in segments(fleet) if locked(fleet, name)]
        assert mine, "nobody wrote a file"
        assert [client.run("trial.big", b"", parameters={"bytes": str(MIB)}, ephemeral=ephemeral)] == [bytes(MIB)]


def test_unreferenced_payloads_are_deleted_while_their_writer_lives(fleet: Fleet) -> None:
    with fleet.client() as client:
        tasks = payloads(40)
        for _ in range(4):
            assert list(client.map("echo", tasks, ephemeral=True)) == tasks
        # 320 MiB have passed. What is left is the segment it writes to, and one that may be just about to go.
        until(lambda: not [name for name in segments(fleet) if written_by_us(fleet, name)][2:])


def written_by_us(fleet: Fleet, name: str) -> bool:
    """Whether this process has the segment open."""
    path = str(fleet.data_dir / "payloads" / name)
    return any(os.path.realpath(fd) == path for fd in Path("/proc/self/fd").iterdir())


def test_a_durable_result_is_kept_and_delivered_whole(fleet: Fleet) -> None:
    (payload,) = payloads(1)
    with fleet.client() as client:
        assert client.run("echo", payload, request_id="stays") == payload
        found = until(lambda: outcome if (outcome := client.get("stays").outcome) else None)
        assert found.result == payload
        # The same request again: answered from the journal.
        assert client.run("echo", payload, request_id="stays") == payload
    assert watch_for(fleet, found.task_id).result == payload  # which also says that it is on the disk
    fleet.restart_master()
    task = fleet.tasks.Get(task_service_pb2.GetRequest(request_id="stays"), timeout=20, wait_for_ready=True).task
    assert task.outcome.result == payload
    assert not task.outcome.HasField("result_place")
    assert watch_for(fleet, task.task_id).result == payload


def watch_for(fleet: Fleet, task_id: int) -> Any:
    call = fleet.tasks.Watch(task_service_pb2.WatchRequest(), timeout=20)
    found = next(o for frame in call for o in frame.outcomes if o.task_id == task_id)
    call.cancel()
    return found


def test_a_client_without_the_key_sends_and_gets_bytes(fleet: Fleet) -> None:
    (payload,) = payloads(1)
    heard = run_by_hand(fleet, run_frame("echo", ("plain", payload)))
    assert [(o.result, o.HasField("result_place")) for o in heard.outcomes] == [(payload, False)]
    answer = fleet.submit("echo", payload)
    assert fleet.outcome(answer[0]).result == payload


def test_a_client_with_the_key_gets_a_reference_and_fetches_it(fleet: Fleet) -> None:
    (payload,) = payloads(1)
    writer = Writer(fleet.data_dir / "payloads")
    place = writer.put(payload)
    frame = refer("by-hand", place.pin.name, place.offset, place.size_bytes)
    frame.payload_key = key(fleet)
    (outcome,) = run_by_hand(fleet, frame).outcomes
    at = outcome.result_place
    assert not outcome.result
    assert NAME.fullmatch(at.segment)
    with (fleet.data_dir / "payloads" / at.segment).open("rb") as file:
        file.seek(at.offset)
        assert file.read(at.size) == payload


@pytest.mark.slow
def test_a_worker_near_and_a_worker_far_take_turns(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=1) as fleet, closed_off(fleet), fleet.client() as client:
        tasks, took = payloads(64), set[str]()

        def both_took_some() -> bool:
            outcomes = list(client.map_outcomes("echo", tasks))
            assert [outcome.result for outcome in outcomes] == tasks
            took.update(outcome.worker_id for outcome in outcomes)
            return took == {"w0", "far"}

        until(both_took_some)
        assert not fleet.faults()


def test_a_master_that_shares_nothing(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=1, master_flags=["--no-share-payloads"]) as fleet, fleet.client() as client:
        tasks = payloads(8)
        assert list(client.map("echo", tasks)) == tasks
        assert segments(fleet) == []


@pytest.fixture
def place(fleet: Fleet) -> Any:
    """A good reference, as long as the test holds it."""
    return Writer(fleet.data_dir / "payloads").put(bytes(MIB))


def test_references_that_lead_nowhere_are_rejected(fleet: Fleet, place: Any, tmp_path: Path) -> None:
    folder = fleet.data_dir / "payloads"
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(MIB))
    token = "0123456789abcdef01234567"
    (folder / f"{token}-1").symlink_to(secret)
    os.link(secret, folder / f"{token}-2")
    os.mkfifo(folder / f"{token}-3")
    (folder / f"{token}-4").mkdir()
    foreign = folder / f"{token}-5"
    foreign.write_bytes(bytes(MIB))
    size = (folder / place.pin.name).stat().st_size  # it may be one that others have left, and larger than a new one
    bad = [
        ("../journal.sqlite3", 0, MIB, "has an invalid name"),
        (str(secret), 0, MIB, "has an invalid name"),
        (f"./{place.pin.name}", 0, MIB, "has an invalid name"),
        ("KEY", 0, LARGE_BYTES, "has an invalid name"),
        ("", 0, MIB, "has an invalid name"),
        (f"{place.pin.name}\n", 0, MIB, "has an invalid name"),
        (f"{token}-1", 0, MIB, "can't be opened"),  # a link
        (f"{token}-2", 0, MIB, "single hard link"),  # somebody else's file by another name
        (f"{token}-3", 0, MIB, "plain file"),
        (f"{token}-4", 0, MIB, "plain file"),
        (f"{token}-9", 0, MIB, "can't be opened"),  # none
        (place.pin.name, 0, size + 1, "bytes, and the reference needs"),
        (place.pin.name, size, MIB, "bytes, and the reference needs"),
        (place.pin.name, 2**63, MIB, "out of range"),
        (place.pin.name, 0, 2**63, "out of range"),
        (place.pin.name, 0, LARGE_BYTES - 1, "inline"),
    ]
    if os.geteuid() == 0:
        os.chown(foreign, 65534, 65534)
        bad.append((foreign.name, 0, MIB, "the master's own user"))
    frame = task_service_pb2.RunRequest(payload_key=key(fleet))
    for n, (name, offset, size_bytes, _) in enumerate(bad):
        frame.MergeFrom(refer(f"bad-{n}", name, offset, size_bytes))
    frame.MergeFrom(refer("good", place.pin.name, place.offset, place.size_bytes))
    try:
        heard = run_by_hand(fleet, frame)
    finally:
        for n in range(1, 6):
            with contextlib.suppress(FileNotFoundError):
                path = folder / f"{token}-{n}"
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    rejected = {r.request_id: r for r in heard.rejected}
    assert [n for n in range(len(bad)) if f"bad-{n}" not in rejected] == []
    for n, (_, _, _, words) in enumerate(bad):
        assert rejected[f"bad-{n}"].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert words in rejected[f"bad-{n}"].message
    assert [o.request_id for o in heard.outcomes] == ["good"]
    assert secret.exists()


def test_references_need_the_key(fleet: Fleet, place: Any) -> None:
    heard = run_by_hand(fleet, refer("no-key", place.pin.name, place.offset, place.size_bytes))
    assert ["payload_key" in r.message for r in heard.rejected] == [True]
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "payload_key"):
        run_by_hand(fleet, task_service_pb2.RunRequest(payload_key=b"guessed"))
    batch = refer("in-submit", place.pin.name, place.offset, place.size_bytes).batches[0]
    (result,) = fleet.tasks.Submit(task_service_pb2.SubmitRequest(batches=[batch]), timeout=20).results
    assert "send the payload inline" in result.rejection.message


def test_a_payload_that_vanishes_fails_its_task_and_no_other(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=1) as fleet:
        with fleet.client() as client:  # the worker has shown the key by now
            until(lambda: client.run("echo", bytes(MIB)) and len(segments(fleet)) > 1)
        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="default"), timeout=20)
        writer = Writer(fleet.data_dir / "payloads")
        place = writer.put(bytes(MIB))
        frame = refer("vanishes", place.pin.name, 0, MIB)
        frame.payload_key = key(fleet)
        frame.batches[0].spec.backoff_initial.FromMilliseconds(1)
        frame.MergeFrom(run_frame("echo", ("stays", b"x")))
        feed = Feed(frame)
        stream = fleet.tasks.Run(feed, timeout=60)
        until(lambda: fleet.stats().queued == 2)
        (fleet.data_dir / "payloads" / place.pin.name).unlink()
        fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue="default"), timeout=20)
        feed.close()
        outcomes = {o.request_id: o for o in collect(stream).outcomes}
        assert (outcomes["stays"].result, outcomes["vanishes"].state) == (b"x", DEAD_LETTERED)
        assert outcomes["vanishes"].error.type == "PayloadLost"


def test_a_folder_without_room_only_costs_time(tmp_path: Path) -> None:
    """Nobody can put anything down, so everybody sends bytes."""
    with Fleet(tmp_path / "fleet", workers=1, worker_flags=["--handlers", "trial_handlers"]) as fleet:
        folder = fleet.data_dir / "payloads"
        if os.geteuid() or subprocess.run(["mount", "--bind", folder, folder], check=False).returncode:
            pytest.skip("only root may mount")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
            with fleet.client() as client:
                tasks = payloads(6)
                assert list(client.map("echo", tasks)) == tasks
                assert segments(fleet) == []
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


CLIENT = """
import sys, multigpu
with multigpu.Client(sys.argv[1]) as client:
    tasks = [bytes([n]) * (1 << 20) for n in range(12)]
    list(client.map("trial.nap", tasks, parameters={"seconds": sys.argv[2]}, result_ttl_s=1.0))
"""


def only_what_is_needed_is_left(fleet: Fleet) -> bool:
    """Whether every segment is one that a process writes to, or that an outcome is kept in."""
    path = fleet.data_dir / "journal.sqlite3"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as journal:
        rows = journal.execute("SELECT body FROM outcome WHERE typeof(body) = 'text'").fetchall()
        assert not journal.execute("SELECT * FROM task").fetchall()
    kept = {str(body).partition(":")[0] for (body,) in rows}
    return all(name in kept or locked(fleet, name) for name in segments(fleet))


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_its_tasks_and_no_files(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=1, handlers=["trial_handlers"]) as fleet:
        process = subprocess.Popen([sys.executable, "-c", CLIENT, fleet.address, "0.2"])
        try:
            until(lambda: fleet.stats().succeeded >= 1)
            assert segments(fleet)
        finally:
            process.kill()
            process.wait()
        until(lambda: fleet.stats().succeeded == 12)
        fleet.workers["w0"].stop()
        until(lambda: segments(fleet) == [], timeout_s=60)
        assert not fleet.faults()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["master", "agent", "engine"])
def test_a_kill_loses_nothing_and_leaves_nothing(tmp_path: Path, who: str) -> None:
    tasks = payloads(24)
    with Fleet(tmp_path / "fleet", workers=2, handlers=["trial_handlers"]) as fleet:
        with fleet.client() as client:
            found: list[bytes] = []
            options: Any = {"parameters": {"seconds": "0.05"}, "result_ttl_s": 2.0}
            runs = threading.Thread(target=lambda: found.extend(client.map("trial.nap", tasks, **options)))
            runs.start()
            until(lambda: len(found) >= 4)
            if who == "master":
                fleet.restart_master()
            elif who == "agent":
                fleet.workers["w0"].kill()
                fleet.start_worker("w0")
            else:
                (engine,) = fleet.workers["w0"].children()
                os.kill(engine, signal.SIGKILL)
            runs.join(60)
            assert found == [task[::-1] for task in tasks]
        for worker in fleet.workers.values():
            worker.stop()
        until(lambda: only_what_is_needed_is_left(fleet), timeout_s=30)
        # Their time to live over, the outcomes are forgotten, and the last files with them.
        until(lambda: segments(fleet) == [], timeout_s=90)
        assert not fleet.faults()


def test_a_directory_offered_by_another_is_not_joined(tmp_path: Path) -> None:
    """The same path on another host: the key is not the one that the master has."""
    folder = tmp_path / "payloads"
    folder.mkdir()
    (folder / "KEY").write_bytes(b"another")
    assert Directory.of([("mgpu-payloads-bin", bytes(32) + os.fsencode(folder))]) is None
    assert Directory.of([("mgpu-payloads-bin", bytes(32) + b"/nowhere")]) is None
    assert Directory.of([("mgpu-payloads-bin", b"")]) is None
    assert Directory.of([]) is None
