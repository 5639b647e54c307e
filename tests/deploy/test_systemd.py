"""Notifications of the daemons to systemd, received by the test; the units; the log."""

import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu.daemon.systemd import Notifier

from tests.fleet import Daemon, until

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "systemd"
WATCHDOG_S = 1.0


class Listener:
    """A datagram socket and the messages it has received."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.messages: list[str] = []

    def listen(self, timeout_s: float = 0.0) -> list[str]:
        """All datagrams so far; waits for one more at most this long."""
        while select.select([self.socket], [], [], timeout_s)[0]:
            data, files, _, _ = socket.recv_fds(self.socket, 1 << 20, 1)
            for fd in files:  # what is too large for a datagram
                data += os.pread(fd, 1 << 26, 0)
                os.close(fd)
            self.messages.append(data.decode("utf-8", "replace"))
            timeout_s = 0.0
        return self.messages

    def until(self, *lines: str, since: int = 0, timeout_s: float = 90.0) -> str:
        """The first datagram, from the `since`-th on, with all of these lines."""

        def received() -> str | None:
            fit = (each for each in self.listen(0.05)[since:] if set(lines) <= set(each.splitlines()))
            return next(fit, None)

        return until(received, timeout_s, f"{lines} in {self.messages}")


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    with listener.socket:
        yield listener


def test_without_systemd_nothing_is_sent() -> None:
    silent = Notifier({})
    silent.ready("up")
    silent.alive()
    assert silent.watchdog_s == 0


def test_the_messages_of_the_protocol(listener: Listener) -> None:
    env = {"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "A": "b"}
    notifier = Notifier(env)
    assert env == {"A": "b"}, "children must not speak in its name"
    assert notifier.watchdog_s == 3
    notifier.ready("two\nlines")
    notifier.status("two\nlines")
    notifier.reload(lambda: None)
    notifier.alive()
    notifier.stopping("draining")
    messages = listener.listen()
    assert messages[0] == "READY=1\nSTATUS=two lines"
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=[0-9]+", messages[1])
    assert messages[2:] == ["READY=1", "WATCHDOG=1", "STOPPING=1\nSTATUS=draining"]


def test_a_status_that_was_not_received_is_sent_again(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    notifier.status("well")
    listener = Listener(tmp_path / "notify")
    with listener.socket:
        for _ in range(2):
            notifier.status("well")
        assert listener.listen() == ["STATUS=well"]


def test_a_watchdog_of_another_process_is_ignored(listener: Listener) -> None:
    env = {"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    assert Notifier(env).watchdog_s == 0


async def test_the_watchdog_is_fed_only_with_progress(listener: Listener) -> None:
    import asyncio

    notifier = Notifier({"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "50000"})
    moving = True
    keeping = asyncio.create_task(notifier.keep(lambda: moving, lambda: "well"))
    async with asyncio.timeout(120):
        while listener.listen().count("WATCHDOG=1") <= 2:
            await asyncio.sleep(0.01)
    moving = False
    await asyncio.sleep(0.1)
    before = listener.listen().count("WATCHDOG=1")
    await asyncio.sleep(0.3)
    assert listener.listen().count("WATCHDOG=1") == before
    keeping.cancel()


def test_a_failed_reload_does_not_end_the_daemon(listener: Listener) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(listener.path)})

    def fail() -> None:
        raise ValueError("no such level")

    notifier.reload(fail)
    assert listener.listen()[-1] == "READY=1"


@pytest.mark.slow
def test_master_and_worker_under_systemd(tmp_path: Path) -> None:
    """READY, STATUS, watchdog, reload by SIGHUP, and STOPPING of the real daemons."""
    config = tmp_path / "config.toml"
    config.write_text('[master]\nlog_level = "info"\n[worker]\nlog_level = "info"\n')
    (tmp_path / "m").mkdir()
    (tmp_path / "w").mkdir()
    listeners = {name: Listener(tmp_path / name / "notify") for name in "mw"}

    def env_of(name: str) -> dict[str, str]:
        usec = str(int(WATCHDOG_S * 1e6))
        return {"NOTIFY_SOCKET": str(listeners[name].path), "WATCHDOG_USEC": usec, "MGPU_CONFIG": str(config)}

    flags = ["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")]
    master = Daemon("multigpu_master.main", flags, tmp_path / "master.log", env_of("m"))
    worker = None
    try:
        ready = listeners["m"].until("READY=1")
        address = re.search(r"STATUS=(127\.0\.0\.1:[0-9]+): 0 workers connected, 0 unsettled tasks", ready)
        assert address, ready
        flags = ["--master", address[1], "--device", "cpu", "--worker-id", "w0"]
        worker = Daemon("multigpu_worker.main", flags, tmp_path / "worker.log", env_of("w"))
        listeners["w"].until("READY=1")
        listeners["w"].until(f"STATUS=cpu: connected to {address[1]}, 0 tasks in hand")
        listeners["m"].until(f"STATUS={address[1]}: 1 workers connected, 0 unsettled tasks")
        for name, daemon in (("m", master), ("w", worker)):
            listeners[name].until("WATCHDOG=1", since=len(listeners[name].listen()))
            assert "NOTIFY_SOCKET" not in _environment_of(*daemon.children())
            config.write_text('[master]\nlog_level = "debug"\n[worker]\nlog_level = "loud"\n')
            since = len(listeners[name].listen())
            daemon.signal(signal.SIGHUP)
            until(lambda: any("RELOADING=1" in t for t in listeners[name].listen(0.05)[since:]))  # noqa: B023
            listeners[name].until("READY=1", since=since)
        assert master.events("reloaded")
        assert "loud" in str(worker.events("reload failed: what was before stays in force"))
        for name, daemon in (("w", worker), ("m", master)):
            assert daemon.stop() == 0
            assert any("STOPPING=1" in messages for messages in listeners[name].listen())
    finally:
        for daemon in filter(None, (master, worker)):
            daemon.kill()
        for ear in listeners.values():
            ear.socket.close()


def test_a_stopped_worker_does_not_feed_its_watchdog(tmp_path: Path, listener: Listener) -> None:
    """SIGSTOP stands for a hang: systemd would restart the worker."""
    env = {"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "300000"}
    flags = ["--master", "127.0.0.1:1", "--device", "cpu", "--worker-id", "w0"]
    worker = Daemon("multigpu_worker.main", flags, tmp_path / "worker.log", env)
    try:
        listener.until("WATCHDOG=1")  # without a master, too: the watchdog is about the worker itself
        worker.signal(signal.SIGSTOP)
        time.sleep(0.3)
        received = len(listener.listen())
        time.sleep(1.0)
        assert len(listener.listen()) == received
    finally:
        worker.signal(signal.SIGCONT)
        worker.kill()


def _environment_of(*pids: int) -> str:
    return "".join(Path(f"/proc/{pid}/environ").read_text() for pid in pids)


def _lines(unit: str, key: str) -> list[str]:
    lines = (UNITS / unit).read_text().splitlines()
    return [line.removeprefix(f"{key}=") for line in lines if line.startswith(f"{key}=")]


@pytest.mark.parametrize("unit", ["mgpu-worker@.service", "mgpu-mps@.service"])
def test_units_that_use_a_gpu_start_after_its_device_nodes_exist(unit: str) -> None:
    """systemd resolves `char-nvidia-uvm` when it starts the unit; an unknown device stays closed."""
    assert "char-nvidia-uvm rw" in _lines(unit, "DeviceAllow")
    for key in ("After", "Wants"):
        assert "mgpu-devices.service" in " ".join(_lines(unit, key)).split()
    assert _lines("mgpu-devices.service", "Type") == ["oneshot"], "After= waits for its end"


def test_the_unit_of_mps_is_started_when_the_daemon_answers(tmp_path: Path) -> None:
    env = {"PATH": f"{ROOT / 'tests/fakes/mps_control'}:{os.environ['PATH']}"}
    env |= dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(tmp_path))
    (wait,) = _lines("mgpu-mps@.service", "ExecStartPost")
    (start,) = _lines("mgpu-mps@.service", "ExecStart")
    with subprocess.Popen(shlex.split(wait), env=env) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
        with subprocess.Popen(shlex.split(start), env=env) as daemon:
            assert waiting.wait(20) == 0
            daemon.terminate()


@pytest.mark.parametrize(
    ("installed", "called"),
    [
        ((), []),
        (("nvidia-smi", "nvidia-modprobe", "modprobe"), ["nvidia-smi -L", "nvidia-modprobe -u -c 0"]),
        (("nvidia-smi", "modprobe"), ["nvidia-smi -L", "modprobe nvidia-uvm"]),
    ],
)
def test_the_modules_and_device_nodes_of_a_fresh_boot(
    tmp_path: Path, installed: tuple[str, ...], called: list[str]
) -> None:
    """Runs the unit's command with programs that log their arguments."""
    log = tmp_path / "log"
    log.touch()
    for name in installed:
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{log}\n')
        (tmp_path / name).chmod(0o755)
    (command,) = _lines("mgpu-devices.service", "ExecStart")
    done = subprocess.run(shlex.split(command), env={"PATH": str(tmp_path)}, timeout=30, check=False)
    assert done.returncode == 0
    assert log.read_text().splitlines() == called


@pytest.mark.parametrize(
    ("unit", "module", "wrong"),
    [
        ("mgpu-master.service", "multigpu_master.main", {"MGPU_MASTER_LISTEN": "nonsense"}),
        ("mgpu-gateway.service", "multigpu_gateway.main", {"MGPU_GATEWAY_HTTP": "0.0.0.0:0"}),
        ("mgpu-worker@.service", "multigpu_worker.main", {"MGPU_WORKER_TOKEN_FILE": "/nonexistent/token"}),
    ],
)
def test_a_wrong_setting_does_not_restart_a_service_forever(
    tmp_path: Path, unit: str, module: str, wrong: dict[str, str]
) -> None:
    environment = {**os.environ, "MGPU_MASTER_DATA_DIR": str(tmp_path), "MGPU_WORKER_DEVICE": "cpu", **wrong}
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    (codes,) = _lines(unit, "RestartPreventExitStatus")
    assert str(done.returncode) in codes.split(), done.stderr


def test_a_service_restarts_if_its_device_is_not_usable(tmp_path: Path) -> None:
    """The device, or a file system with models, may come back."""
    (codes,) = _lines("mgpu-worker@.service", "RestartPreventExitStatus")
    for flags in (["--device", "cuda:63"], ["--device", "cpu", "--models", f"m={tmp_path / 'none'}"]):
        command = [sys.executable, "-m", "multigpu_worker.main", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode not in (0, 1), done.stderr
        assert str(done.returncode) not in codes.split(), done.stderr


LOGGER = """
import logging, os, structlog, sys
from multigpu.daemon.telemetry import configure_logging
status = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
configure_logging()
structlog.get_logger().info("ours", lease_id=3)
structlog.get_logger().debug("not this")
logging.getLogger("grpc").error("theirs")
try:
    int("why")
except ValueError:
    structlog.get_logger().exception("failed")
"""


def test_lines_for_journald_have_a_priority_and_their_fields() -> None:
    done = subprocess.run([sys.executable, "-c", LOGGER], capture_output=True, text=True, timeout=400, check=True)
    lines = [re.fullmatch(r"<(\d)>(.*)", line) for line in done.stderr.splitlines()]
    ours, theirs, failed = [(int(line[1]), json.loads(line[2])) for line in lines if line]
    assert (ours[0], ours[1]["event"], ours[1]["lease_id"]) == (6, "ours", 3)
    assert (theirs[0], theirs[1]["logger"]) == (3, "grpc")
    assert failed[0] == 3
    assert "ValueError: invalid literal" in failed[1]["exception"]
