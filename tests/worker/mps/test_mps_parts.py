"""The parts of MPS: server log, claims, daemon, limits, and the blame for faults."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from multigpu.config.config import WorkerConfig
from multigpu_worker.device.cpu import CpuDevice
from multigpu_worker.mps import daemon, engines
from multigpu_worker.mps.claims import Claim, Claims
from multigpu_worker.mps.control import GpuFullError, MpsControl, MpsError, MpsState, ServerLog
from multigpu_worker.mps.daemon import MpsLimits
from multigpu_worker.mps.engines import FORCE_TIMEOUT_S, Fault, Mps
from multigpu_worker.mps.setup import clients_max, open_mps, pipe_dir
from multigpu_worker.processes.batch import EngineBatch
from multigpu_worker.processes.blame.evidence import Evidence
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.ipc.slots import SlotState
from multigpu_worker.session.session import Lease, Spec

FAKE = Path(__file__).resolve().parents[2] / "fakes" / "mps_control"
HEAD = "[2026-04-28 18:20:41.986 Server  4428] "


@pytest.mark.parametrize(
    ("lines", "fatal", "blamed"),
    [
        (["Client {PID: 4267, Context ID: 0} connected"], False, None),
        (["Client {PID: 4267, Context ID: 0} encountered a fatal GPU error."], True, 4267),
        ([f"Client {{{pid}, 1}} encountered a fatal GPU error." for pid in (4267, 4281)], True, 4267),
        (["Server is handling a fatal GPU error."], True, None),
        (["Server is handling a fatal GPU error.", "Fatal exception of client 4281"], True, 4281),
    ],
)
def test_the_client_that_a_log_blames(tmp_path: Path, lines: list[str], fatal: bool, blamed: int | None) -> None:
    (tmp_path / "server.log").write_text(HEAD + "Client {PID: 1, Context ID: 0} encountered a fatal GPU error.\n")
    log = ServerLog(tmp_path)
    assert log.fault() == (False, None), "earlier entries do not count"
    with log.path.open("a") as file:
        file.writelines(f"{HEAD}{line}\n" for line in lines)
    assert log.fault() == (fatal, blamed)


def test_a_missing_or_rotated_log(tmp_path: Path) -> None:
    log = ServerLog(tmp_path)
    assert log.fault() == (False, None)
    log.offset = 1000
    log.path.write_text(HEAD + "Client {PID: 7, Context ID: 0} encountered a fatal GPU error.\n")
    assert log.fault() == (True, 7)


DEAD = """
import sys
from pathlib import Path
from multigpu_worker.mps.claims import Claim, Claims

Claims(Path(sys.argv[1])).hold(Claim(worker_id="dead", engine_pid=1, pinned_bytes=1))
"""


async def test_claims_of_dead_workers_are_deleted_and_the_lock_admits_one_at_a_time(tmp_path: Path) -> None:
    ours, other = Claims(tmp_path), Claims(tmp_path)
    claim = Claim(worker_id="b", engine_pid=12, pinned_bytes=34)
    ours.hold(Claim(worker_id="a", engine_pid=0, pinned_bytes=0))
    other.hold(Claim(worker_id="b", engine_pid=0, pinned_bytes=0))
    other.hold(claim)
    subprocess.run([sys.executable, "-c", DEAD, str(tmp_path)], check=True)
    assert ours.others() == [claim]
    other.release()
    assert ours.others() == []
    ours.release()
    assert list(tmp_path.iterdir()) == []
    inside = 0

    async def enter() -> None:
        nonlocal inside
        async with Claims(tmp_path).lock():
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.01)
            inside -= 1

    await asyncio.gather(*(enter() for _ in range(5)))


@pytest.mark.parametrize(("cuda", "contexts"), [("12.9", 48), ("13.0", 48), ("13.1", 60), ("14.0", 60), ("", 48)])
def test_the_limit_on_client_contexts(cuda: str, contexts: int) -> None:
    assert clients_max(cuda) == contexts


async def test_mps_is_rejected_on_a_cpu_and_with_a_long_path() -> None:
    cpu = CpuDevice()
    assert await open_mps(WorkerConfig(), cpu, "w") == (None, None)
    with pytest.raises(MpsError, match="set mps to auto or off"):
        await open_mps(WorkerConfig(mps="on"), cpu, "w")
    with pytest.raises(MpsError, match="mps_pipe_dir to a shorter one"):
        pipe_dir(WorkerConfig(mps_pipe_dir="/" + "x" * 80), "GPU-00000000-0000-0000-0000-000000000000")


@pytest.fixture
async def simulated_control(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MpsControl]:
    monkeypatch.setenv("PATH", f"{FAKE}:{Path(sys.executable).parent}:/usr/bin:/bin")
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        control = MpsControl("GPU-0", Path(folder, "m", "GPU-0"))
        yield control
        with socket.socket(socket.AF_UNIX) as peer:
            left = peer.connect_ex(str(control.pipe_dir / "control")) == 0
        if left:
            os.kill(int(control.daemon_pid()), signal.SIGKILL)  # its server follows
        assert not left, "the test has left its daemon running"


async def test_errors_without_daemon_or_program(
    simulated_control: MpsControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MpsError, match="Cannot find MPS control daemon"):
        await simulated_control.servers()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsError, match="comes with NVIDIA's driver"):
        await simulated_control.servers()


async def test_a_daemon_with_answers_in_an_unknown_format_is_not_used(simulated_control: MpsControl) -> None:
    first = Mps(simulated_control, "a", MpsLimits())
    await first.open()
    await simulated_control.ask("fake reword_lists")
    with pytest.raises(MpsError, match="in a format that this worker doesn't know"):
        await Mps(simulated_control, "b", MpsLimits()).open()
    await simulated_control.ask("quit")
    first.daemon.claims.release()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("exit 1", "failed: exit code 1"),
        ("[ $1 ]", "the MPS daemon does not come up"),
        ("echo servers: none", "in a format that this worker doesn't know"),
        ("", "server is not ready"),
        ("read c; case $c in get_server_list) echo 77;; get_server_status*) echo INITIALIZING;; esac", "is not ready"),
        ("read c; case $c in start*) rm -r $CUDA_MPS_PIPE_DIRECTORY;; esac", "No such file"),
    ],
    ids=["rejects", "no_daemon", "unknown_answers", "no_server", "no_server_without_clients", "folder_removed"],
)
async def test_whatever_fails_at_the_start_a_worker_runs_without_mps_and_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f"#!/bin/sh\n{program}\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(daemon, "READY_TIMEOUT_S", 0.3)
    device = CpuDevice()
    device.info = replace(device.info, device_id="GPU-0", compute_capability="9.0")
    with structlog.testing.capture_logs() as entries:
        mps, status = await open_mps(WorkerConfig(mps_pipe_dir=str(tmp_path / "m")), device, "w")
    assert mps is None and status is not None and status.state is MpsState.OFF
    assert reason in status.message
    assert [entry["reason"] for entry in entries if entry["event"] == "running without MPS"] == [status.message]
    with pytest.raises(MpsError, match=reason):
        await open_mps(WorkerConfig(mps="on", mps_pipe_dir=str(tmp_path / "on")), device, "w")


async def test_a_daemon_that_does_not_answer_is_logged_once(simulated_control: MpsControl) -> None:
    mps = Mps(simulated_control, "a", MpsLimits())
    await mps.open()
    await simulated_control.quit()
    polls = 0

    async def polled(server_pid: int) -> tuple[str, list[int]]:
        nonlocal polls
        polls += 1
        return await MpsControl.look(simulated_control, server_pid)

    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as entries:
        patch.setattr(engines, "POLL_S", 0.01)
        patch.setattr(simulated_control, "look", polled)
        watching = asyncio.create_task(mps.watch(lambda: None))
        while polls < 4:
            await asyncio.sleep(0.02)
        watching.cancel()
    assert len([entry for entry in entries if entry["log_level"] == "warning"]) == 1
    await mps.close()


async def test_one_scan_by_a_thread_serves_all(simulated_control: MpsControl, monkeypatch: pytest.MonkeyPatch) -> None:
    mps = Mps(simulated_control, "a", MpsLimits())
    await mps.open()
    running = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(3)]
    threads: list[threading.Thread] = []
    scandir = os.scandir

    def noted(path: str) -> Any:
        threads.append(threading.current_thread())
        return scandir(path)

    try:
        for engine in running:
            mps.started(engine.pid)
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", noted)
            await mps._has_fault()
            assert len(threads) == 1
            watching = asyncio.create_task(mps.watch(lambda: None))
            while len(threads) == 1:
                await asyncio.sleep(0.05)
            watching.cancel()
            await mps.detach(running[0].pid)
    finally:
        for engine in running:
            engine.kill()
            engine.wait()
            mps.ended(engine.pid)
        await mps.close()
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("which", ["base", "pipe_dir", "log"])
@pytest.mark.parametrize("wrong", ["link", "open", "file"])
async def test_a_folder_that_another_user_may_have_created_is_rejected(tmp_path: Path, which: str, wrong: str) -> None:
    control = MpsControl("GPU-0", tmp_path / "m" / "GPU-0")
    folder = {"base": control.pipe_dir.parent, "pipe_dir": control.pipe_dir, "log": control.log_dir}[which]
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    if wrong == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif wrong == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.touch()
    with pytest.raises(MpsError, match=f"{folder} (is no folder|can be written to by others)"):
        await Mps(control, "a", MpsLimits()).open()
    assert wrong != "link" or list((tmp_path / "elsewhere").iterdir()) == [], "something was created behind the link"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
async def test_another_users_folder_is_rejected(tmp_path: Path) -> None:
    control = MpsControl("GPU-0", tmp_path / "m" / "GPU-0")
    control.pipe_dir.mkdir(parents=True)
    os.chown(control.pipe_dir, 12345, 12345)
    with pytest.raises(MpsError, match="belongs to the user 12345"):
        await Mps(control, "a", MpsLimits()).open()


async def test_a_gpu_without_a_free_context_admits_no_worker(simulated_control: MpsControl) -> None:
    first, second = (Mps(simulated_control, name, MpsLimits(clients_max=1)) for name in "ab")
    await first.open()
    with pytest.raises(GpuFullError, match="has 1 of 1 MPS contexts taken"):
        await second.open()
    await second.close()
    assert await simulated_control.alive(), "the daemon is still used"
    await first.close()
    assert not await simulated_control.alive()


def batch(batch_id: int, *lease_ids: int) -> EngineBatch:
    spec = Spec(kind="k")
    return EngineBatch(batch_id, {n: Lease(n, n, 1, spec, b"") for n in lease_ids}, True, spec)


def test_the_first_of_consecutive_tasks_is_charged_for_a_lost_context() -> None:
    batches = {7: batch(7, 1, 2, 3)}
    text = "CUDA error: an illegal memory access was encountered"
    evidence = Evidence(lambda _lease_id: False, 0)
    other = (3, "ValueError", "no number", False, "")
    assert evidence.keep_back([other], one_by_one=True, reported_ns=5) == [other]
    lost = [(lease_id, "E", text, True, "") for lease_id in (1, 2)]
    assert evidence.keep_back(lost, one_by_one=True, reported_ns=5) == []
    # The next task had started when the engine was ended.
    after = SlotState(batch_id=8, lease_id=4, started_ns=6, beats=0)
    batches[8] = batch(8, 4)
    judged = evidence.judge(Death(returncode=-9, slots=[after]), batches)
    assert [report.lease.lease_id for report in judged.reports] == [1]
    assert [lease.lease_id for lease in judged.again] == [2, 3, 4]


@pytest.mark.parametrize(("known", "spared"), [(True, 10), (False, 2)])
def test_a_fault_that_names_no_client_is_charged_after_three_times(known: bool, spared: int) -> None:
    batches = {7: batch(7, 1)}
    evidence = Evidence(lambda _lease_id: False, 0)
    fault = Fault(ours=False, message="a fault", known=known)
    for _ in range(spared):
        assert evidence.judge(Death(returncode=-9, slots=[], fault=fault), batches).reports == []
    reports = evidence.judge(Death(returncode=-9, slots=[], fault=fault), batches).reports
    assert [report.error and report.error.type for report in reports] == ([] if known else ["MpsFault"])


def test_systemd_waits_for_the_slowest_end_of_an_engine() -> None:
    unit = (Path(__file__).parents[3] / "systemd/mgpu-worker@.service").read_text()
    (stop_s,) = [int(line.partition("=")[2]) for line in unit.splitlines() if line.startswith("TimeoutStopSec=")]
    config = WorkerConfig()
    # The rest is for the session and for the end of the daemon.
    assert stop_s >= config.drain_timeout_s + config.mps_terminate_timeout_s + FORCE_TIMEOUT_S + 20
