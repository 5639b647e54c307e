"""What all checks of `mgpuctl doctor` share: a finding, and the place that is examined."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from multigpu.cli.failures import Failure
from multigpu.cli.rpc import Master
from multigpu.config import config
from multigpu.v1 import admin_service_pb2 as admin

NVML_TIMEOUT_S = 20.0
CLOCK_ROUNDS = 3


class Verdict(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    # It doesn't apply here, or can't be told.
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: Verdict
    # What was found.
    message: str
    # What to do about it. Empty unless WARN or FAIL.
    remedy: str = ""


def ok(check: str, message: str) -> list[Finding]:
    return [Finding(check=check, verdict=Verdict.OK, message=message)]


def warn(check: str, message: str, remedy: str) -> list[Finding]:
    return [Finding(check=check, verdict=Verdict.WARN, message=message, remedy=remedy)]


def fail(check: str, message: str, remedy: str) -> list[Finding]:
    return [Finding(check=check, verdict=Verdict.FAIL, message=message, remedy=remedy)]


def skip(check: str, message: str) -> list[Finding]:
    return [Finding(check=check, verdict=Verdict.SKIP, message=message)]


class Place:
    """A host, its settings, and the fleet that it belongs to. Each thing is looked at once, when first asked for."""

    def __init__(
        self,
        *,
        master_config: config.MasterConfig,
        worker_config: config.WorkerConfig,
        client_config: config.ClientConfig,
        address: str,
        master: Master | Failure,
        root: Path = Path("/"),
    ) -> None:
        """`master`: a connection, or why there can't be one. `root`: where /dev, /sys and /proc are."""
        self.master_config = master_config
        self.worker_config = worker_config
        self.client_config = client_config
        self.address = address
        self.root = root
        self._master = master

    @functools.cached_property
    def nvml(self) -> dict[str, Any]:
        """What the driver says: see doctor_nvml.survey. A driver that doesn't answer is an error, too."""
        argv = [sys.executable, "-m", "multigpu.cli.doctor.nvml"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=NVML_TIMEOUT_S, check=False)
            told = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return {"error": f"the driver did not answer within {NVML_TIMEOUT_S:g} s", "hung": True}
        except ValueError:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return {"error": f"asking the driver failed: {last}"}
        assert isinstance(told, dict)
        return told

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that the driver tells of."""
        return list(self.nvml.get("devices", ()))

    @property
    def simulated(self) -> bool:
        return "simulated" in str(self.nvml.get("driver", "")).lower()

    @functools.cached_property
    def nvidia_devices(self) -> int:
        """NVIDIA display controllers on the PCI bus, with a driver or without."""
        count = 0
        for device in (self.root / "sys/bus/pci/devices").glob("*"):
            try:
                vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            except OSError:
                continue
            count += vendor == "0x10de" and kind.startswith("0x03")
        return count

    @functools.cached_property
    def stats(self) -> admin.GetStatsResponse | Failure:
        """The master's figures, or why it has none."""
        try:
            return self.ask_stats()
        except Failure as failure:
            return failure

    @functools.cached_property
    def workers(self) -> list[admin.Worker]:
        """Every worker the master knows; empty without a master."""
        if isinstance(self.stats, Failure) or isinstance(self._master, Failure):
            return []
        return self._master.list_workers()

    def ask_stats(self) -> admin.GetStatsResponse:
        """Fresh ones. Raises Failure."""
        if isinstance(self._master, Failure):
            raise self._master
        answer = self._master.call(self._master.admin.GetStats, admin.GetStatsRequest())
        assert isinstance(answer, admin.GetStatsResponse)
        return answer


Check = Callable[[Place], list[Finding]]
