"""As much of pycuda.driver as moves arrays, in the host's memory, and as strict as pycuda is where nobody looks.

What a thread lets go of while the context isn't current there, pycuda doesn't give back unless that thread made the
context, and says nothing: here that is counted. Copies to the host arrive when their event is waited for.
"""

import builtins
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

MemoryError = type("MemoryError", (builtins.MemoryError,), {})  # noqa: A001  (pycuda's name)
lost: list[str] = []
held = {"page-locked": 0, "event": 0, "device": 0}
_current = threading.local()


def _depth() -> int:
    return int(getattr(_current, "depth", 0))


def _gone(what: str) -> None:
    held[what] -= 1
    if not _depth():
        lost.append(what)


def _made(what: str) -> None:
    assert _depth(), "no context is current"
    held[what] += 1


def init() -> None: ...


class Context:
    def push(self) -> None:
        _current.depth = _depth() + 1

    @staticmethod
    def pop() -> None:
        _current.depth -= 1


class Device:
    def __init__(self, index: int) -> None:
        assert index == 0

    def retain_primary_context(self) -> Context:
        return Context()


class Stream:
    def __init__(self) -> None:
        self.handle = 11
        self.late: list[Callable[[], None]] = []


class Event:
    def __init__(self) -> None:
        _made("event")
        weakref.finalize(self, _gone, "event")
        self.late: list[Callable[[], None]] = []

    def record(self, stream: Stream) -> None:
        self.late, stream.late = stream.late, []

    def synchronize(self) -> None:
        assert _depth(), "no context is current"
        for copy in self.late:
            copy()


class Allocation:
    def __init__(self, size_bytes: int) -> None:
        _made("device")
        self.memory: npt.NDArray[np.uint8] | None = np.empty(size_bytes, np.uint8)

    def __int__(self) -> int:
        assert self.memory is not None
        return int(self.memory.ctypes.data)

    def free(self) -> None:
        assert self.memory is not None
        self.memory = None
        _gone("device")


def mem_alloc(size_bytes: int) -> Allocation:
    return Allocation(size_bytes)


def pagelocked_empty(shape: int, dtype: Any) -> npt.NDArray[Any]:
    _made("page-locked")
    array: npt.NDArray[Any] = np.empty(shape, dtype)
    weakref.finalize(array, _gone, "page-locked")
    return array


def memcpy_htod_async(buffer: Allocation, array: npt.NDArray[Any], stream: Stream) -> None:
    del stream
    assert buffer.memory is not None
    buffer.memory[: array.nbytes] = array


def memcpy_dtoh_async(array: npt.NDArray[Any], buffer: Allocation, stream: Stream) -> None:
    assert buffer.memory is not None
    then = buffer.memory[: array.nbytes].copy()
    array[:] = 0xFF
    stream.late.append(lambda: array.__setitem__(slice(None), then))
