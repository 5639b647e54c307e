"""How much memory this process takes."""

import ctypes
import os
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process, in bytes (proc(5): the second field of statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def use_few_arenas() -> None:
    """Has glibc's malloc serve all threads but the first from one heap. With one a thread, what each burst of calls has
    left free in its heap is of no use to the next, on another thread: memory grows with every burst.
    """
    m_arena_max = -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_arena_max, 2)
