"""Claims of a GPU's workers on its MPS server: contexts and pinned memory.

A claim is a file beside the pipes that its worker keeps locked; the claim of a dead worker is deleted. The daemon and
the claims are changed under one lock, so that two workers that start together don't both start a daemon or take the
last context.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

LOCK_TIMEOUT_S = 60.0
_RETRY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    worker_id: str
    # An engine of the worker, the leader of its process group; 0: none runs.
    engine_pid: int
    # 0: no limit is set.
    pinned_bytes: int


class Claims:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = -1
        self._path = folder / f"claim-{os.getpid()}-{os.urandom(4).hex()}"

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """The lock that the GPU's workers share. Raises TimeoutError."""
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            async with asyncio.timeout(LOCK_TIMEOUT_S):
                while not _try_lock(fd):  # noqa: ASYNC110  another process may hold it
                    await asyncio.sleep(_RETRY_S)
            yield
        finally:
            os.close(fd)

    def hold(self, claim: Claim) -> None:
        """Make or change our claim."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        text = json.dumps([claim.worker_id, claim.engine_pid, claim.pinned_bytes]).encode()
        os.pwrite(self._fd, text.ljust(512), 0)

    def release(self) -> None:
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def others(self) -> list[Claim]:
        """Claims of other living workers. Deletes those of dead ones."""
        claims = []
        for path in self.folder.glob("claim-*"):
            if path == self._path:
                continue
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                if _try_lock(fd):
                    path.unlink(missing_ok=True)
                    continue
                with contextlib.suppress(ValueError):  # it is being written
                    worker_id, engine_pid, pinned_bytes = json.loads(os.pread(fd, 512, 0))
                    claims.append(Claim(worker_id=worker_id, engine_pid=engine_pid, pinned_bytes=pinned_bytes))
            finally:
                os.close(fd)
        return claims


def make_private_folder(path: Path, *, ours: bool) -> None:
    """Make or check a folder that no other user can change. `ours`: root must not own it. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o750, parents=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(f"{path} is no folder but a link or a file")
    if status.st_uid != os.geteuid() and (ours or status.st_uid):
        raise OSError(f"{path} belongs to the user {status.st_uid}")
    # In a sticky folder such as /tmp, other users cannot replace our folders.
    if status.st_mode & 0o022 and (ours or not status.st_mode & stat.S_ISVTX):
        raise OSError(f"{path} can be written to by others; if nobody else has changed it, run chmod go-w")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
