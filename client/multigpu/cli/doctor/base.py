"""What the checks of `mgpuctl doctor` share: findings, and the host that is examined."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from multigpu import AdminClient
from multigpu.cli.driver_calls import ask_driver
from multigpu.cli.failures import Failure
from multigpu.cli.sdk_errors import failures
from multigpu.config import config
from multigpu.fleet import Stats, Worker, WorkerState

NVML_TIMEOUT_S = 20.0


class Verdict(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    # Not applicable, or unknown.
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: Verdict
    message: str
    # What to do. Empty unless WARN or FAIL.
    remedy: str = ""


class SkipCheck(Exception):  # noqa: N818  it is no error
    """The check does not apply here. The message says why."""


def ok(check: str, message: str) -> Finding:
    return Finding(check=check, verdict=Verdict.OK, message=message)


def warn(check: str, message: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARN, message=message, remedy=remedy)


def fail(check: str, message: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.FAIL, message=message, remedy=remedy)


def skip(check: str, message: str) -> Finding:
    return Finding(check=check, verdict=Verdict.SKIP, message=message)


@dataclass(kw_only=True)
class Host:
    """A host, its settings, and its fleet. Each fact is looked up once, when a check needs it."""

    master_config: config.MasterConfig
    worker_config: config.WorkerConfig
    client_config: config.ClientConfig
    # A connection, or why there can't be one.
    master: AdminClient | Failure
    # Where /dev, /sys and /proc are.
    root: Path = Path("/")

    @functools.cached_property
    def nvml(self) -> dict[str, Any]:
        """See nvml.survey. A driver that doesn't answer is an error, too."""
        argv = [sys.executable, "-m", "multigpu.cli.doctor.nvml"]
        try:
            done = ask_driver(argv, NVML_TIMEOUT_S)
            found = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return {"error": f"the driver did not answer within {NVML_TIMEOUT_S:g} s", "hung": True}
        except ValueError:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return {"error": f"the driver's check failed: {last}"}
        assert isinstance(found, dict)
        return found

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that the driver lists."""
        return list(self.nvml.get("devices", ()))

    @property
    def simulated(self) -> bool:
        return "simulated" in str(self.nvml.get("driver", "")).lower()

    @functools.cached_property
    def nvidia_devices(self) -> int:
        """NVIDIA display controllers on the PCI bus, with or without a driver."""
        count = 0
        for device in (self.root / "sys/bus/pci/devices").glob("*"):
            try:
                vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            except OSError:
                continue
            count += vendor == "0x10de" and kind.startswith("0x03")
        return count

    def ask_stats(self) -> Stats:
        """New stats of the master. Raises Failure."""
        if isinstance(self.master, Failure):
            raise self.master
        with failures():
            return self.master.stats()

    @functools.cached_property
    def stats_or_failure(self) -> Stats | Failure:
        try:
            return self.ask_stats()
        except Failure as failure:
            return failure

    @property
    def stats(self) -> Stats:
        """Raises SkipCheck if no master answers."""
        if isinstance(self.stats_or_failure, Failure):
            raise SkipCheck("no master answers")
        return self.stats_or_failure

    @property
    def admin(self) -> AdminClient:
        """Raises SkipCheck if no master answers."""
        assert self.stats is not None
        assert isinstance(self.master, AdminClient)
        return self.master

    @functools.cached_property
    def workers(self) -> list[Worker]:
        """Every worker that the master knows. Raises SkipCheck if no master answers."""
        with failures():
            return self.admin.list_workers()

    @property
    def connected(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.state is not WorkerState.LOST]


Check = Callable[[Host], Finding | list[Finding]]
