"""A task whose answer is known, to find a device that computes wrong without saying so.

Two matrices of small whole numbers are made on the device and multiplied there. All products and sums are whole numbers
below 2**24, which float32 (and TF32, whose inputs have 11 bits) holds exactly in whatever order they are added, so the
answer is known bit for bit: its checksum is written here. On a GPU the product is large enough to keep every
multiprocessor of today's busy.
"""

import importlib
import importlib.util
import os
import resource
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multigpu_worker.engines.common.subprocess_call import run_apart
from multigpu_worker.models.folders import ModelFolderError

CPU_SIZE, GPU_SIZE = 256, 2048
CHECKSUMS = {CPU_SIZE: 0xD74D3C83, GPU_SIZE: 0x30BC3C98}
# What it takes of the host's memory at most: on a GPU most of that is CUDA's own, when it is first used.
ROOM_BYTES, CUDA_ROOM_BYTES = 64 << 20, 1 << 30
# How torch says that the host's memory ran out: it has no exception for that.
_CPU_MEMORY_ERROR = "DefaultCPUAllocator"


def able(device: str, *, models: bool) -> bool:
    """Whether this process has torch, or on a GPU with models may have it in a process of its own."""
    if device == "cpu" or not models:
        return loaded()
    return importlib.util.find_spec("torch") is not None


def loaded() -> bool:
    """Whether torch has been loaded by this process."""
    return "torch" in sys.modules


def run_in_subprocess(device: str) -> tuple[bool | None, str]:
    """As `run`, in a process of its own, which ends with all that torch takes. Raises nothing."""
    with tempfile.NamedTemporaryFile() as begun:
        try:
            right, words = run_apart(f"{__name__}:answer", {"device": device, "begun": begun.name}, gpu=True)
        except (ModelFolderError, MemoryError, OSError) as error:
            # Once it was at work on the device, what ended it says that the device is not well.
            return (False if Path(begun.name).stat().st_size else None), str(error)
    return right, words


def answer(*, device: str, begun: str) -> tuple[bool | None, str]:
    """`run_in_subprocess`, in its process. `begun`: a file that is empty until the device is at work."""
    return attempt(device, lambda: Path(begun).write_text("begun", encoding="ascii"))


def attempt(device: str, begun: Callable[[], object]) -> tuple[bool | None, str]:
    """As `run`, and raises nothing. `begun` is called before the device has to work."""
    try:
        torch = load()
        reason = shortage(torch, device)
    except Exception as error:  # noqa: BLE001  memory, or an installation that doesn't work: not the device
        return None, f"torch can't be loaded: {error!r}"
    if reason:
        return None, reason
    begun()
    try:
        return run(torch, device)
    except Exception as error:  # noqa: BLE001  whatever torch raises says that the device is not well
        return False, f"it raised {type(error).__name__}: {error}"


def load() -> Any:
    """Torch. Whatever its import raises, or does to the engine, has nothing to do with the device."""
    return importlib.import_module("torch")


def shortage(torch: Any, device: str) -> str:
    """Why the engine's memory limit is too small to try it: it would end the engine. Empty: it isn't."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_bytes == resource.RLIM_INFINITY:
        return ""
    used_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * os.sysconf("SC_PAGE_SIZE")
    room_bytes = ROOM_BYTES if device == "cpu" or torch.cuda.is_initialized() else CUDA_ROOM_BYTES
    if limit_bytes - used_bytes >= room_bytes:
        return ""
    return f"the engine has {used_bytes >> 20} of its {limit_bytes >> 20} MiB, and it may take {room_bytes >> 20} MiB"


def product(torch: Any, device: str, size: int) -> Any:
    """The self-test's product, on the device, as whole numbers."""
    i = torch.arange(size, device=device, dtype=torch.int64)
    a = ((i[:, None] * 31 + i[None, :] * 17) % 13 - 6).to(torch.float32)
    b = ((i[:, None] * 7 + i[None, :] * 29) % 11 - 5).to(torch.float32)
    return (a @ b).to(torch.int32)


def checksum(answer: Any) -> int:
    return zlib.crc32(answer.cpu().numpy().tobytes())


def run(torch: Any, device: str) -> tuple[bool | None, str]:
    """Whether the device computes right, and what went wrong. None: it could not be tried. Raises what torch raises."""
    size = CPU_SIZE if device == "cpu" else GPU_SIZE
    try:
        found = checksum(product(torch, device, size))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_MEMORY_ERROR in str(error):
            return None, f"no memory for it: {error}"
        raise
    if found == CHECKSUMS[size]:
        return True, ""
    return False, f"a product of {size} x {size} has checksum {found:#010x}, and it must be {CHECKSUMS[size]:#010x}"
