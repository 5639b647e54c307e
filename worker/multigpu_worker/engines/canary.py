"""A task whose answer is known, to find a device that computes wrong without saying so.

Two matrices of small whole numbers are made on the device and multiplied there. All products and sums are whole numbers
below 2**24, which float32 (and TF32, whose inputs have 11 bits) holds exactly in whatever order they are added, so the
answer is known bit for bit: its checksum is written here. On a GPU the product is large enough to keep every
multiprocessor of today's busy.
"""

import importlib
import importlib.util
import sys
import zlib
from typing import Any

CPU_SIZE, GPU_SIZE = 256, 2048
CHECKSUMS = {CPU_SIZE: 0xD74D3C83, GPU_SIZE: 0x30BC3C98}


def able(device: str, *, models: bool) -> bool:
    """Whether this engine has torch; on a GPU with models, whether it will. It isn't loaded for the canary alone."""
    if device == "cpu" or not models:
        return "torch" in sys.modules
    return importlib.util.find_spec("torch") is not None


def product(torch: Any, device: str, size: int) -> Any:
    """The canary's product, on the device, as whole numbers."""
    i = torch.arange(size, device=device, dtype=torch.int64)
    a = ((i[:, None] * 31 + i[None, :] * 17) % 13 - 6).to(torch.float32)
    b = ((i[:, None] * 7 + i[None, :] * 29) % 11 - 5).to(torch.float32)
    return (a @ b).to(torch.int32)


def checksum(answer: Any) -> int:
    return zlib.crc32(answer.cpu().numpy().tobytes())


def sing(device: str) -> tuple[bool | None, str]:
    """Whether the device computes right, and what went wrong. None: it could not be tried. Raises what torch raises."""
    torch: Any = importlib.import_module("torch")
    size = CPU_SIZE if device == "cpu" else GPU_SIZE
    try:
        found = checksum(product(torch, device, size))
    except torch.OutOfMemoryError as error:
        return None, f"no memory for it: {error}"
    if found == CHECKSUMS[size]:
        return True, ""
    return False, f"a product of {size} x {size} has checksum {found:#010x}, and it must be {CHECKSUMS[size]:#010x}"
