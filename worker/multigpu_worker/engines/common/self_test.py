"""A computation whose result is known, to find a device that computes wrong without reporting an error.

It multiplies two matrices of small whole numbers, made on the device. All products and sums stay below 2**24, which
float32 (and TF32, whose inputs have 11 bits) holds exactly in any order of addition. So the checksum of the result is
known. On a GPU the matrices are large enough to use every multiprocessor.
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

from multigpu_worker.engines.common.cuda_errors import caused_elsewhere, device_is_occupied
from multigpu_worker.engines.common.subprocess_call import SubprocessDiedError, subprocess_call

CPU_SIZE, GPU_SIZE = 256, 2048
CHECKSUMS = {CPU_SIZE: 0xD74D3C83, GPU_SIZE: 0x30BC3C98}
# Host memory it may take. On a GPU most of it is for the creation of the CUDA context.
MEMORY_BYTES, CUDA_MEMORY_BYTES = 64 << 20, 1 << 30
# torch has no exception for the host's memory running out.
_CPU_MEMORY_ERROR = "DefaultCPUAllocator"


def able(device: str, *, models: bool) -> bool:
    """Whether this process has loaded torch, or a worker with models can load it in a subprocess for its GPU."""
    if device == "cpu" or not models:
        return loaded()
    return importlib.util.find_spec("torch") is not None


def loaded() -> bool:
    """Whether this process has loaded torch."""
    return "torch" in sys.modules


def run_in_subprocess(device: str) -> tuple[bool | None, str]:
    """As `attempt`, in a subprocess, which frees everything that torch takes. Raises nothing."""
    try:
        with tempfile.NamedTemporaryFile() as begun:
            try:
                right, message = subprocess_call(
                    f"{__name__}:answer", {"device": device, "begun": begun.name}, gpu=True
                )
            except SubprocessDiedError as error:
                # Only a crash after it began to use the device says that the device is at fault.
                return (False if error.crashed and Path(begun.name).stat().st_size else None), str(error)
    except Exception as error:  # noqa: BLE001  no memory, a full disk: not the device
        return None, str(error)
    return right, message


def answer(*, device: str, begun: str) -> tuple[bool | None, str]:
    """Run in the subprocess. `begun`: a file that is empty until the device is used."""
    return attempt(device, lambda: Path(begun).write_text("begun", encoding="ascii"))


def attempt(device: str, begun: Callable[[], object]) -> tuple[bool | None, str]:
    """As `run`, but raises nothing; None: not tested. Calls `begun` before it uses the device."""
    try:
        torch = load()
        message = shortage(torch, device)
    except Exception as error:  # noqa: BLE001  memory, or a broken installation: not the device
        return None, f"torch can't be loaded: {error!r}"
    if message:
        return None, message
    begun()
    try:
        return run(torch, device)
    except Exception as error:  # noqa: BLE001  whatever else torch raises, the device is not well
        text = str(error)
        if isinstance(error, MemoryError) or _CPU_MEMORY_ERROR in text:
            return None, f"no memory for it: {text}"
        if device_is_occupied(text) or caused_elsewhere(text):
            return None, f"the device has no memory or no place for it: {text}"
        return False, f"it raised {type(error).__name__}: {text}"


def load() -> Any:
    """Import torch. A failure of the import says nothing about the device."""
    return importlib.import_module("torch")


def shortage(torch: Any, device: str) -> str:
    """Why the engine's memory limit is too small for the self-test, which would end the engine. Empty: large enough."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_bytes == resource.RLIM_INFINITY:
        return ""
    used_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * os.sysconf("SC_PAGE_SIZE")
    needed_bytes = MEMORY_BYTES if device == "cpu" or torch.cuda.is_initialized() else CUDA_MEMORY_BYTES
    if limit_bytes - used_bytes >= needed_bytes:
        return ""
    return f"the engine has {used_bytes >> 20} of its {limit_bytes >> 20} MiB, and it may take {needed_bytes >> 20} MiB"


def product(torch: Any, device: str, size: int) -> Any:
    """The product, computed on the device, as whole numbers."""
    i = torch.arange(size, device=device, dtype=torch.int64)
    a = ((i[:, None] * 31 + i[None, :] * 17) % 13 - 6).to(torch.float32)
    b = ((i[:, None] * 7 + i[None, :] * 29) % 11 - 5).to(torch.float32)
    return (a @ b).to(torch.int32)


def checksum(answer: Any) -> int:
    return zlib.crc32(answer.cpu().numpy().tobytes())


def run(torch: Any, device: str) -> tuple[bool | None, str]:
    """Whether the device, or on GPUs each that the worker has, computes right, and what is wrong. Raises what torch
    raises.
    """
    others = 0 if device == "cpu" else torch.cuda.device_count()
    devices = [device, *(f"cuda:{index}" for index in range(1, others))]
    for each in devices:
        right, message = run_on(torch, each)
        if not right:
            return False, message if len(devices) == 1 else f"{each}: {message}"
    return True, ""


def run_on(torch: Any, device: str) -> tuple[bool, str]:
    """As `run`, of one device."""
    size = CPU_SIZE if device == "cpu" else GPU_SIZE
    found = checksum(product(torch, device, size))
    if found == CHECKSUMS[size]:
        return True, ""
    return False, f"a product of {size} x {size} has checksum {found:#010x}, and it must be {CHECKSUMS[size]:#010x}"
