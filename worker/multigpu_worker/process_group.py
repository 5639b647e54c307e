"""Process groups, as /proc shows them. An engine process leads its group."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path


def members(group: int) -> list[tuple[int, str]]:
    """The pids of a process group, each with its state letter."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            fields = stat.rpartition(") ")[2].split()
            if int(fields[2]) == group:
                found.append((int(entry.name), fields[0]))
    return found


async def look_for_members(group: int) -> list[tuple[int, str]]:
    """`members` in a thread: it takes long on a host with many processes."""
    return await asyncio.to_thread(members, group)


async def stop_group(group: int) -> None:
    """Send SIGSTOP and wait until every member has stopped or ended."""
    signal_group(group, signal.SIGSTOP)
    while any(state not in "TtZX" for _, state in await look_for_members(group)):  # noqa: ASYNC110  no event for it
        await asyncio.sleep(0.001)


def signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


def group_of(pid: int) -> int:
    """0: the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
