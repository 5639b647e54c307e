"""The device of a CPU worker: the host's memory and load, and the energy counters of its processors.

Energy comes from RAPL in /sys/class/powercap, which most kernels let only root read. If it is unreadable, energy and
power are not reported.
"""

import contextlib
import os
import platform
import re
import time
from pathlib import Path

from multigpu_worker.device.interface import DeviceInfo, Telemetry

POWERCAP = Path("/sys/class/powercap")
# Power is computed over at least this time.
POWER_WINDOW_S = 0.1


class CpuDevice:
    visible_variable = "CUDA_VISIBLE_DEVICES"
    reports_events = False

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self.info = DeviceInfo(
            device_id="cpu", name="cpu", product=processor_name(), memory_total_bytes=meminfo()["MemTotal"]
        )
        self.visible_devices = ""
        self.engine_name = "cpu"
        self.compute_prohibited = False
        self._packages = _packages(powercap)
        # Time in seconds and energy in joules of the last power computation.
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

    def release(self) -> None:
        """A CPU has no driver."""

    def energy_joules(self) -> float | None:
        """Energy of all processors since the worker started."""
        if not self._packages:
            return None
        try:
            return sum(package.joules() for package in self._packages)
        except (OSError, ValueError):  # permissions may be revoked at run time
            return None

    def power_watts(self) -> float | None:
        return self._power(self.energy_joules())

    def _power(self, joules: float | None) -> float | None:
        """Mean power since the last computation. None at the first call."""
        if joules is None:
            return None
        now_s, (since_s, since_joules) = time.monotonic(), self._power_since
        if now_s - since_s >= POWER_WINDOW_S:
            self._power_watts = (joules - since_joules) / (now_s - since_s) if since_s else None
            self._power_since = (now_s, joules)
        return self._power_watts


class Package:
    """The energy counter of one processor, summed over its overflows."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
        self._last_uj = int(self._file.read_text(encoding="ascii"))
        self._total_uj = 0

    def joules(self) -> float:
        """Energy since the counter was opened. Raises OSError or ValueError if it is unreadable."""
        now_uj = int(self._file.read_text(encoding="ascii"))
        grown_uj = now_uj - self._last_uj
        self._total_uj += grown_uj if grown_uj >= 0 else grown_uj + self._range_uj
        self._last_uj = now_uj
        return self._total_uj / 1e6


def _packages(powercap: Path) -> list[Package]:
    """All processors' counters; empty if any of them is unreadable."""
    folders = sorted(powercap.glob("intel-rapl:[0-9]*"))  # AMD processors use this name too
    try:
        named = [f for f in folders if (f / "name").read_text(encoding="ascii").startswith("package")]
        return [Package(folder) for folder in named]
    except (OSError, ValueError):
        return []


def processor_name() -> str:
    """The model of this host's processors."""
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else platform.machine()


def host_memory_bytes() -> int:
    """Memory of this host or, if that is less, the lowest limit of this process's control groups, which a container, a
    systemd service (MemoryMax=) or a batch system sets.
    """
    return min([meminfo()["MemTotal"], *memory_limits()])


def memory_limits(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """The memory.max of this process's control group (cgroup v2) and of the groups above it, where there is a limit."""
    with contextlib.suppress(OSError):
        group = re.search(r"^0::/(.*)$", os.fsdecode(membership.read_bytes()), re.MULTILINE)
        folder = mount / group[1] if group is not None else mount
        texts = [_read(each / "memory.max") for each in (folder, *folder.parents) if each.is_relative_to(mount)]
        return [int(text) for text in texts if text.isdecimal()]
    return []


def _read(path: Path) -> str:
    """The text of a file without white space at its ends; empty if it can't be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
