"""Device memory, copies and a CUDA stream for TensorRT, which provides none of these.

They come from torch if it is installed with CUDA, so that both share one memory pool; else from pycuda. Copies go
through page-locked memory, so they overlap with computation.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.tensorrt.module import EngineUnavailableError

Array = npt.NDArray[Any]


class DeviceMemory(Protocol):
    """One CUDA stream. Used by one thread at a time, within `current`."""

    @property
    def stream(self) -> int:
        """The handle of the CUDA stream, which is not the default one."""

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make this GPU and stream current for the calling thread, and raise MemoryError if memory runs out."""

    def empty(self, size_bytes: int) -> Any:
        """Allocate a buffer on the device, freed with the object."""

    def address(self, buffer: Any) -> int: ...

    def upload(self, array: Array, buffer: Any) -> None:
        """Start to copy an array into a buffer of at least its size."""

    def download(self, buffer: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Start to copy a buffer into a new array, which is complete after waiting for a later mark."""

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for everything started so far. Any thread may call it, once."""

    def trim(self) -> None:
        """Free unused memory that is kept for reuse."""


class TorchMemory:
    def __init__(self) -> None:
        import torch  # noqa: PLC0415  (takes seconds)

        self._torch = torch
        # An engine process sees one GPU.
        self._device = torch.device("cuda:0")
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        from multigpu_worker.engines.common.torch_runtime import memory_errors  # noqa: PLC0415  (imports torch)

        self._memory_errors = memory_errors

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self._memory_errors(), self._torch.cuda.device(self._device), self._torch.cuda.stream(self._stream):
            yield

    def empty(self, size_bytes: int) -> Any:
        return self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self._device)

    def address(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def upload(self, array: Array, buffer: Any) -> None:
        # torch keeps the page-locked memory until the copy is done.
        staged = self._torch.from_numpy(_bytes_of(array)).pin_memory()
        buffer[: array.nbytes].copy_(staged, non_blocking=True)

    def download(self, buffer: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        size_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        staged = self._torch.empty(size_bytes, dtype=self._torch.uint8, pin_memory=True)
        staged.copy_(buffer[:size_bytes], non_blocking=True)
        array: Array = staged.numpy().view(dtype).reshape(shape)
        return array

    def mark(self) -> Callable[[], None]:
        event: Any = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)

        def wait() -> None:
            event.synchronize()

        return wait

    def trim(self) -> None:
        self._torch.cuda.empty_cache()


class PycudaBuffer:
    """Device memory that any thread may free."""

    def __init__(self, memory: "PycudaMemory", allocation: Any) -> None:
        self._memory = memory
        self.allocation = allocation

    def __del__(self) -> None:
        with self._memory.current():
            self.allocation.free()


class PycudaMemory:
    """pycuda silently leaks what a thread frees while the context is not current in that thread.

    Page-locked memory and events are therefore reused and never leave this class.
    """

    def __init__(self) -> None:
        import pycuda.driver as cuda  # noqa: PLC0415  (needs the driver)

        self._cuda = cuda
        cuda.init()
        # TensorRT uses the primary context too.
        self._context = cuda.Device(0).retain_primary_context()
        with self.current():
            self._stream = cuda.Stream()
        # Unused page-locked arrays by size, and unused events.
        self._free: dict[int, list[Array]] = {}
        self._events: list[Any] = []
        # Page-locked arrays in use since the last mark, and the arrays to copy them to.
        self._staged: list[tuple[Array, Array | None]] = []

    @property
    def stream(self) -> int:
        return int(self._stream.handle)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self._context.push()
        try:
            yield
        except self._cuda.MemoryError as error:
            raise MemoryError(str(error)) from error
        finally:
            self._cuda.Context.pop()

    def empty(self, size_bytes: int) -> Any:
        return PycudaBuffer(self, self._cuda.mem_alloc(size_bytes))

    def address(self, buffer: Any) -> int:
        return int(buffer.allocation)

    def upload(self, array: Array, buffer: Any) -> None:
        if array.nbytes:
            staged = self._stage(array.nbytes, None)
            staged[:] = _bytes_of(array)
            self._cuda.memcpy_htod_async(buffer.allocation, staged, self._stream)

    def download(self, buffer: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        array: Array = np.empty(shape, dtype)
        if array.nbytes:
            staged = self._stage(array.nbytes, array)
            self._cuda.memcpy_dtoh_async(staged, buffer.allocation, self._stream)
        return array

    def _stage(self, size_bytes: int, target: Array | None) -> Array:
        """Reserve page-locked memory until the next mark has been waited for."""
        whole_bytes = 1 << max(12, (size_bytes - 1).bit_length())
        free = self._free.setdefault(whole_bytes, [])
        whole: Array = free.pop() if free else self._cuda.pagelocked_empty(whole_bytes, np.uint8)
        self._staged.append((whole, target))
        return whole[:size_bytes]

    def mark(self) -> Callable[[], None]:
        event = self._events.pop() if self._events else self._cuda.Event()
        event.record(self._stream)
        staged, self._staged = self._staged, []

        def wait() -> None:
            with self.current():
                event.synchronize()
            self._events.append(event)
            for whole, target in staged:
                if target is not None:
                    _bytes_of(target)[:] = whole[: target.nbytes]
                self._free[len(whole)].append(whole)

        return wait

    def trim(self) -> None:
        """Nothing to do: pycuda keeps no unused memory."""


def open_memory() -> DeviceMemory:
    """Open the GPU's memory with torch or pycuda. Raises EngineUnavailableError if neither is installed."""
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: PLC0415  (takes seconds)

        if torch.cuda.is_available():
            return TorchMemory()
    if importlib.util.find_spec("pycuda") is not None:
        return PycudaMemory()
    raise EngineUnavailableError(
        "nothing here manages a GPU's memory: install torch with CUDA, or pycuda (the extra multigpu[gpu] has both)"
    )


def _bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
