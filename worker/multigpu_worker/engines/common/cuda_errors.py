"""What an error's text says about the CUDA (or HIP) context and the device.

After some errors the context is lost: every later CUDA call of the process fails, so the engine process has to be
replaced. The patterns are the texts of cudaGetErrorString and the names of status codes, as torch, ONNX Runtime,
TensorRT and pycuda pass them on.
"""

import re

# The error comes from CUDA or HIP, whose texts are the same; "cuMemAlloc failed" is pycuda's form.
_CUDA = re.compile(
    r"(?i:cuda|cudnn|cublas|cufft|cusolver|cusparse|hipError|hipBLAS|rocBLAS|MIOpen)|\bHIP (error|out of memory)"
    r"|\bcu[A-Z]\w+ failed|\bError Code \d+: OutOfMemory"
)
# Torch ends every CUDA error with advice about "device-side assertions".
_LOST = re.compile(
    r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction|invalid program counter"
    r"|device-side assert\b|hardware stack error|launch timed out|uncorrectable ECC error|address space|unknown error"
    r"|CU(BLAS|DNN|FFT|SOLVER|SPARSE)_(STATUS_)?EXEC(UTION)?_FAILED|Platform \(Cuda\) error"
    r"|CUDA_ERROR_(ILLEGAL_|MISALIGNED_|LAUNCH_FAILED|LAUNCH_TIMEOUT|INVALID_PC|HARDWARE_STACK|ECC_UNCORRECTABLE|ASSERT"
    r"|UNKNOWN)",
    re.IGNORECASE,
)
# Not caused by the task that ran.
_HARDWARE = re.compile(
    r"uncorrectable (ECC|NVLink) error|CUDA_ERROR_(ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE)"
    r"|cudaError(ECCUncorrectable|NvlinkUncorrectable)|hipErrorECCNotCorrectable",
    re.IGNORECASE,
)
_ELSEWHERE = re.compile(
    r"\bMPS (server|client)|CUDA_ERROR_(MPS_|CONTAINED)|cudaError(Mps|Contained)|invalid access of peer GPU memory",
    re.IGNORECASE,
)
# A library's handle needs memory: without it, cuBLAS and cuDNN say that they are not initialized.
_OCCUPIED = re.compile(
    r"out[ _]?of[ _]?memory|_ALLOC_FAILED|_STATUS_NOT_INITIALIZED|busy or unavailable|exclusive-(thread|process)",
    re.IGNORECASE,
)


def context_is_lost(text: str) -> bool:
    """Whether the error leaves its process without CUDA."""
    return any(_of_cuda(words, text) for words in (_LOST, _ELSEWHERE, _HARDWARE))


def hardware_failed(text: str) -> bool:
    """Whether it is an error of the device's memory or links that only a reset repairs."""
    return _of_cuda(_HARDWARE, text)


def caused_elsewhere(text: str) -> bool:
    """Whether the GPU's MPS server or a contained error, of which the device is fit, caused it; not the task."""
    return _of_cuda(_ELSEWHERE, text)


def device_is_occupied(text: str) -> bool:
    """Whether other processes leave too little of the device's memory, or no place for one more."""
    return _of_cuda(_OCCUPIED, text)


def _of_cuda(words: re.Pattern[str], text: str) -> bool:
    return _CUDA.search(text) is not None and words.search(text) is not None
