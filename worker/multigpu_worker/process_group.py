"""Members of process groups, from /proc, and signals to groups. Each engine process leads a group."""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread of its parent that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os._exit(0)


def members(*groups: int) -> list[tuple[int, str]]:
    """The processes of some groups: pid and state letter of each."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            fields = stat.rpartition(") ")[2].split()
            if int(fields[2]) in groups:
                found.append((int(entry.name), fields[0]))
    return found


def with_descendants(pids: Iterable[int]) -> list[int]:
    """These processes, and all that descend from them."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
                children.setdefault(int(stat.rpartition(") ")[2].split()[1]), []).append(int(entry.name))
    found = list(pids)
    for pid in found:  # also visits the pids that the loop appends
        found += children.get(pid, ())
    return found


async def look_for_members(*groups: int) -> list[tuple[int, str]]:
    """Call `members` on another thread, because it takes long on a host with many processes."""
    return await asyncio.to_thread(members, *groups)


async def stop_group(group: int) -> None:
    """Send SIGSTOP and wait until every member has stopped or ended."""
    signal_group(group, signal.SIGSTOP)
    while any(state not in "TtZX" for _, state in await look_for_members(group)):  # noqa: ASYNC110  no event for it
        await asyncio.sleep(0.001)


def signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)
