"""Memory of this process."""

import ctypes
import os
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process, in bytes (proc(5): the second field of statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def use_few_arenas() -> None:
    """Makes glibc's malloc use one heap for all threads but the first.

    With a heap for each thread, memory that a burst of calls leaves free on one thread cannot be used by another
    thread, and memory grows with every burst.
    """
    m_arena_max = -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_arena_max, 2)
