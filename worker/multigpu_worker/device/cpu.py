"""The device of a CPU worker: the host's memory and load. Its energy is not measured."""

import os
import platform
import re
from pathlib import Path

from multigpu_worker.device.interface import DeviceInfo, Telemetry


class CpuDevice:
    def __init__(self) -> None:
        self.info = DeviceInfo(
            device_id="cpu", name="cpu", product=_processor_name(), memory_total_bytes=meminfo()["MemTotal"]
        )
        self.visible_devices = ""
        self.engine_name = "cpu"
        self.compute_prohibited = False

    def sample(self) -> Telemetry:
        memory = meminfo()
        return Telemetry(
            memory_total_bytes=memory["MemTotal"],
            memory_used_bytes=memory["MemTotal"] - memory["MemAvailable"],
            utilization=min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)),
        )

    def energy_joules(self) -> float | None:
        return None

    def power_watts(self) -> float | None:
        return None


def _processor_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else platform.machine()


def host_memory_bytes() -> int:
    """Memory of this host, or of our control group if that is less."""
    total_bytes = meminfo()["MemTotal"]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total_bytes
    return total_bytes if limit == "max" else min(total_bytes, int(limit))


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
