"""Programs that ask a driver which doesn't answer, or answers something else than text."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from multigpu.cli.driver_calls import ask_driver
from multigpu.cli.energy import devices
from multigpu.cli.failures import Failure
from multigpu.cli.local import gpus

from tests.client.cli.doctor.checks import host_of


def nvml() -> None:
    raise RuntimeError(host_of().nvml["error"])


CALLS: dict[str, Callable[[], Any]] = {
    "doctor": nvml,
    "nvidia-smi": gpus.gpu_uuids,
    "amd": gpus.amd_gpus,
    "energy": devices.ask_host,
}


@pytest.fixture(name="program")
def program_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Replaces all programs that ask a driver by a shell script, and their time limits."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nvidia-smi"))
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)

    def replace(script: str, timeout_s: float) -> None:
        for name in ("doctor.base.NVML_TIMEOUT_S", "local.gpus.QUERY_TIMEOUT_S", "energy.devices.TIMEOUT_S"):
            monkeypatch.setattr(f"multigpu.cli.{name}", timeout_s)
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return replace


@pytest.fixture(name="unkillable")
def unkillable_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator["list[subprocess.Popen[str]]"]:
    """Children outlive kill(), as in an uninterruptible sleep, until the test ends."""
    killed: list[subprocess.Popen[str]] = []

    def kill(process: "subprocess.Popen[str]") -> None:
        killed.append(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    monkeypatch.setattr("multigpu.cli.driver_calls.KILL_TIMEOUT_S", 0.01)
    yield killed
    for process in killed:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("name", CALLS)
def test_a_program_that_cannot_be_killed_is_not_waited_for(
    program: Callable[[str, float], None], unkillable: "list[subprocess.Popen[str]]", name: str
) -> None:
    program("exec sleep 20", 0.1)
    with pytest.raises((RuntimeError, Failure), match=r"did not answer within 0\.1 s"):
        CALLS[name]()
    (process,) = unkillable
    assert process.poll() is None


@pytest.mark.parametrize("name", CALLS)
def test_output_that_is_no_text_is_an_error_of_the_driver(program: Callable[[str, float], None], name: str) -> None:
    program(r"printf 'bad \377' >&2; exit 1", 20.0)
    with pytest.raises((RuntimeError, Failure), match=r"bad \ufffd|exit status 1"):
        CALLS[name]()


def test_a_program_that_was_killed_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[subprocess.Popen[str]] = []

    def kill(process: "subprocess.Popen[str]") -> None:
        killed.append(process)
        process.send_signal(signal.SIGKILL)

    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    monkeypatch.setattr("multigpu.cli.driver_calls.KILL_TIMEOUT_S", 20.0)
    with pytest.raises(subprocess.TimeoutExpired):
        ask_driver(["sleep", "20"], 0.01)
    assert [process.returncode for process in killed] == [-signal.SIGKILL]
