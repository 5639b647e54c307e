"""What a model takes of the device's memory: measured, or before it was ever loaded, estimated.

On a GPU it is what the driver says its processes have. On a processor it is the private memory of its processes, which
is what comes back when they end: libraries that other processes have mapped too are not in it.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from multigpu.repository import ModelSpec

from multigpu_worker.sampler import Sampler

# How much more than its files a model takes, and a process with its imports before it has any model.
FILES_FACTOR = 1.2
PROCESS_BYTES = 24 << 20
TORCH_BYTES = 250 << 20
ONNX_BYTES = 60 << 20
_SAMPLE_TIMEOUT_S = 5.0


def estimate_bytes(spec: ModelSpec, imports: Sequence[str]) -> int:
    """What a model that was never loaded here is expected to take."""
    process_bytes = PROCESS_BYTES
    if "torch" in imports:
        process_bytes = TORCH_BYTES
    elif "onnxruntime" in imports:
        process_bytes = ONNX_BYTES
    return spec.instances * (int(spec.files_bytes * FILES_FACTOR) + process_bytes)


async def measure_bytes(pids: Sequence[int], sampler: Sampler, device_bytes: int) -> int:
    """What these processes take. `device_bytes`: what they say themselves, for drivers that don't tell. 0: unknown."""
    if sampler.device.info.device_id == "cpu":
        return await asyncio.to_thread(lambda: sum(map(private_bytes, pids)))
    sample = await sampler.sample(_SAMPLE_TIMEOUT_S)
    processes = () if sample is None else sample.telemetry.processes
    told = [process.memory_used_bytes or 0 for process in processes if process.pid in pids]
    return sum(told) or device_bytes


def private_bytes(pid: int) -> int:
    """Memory that is this process's alone; 0: it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty") if name in fields)
