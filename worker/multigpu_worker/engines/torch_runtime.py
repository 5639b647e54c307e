"""What every engine on torch needs: types by name, threads, TF32, and how torch says that memory ran out.

Importing this module takes seconds (torch), so only engine processes do, and only when there is something to run.
"""

import contextlib
from collections.abc import Iterator

import torch

from multigpu_worker.engines.precision import PrecisionError

# What a precision's weights and activations are. TF32 is float32 whose products are rounded by the tensor cores.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# How PyTorch's allocator and oneDNN say that memory ran out on the CPU: neither has an exception for it.
CPU_MEMORY_ERRORS = (
    "DefaultCPUAllocator",
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory",
)


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
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in CPU_MEMORY_ERRORS):
            raise MemoryError(str(error)) from error
        raise
