"""Shared by all engines on torch: types by precision, threads, TF32, and out-of-memory errors.

Importing this module takes seconds (torch), so only engine processes do, and only for a model.
"""

import contextlib
from collections.abc import Iterator

import torch

from multigpu_worker.engines.common.precision import PrecisionError

# Type of weights and activations. TF32 is float32 whose products the tensor cores round.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Out-of-memory messages of PyTorch, oneDNN and the CUDA libraries that are not torch.OutOfMemoryError.
MEMORY_ERRORS = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory",
)

# Since torch 2.11, GPUs of compute capability 9 and 10 prefer cuDNN's attention, which plans each new input shape for
# 20 to 400 ms on the host. Nearly every batch here has a new shape. The other implementations plan nothing.
torch.backends.cuda.enable_cudnn_sdp(False)


def dtype_of(precision: str) -> torch.dtype:
    """The type for a resolved precision. Raises PrecisionError."""
    if precision not in DTYPES:
        raise PrecisionError(
            f"the torch engine has no {precision}: use engine onnx or tensorrt, which calibrate and check it, "
            f"or one of {', '.join(DTYPES)}"
        )
    return DTYPES[precision]


def bind(threads: int, *, tf32: bool) -> None:
    """Prepare the calling thread for a forward pass.

    OpenMP keeps the number of threads for each thread that starts parallel work. torch keeps TF32 for the whole
    process, which may hold models of several precisions.
    """
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if torch.version.cuda is not None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError for all of torch's out-of-memory errors."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in MEMORY_ERRORS):
            raise MemoryError(str(error)) from error
        raise
