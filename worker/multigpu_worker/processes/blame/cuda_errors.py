"""What an error's text says about the CUDA context.

After some errors the context is lost: every later CUDA call of the process fails, so the engine process has to be
replaced. The patterns are the texts of cudaGetErrorString, as torch and others pass them on.
"""

import re

_LOST = re.compile(
    r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction|invalid program counter"
    r"|device-side assert|hardware stack error|launch timed out|uncorrectable ECC error|address space"
    r"|CUDA_ERROR_(ILLEGAL_|MISALIGNED_|LAUNCH_FAILED|LAUNCH_TIMEOUT|INVALID_PC|HARDWARE_STACK|ECC_UNCORRECTABLE|ASSERT)",
    re.IGNORECASE,
)
# Not caused by the task that ran.
_HARDWARE = re.compile(
    r"uncorrectable (ECC|NVLink) error|CUDA_ERROR_(ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|CONTAINED)"
    r"|cudaError(ECCUncorrectable|NvlinkUncorrectable|Contained)",
    re.IGNORECASE,
)
_MPS = re.compile(r"\bMPS (server|client)|CUDA_ERROR_MPS_|cudaErrorMps", re.IGNORECASE)


def context_is_lost(text: str) -> bool:
    """Whether the error leaves its process without CUDA."""
    return "cuda" in text.lower() and any(words.search(text) is not None for words in (_LOST, _MPS, _HARDWARE))


def hardware_failed(text: str) -> bool:
    """Whether it is an error of the device's memory or links."""
    return _HARDWARE.search(text) is not None


def mps_rejected(text: str) -> bool:
    """Whether it comes from the state of the GPU's MPS server, and not from the task that ran."""
    return _MPS.search(text) is not None
