"""How much memory this process takes."""

import os
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process, in bytes (proc(5): the second field of statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
