"""A CPU worker's device: the host's memory and load, and the energy of its processors where the kernel lets us read it.

Energy comes from RAPL through /sys/class/powercap, which most kernels show to root only: then it is absent.
"""

import os
import platform
import re
import time
from pathlib import Path

from multigpu_worker.device.interface import DeviceInfo, Telemetry, meminfo

POWERCAP = Path("/sys/class/powercap")
# Power is the energy between two samples; closer ones say too little.
POWER_WINDOW_S = 0.1


class CpuDevice:
    def __init__(self, powercap: Path = POWERCAP) -> None:
        self.info = DeviceInfo(
            device_id="cpu", name="cpu", product=_processor_name(), memory_total_bytes=meminfo()["MemTotal"]
        )
        self.visible_devices = ""
        self.engine_name = "cpu"
        self.compute_prohibited = False
        self._packages = [Package(folder) for folder in _packages(powercap)]
        # When power was last told, the energy then, and the power told, in seconds, joules and watts.
        self._power_since = (0.0, 0.0)
        self._power_watts: float | None = None

    def sample(self) -> Telemetry:
        memory = meminfo()
        joules = self.energy_joules()
        return Telemetry(
            memory_total_bytes=memory["MemTotal"],
            memory_used_bytes=memory["MemTotal"] - memory["MemAvailable"],
            utilization=min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)),
            power_watts=self._power(joules),
            energy_joules=joules,
        )

    def energy_joules(self) -> float | None:
        """Of all processors, since this worker began."""
        if not self._packages:
            return None
        try:
            return sum(package.joules() for package in self._packages)
        except (OSError, ValueError):  # the kernel takes it away from us
            return None

    def power_watts(self) -> float | None:
        return self._power(self.energy_joules())

    def _power(self, joules: float | None) -> float | None:
        """The mean power since the last sample; None at the first one."""
        if joules is None:
            return None
        now_s, (since_s, since_joules) = time.monotonic(), self._power_since
        if now_s - since_s >= POWER_WINDOW_S:
            self._power_watts = (joules - since_joules) / (now_s - since_s) if since_s else None
            self._power_since = (now_s, joules)
        return self._power_watts


class Package:
    """The energy counter of one processor, put together over its overflows."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
        self._last_uj = int(self._file.read_text(encoding="ascii"))
        self._total_uj = 0

    def joules(self) -> float:
        """Since we began. OSError, ValueError: it can't be read."""
        now_uj = int(self._file.read_text(encoding="ascii"))
        grown_uj = now_uj - self._last_uj
        self._total_uj += grown_uj if grown_uj >= 0 else grown_uj + self._range_uj
        self._last_uj = now_uj
        return self._total_uj / 1e6


def _packages(powercap: Path) -> list[Path]:
    """The folders of the processors' counters; empty if there are none that we may read."""
    found = sorted(powercap.glob("intel-rapl:[0-9]*"))  # AMD's are called so too
    try:
        packages = [
            folder
            for folder in found
            if (folder / "name").read_text(encoding="ascii").startswith("package") and Package(folder)
        ]
    except (OSError, ValueError):
        return []
    return packages


def _processor_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else platform.machine()
