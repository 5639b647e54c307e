"""The parts of MPS: server log, control, limits, and the blame for faults."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from multigpu.config.config import WorkerConfig
from multigpu_worker.device.cpu import CpuDevice
from multigpu_worker.mps import engines
from multigpu_worker.mps.control import PROGRAM, MpsControl, MpsError, MpsState, ServerLog
from multigpu_worker.mps.engines import FORCE_TIMEOUT_S, Fault, Mps, MpsLimits
from multigpu_worker.mps.setup import clients_max, open_mps, pipe_dir
from multigpu_worker.processes.batch import EngineBatch
from multigpu_worker.processes.blame.evidence import Evidence
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.ipc.slots import SlotState
from multigpu_worker.session.lease import Lease, Spec

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


@pytest.mark.parametrize(("cuda", "contexts"), [("12.9", 48), ("13.0", 48), ("13.1", 60), ("14.0", 60), ("", 48)])
def test_the_limit_on_client_contexts(cuda: str, contexts: int) -> None:
    assert clients_max(cuda) == contexts


async def test_mps_is_rejected_on_a_cpu_and_with_a_long_path() -> None:
    cpu = CpuDevice()
    assert await open_mps(WorkerConfig(), cpu) == (None, None)
    with pytest.raises(MpsError, match="set mps to auto or off"):
        await open_mps(WorkerConfig(mps="on"), cpu)
    with pytest.raises(MpsError, match="mps_pipe_dir to a shorter one"):
        pipe_dir(WorkerConfig(mps_pipe_dir="/" + "x" * 80), "GPU-00000000-0000-0000-0000-000000000000")


@pytest.fixture
async def simulated_control(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MpsControl]:
    """A GPU's pipe directory, without a daemon."""
    monkeypatch.setenv("PATH", f"{FAKE}:{Path(sys.executable).parent}:/usr/bin:/bin")
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        control = MpsControl("GPU-0", Path(folder, "m ps", "GPU-0"))
        control.log_dir.mkdir(parents=True)
        yield control


@pytest.fixture
async def running_control(simulated_control: MpsControl) -> AsyncIterator[MpsControl]:
    """With a daemon."""
    env = {**os.environ, **simulated_control.environment()}
    with subprocess.Popen([PROGRAM, "-f"], env=env) as daemon:
        while not (simulated_control.pipe_dir / "control").exists():
            await asyncio.sleep(0.01)
        yield simulated_control
        daemon.terminate()  # its server follows


async def test_the_command_that_the_error_names_starts_the_daemon(
    simulated_control: MpsControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_control.log_dir.rmdir()
    with pytest.raises(MpsError, match=r"Cannot find MPS control daemon.* systemctl start mgpu-mps@GPU-0") as raised:
        await simulated_control.servers()
    subprocess.run(str(raised.value).partition("without systemd ")[2], shell=True, check=True, timeout=20)
    assert await simulated_control.servers() == []
    await simulated_control.ask("quit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsError, match="comes with NVIDIA's driver"):
        await simulated_control.servers()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("exit 1", "failed: exit code 1.* systemctl start mgpu-mps@GPU-0"),
        ("echo servers: none", "in a format that this worker doesn't know"),
        (
            "read c; case $c in get_server_list) echo 7;; *) echo busy;; esac",
            "in a format that this worker doesn't",
        ),
    ],
    ids=["no_daemon", "unknown_servers", "unknown_state"],
)
async def test_whatever_fails_at_the_start_a_worker_runs_without_mps_and_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f"#!/bin/sh\n{program}\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with structlog.testing.capture_logs() as entries:
        mps, status = await open_mps(WorkerConfig(mps_pipe_dir=str(tmp_path / "m")), gpu())
    assert mps is None and status is not None and status.state is MpsState.OFF
    assert re.search(reason, status.message)
    assert [entry["reason"] for entry in entries if entry["event"] == "running without MPS"] == [status.message]
    with pytest.raises(MpsError, match=reason):
        await open_mps(WorkerConfig(mps="on", mps_pipe_dir=str(tmp_path / "m")), gpu())


def gpu() -> CpuDevice:
    device = CpuDevice()
    device.info = replace(device.info, device_id="GPU-0", compute_capability="9.0")
    return device


async def test_a_daemon_that_does_not_answer_is_logged_once(simulated_control: MpsControl) -> None:
    mps = Mps(simulated_control, MpsLimits())
    polls = 0

    async def polled() -> list[int]:
        nonlocal polls
        polls += 1
        return await MpsControl.servers(simulated_control)

    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as entries:
        patch.setattr(engines, "POLL_S", 0.01)
        patch.setattr(simulated_control, "servers", polled)
        watching = asyncio.create_task(mps.watch(lambda: None))
        while polls < 4:
            await asyncio.sleep(0.02)
        watching.cancel()
    assert len([entry for entry in entries if entry["log_level"] == "warning"]) == 1


async def test_one_scan_by_a_thread_serves_all(running_control: MpsControl, monkeypatch: pytest.MonkeyPatch) -> None:
    mps = Mps(running_control, MpsLimits())
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
    assert threading.main_thread() not in threads


@contextlib.contextmanager
def client(control: MpsControl) -> Iterator[None]:
    """A process that is a client of the daemon."""
    code = "from simulated_mps import Client; client = Client(); print(flush=True); input(); client.excuse()"
    env = {**os.environ, **control.environment(), "PYTHONPATH": str(FAKE)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"\n"
        yield
        process.stdin.write(b"\n")


async def test_a_server_that_was_replaced_while_no_engine_used_it(running_control: MpsControl) -> None:
    with client(running_control):
        pass
    mps = Mps(running_control, MpsLimits())
    await mps.wait_until_ready()
    (server_pid,) = await running_control.servers()
    await running_control.shut_down_server(server_pid)
    with client(running_control):
        assert not await mps._has_fault()
        assert mps.status.clients == 1


async def test_a_pipe_directory_that_others_can_write_to_is_rejected(running_control: MpsControl) -> None:
    config = WorkerConfig(mps="on", mps_pipe_dir=str(running_control.pipe_dir.parent))
    mps, _ = await open_mps(config, gpu())
    assert mps is not None
    running_control.pipe_dir.chmod(0o777)
    with pytest.raises(MpsError, match="can be written to by others"):
        await open_mps(config, gpu())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
async def test_another_users_pipe_directory_is_rejected(running_control: MpsControl) -> None:
    os.chown(running_control.pipe_dir, 12345, 12345)
    with pytest.raises(MpsError, match="belongs to the user 12345"):
        await open_mps(WorkerConfig(mps="on", mps_pipe_dir=str(running_control.pipe_dir.parent)), gpu())


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
    fault = Fault(ours=False, message="a fault", cause_known=known)
    for _ in range(spared):
        assert evidence.judge(Death(returncode=-9, slots=[], fault=fault), batches).reports == []
    reports = evidence.judge(Death(returncode=-9, slots=[], fault=fault), batches).reports
    assert [report.error and report.error.type for report in reports] == ([] if known else ["MpsFault"])


def test_systemd_waits_for_the_slowest_end_of_an_engine() -> None:
    unit = (Path(__file__).parents[3] / "systemd/mgpu-worker@.service").read_text()
    (stop_s,) = [int(line.partition("=")[2]) for line in unit.splitlines() if line.startswith("TimeoutStopSec=")]
    config = WorkerConfig()
    # The rest is for the session.
    assert stop_s >= config.drain_timeout_s + config.mps_terminate_timeout_s + FORCE_TIMEOUT_S + 20
