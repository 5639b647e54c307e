"""What every engine on torch needs: types by name, threads, TF32, and how torch says that memory ran out.

Importing this module takes seconds (torch), so only engine processes do, and only when there is something to run.
"""

import contextlib
from collections.abc import Iterator

import torch

from multigpu_worker.engines.common.precision import PrecisionError

# What a precision's weights and activations are. TF32 is float32 whose products are rounded by the tensor cores.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# How PyTorch, oneDNN and CUDA's libraries say that memory ran out, beside torch's exception for its allocator on a GPU.
MEMORY_ERRORS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory",
)

# From torch 2.11 on, GPUs of compute capability 9 and 10 take cuDNN's attention first, which makes a plan for each new
# shape of its inputs: 20 to 400 ms of the host. With us nearly every batch has a shape of its own. Others make none.
torch.backends.cuda.enable_cudnn_sdp(False)


def dtype_of(precision: str) -> torch.dtype:
    """The type for a precision that `choose` has decided on. Raises PrecisionError."""
    if precision not in DTYPES:
        raise PrecisionError(
            f"the torch engine has no {precision}: use engine onnx or tensorrt, which calibrate and check it, "
            f"or one of {', '.join(DTYPES)}"
        )
    return DTYPES[precision]


def bind(threads: int, *, tf32: bool) -> None:
    """Set the calling thread up for a forward pass.

    The threads: OpenMP keeps their number for each thread that starts parallel work. TF32: torch keeps it for the
    process, in which models of several precisions may be loaded.
    """
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if torch.version.cuda is not None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Say MemoryError where torch says it in its own ways."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in MEMORY_ERRORS):
            raise MemoryError(str(error)) from error
        raise
