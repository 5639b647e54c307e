"""An engine process of the operating system, from its start to its end.

Its death is detected by a pidfd, not by the end of the socket, because a child that user code forked may hold the
socket open. Frames that were sent before the death are still read and applied. The whole process group is killed with
the process. Under MPS (mps/engines.py) the group is detached from the GPU first, which takes a while.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.handlers.sources import Sources
from multigpu_worker.mps.engines import Fault, Mps
from multigpu_worker.process_group import look_for_members
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.blobs import BlobMemory
from multigpu_worker.processes.ipc.channel import EngineChannel
from multigpu_worker.processes.ipc.slots import SlotPage, SlotState
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.supervision import supervised

log = structlog.get_logger()

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What all engine processes of a worker have in common."""

    engine: EngineSettings
    # Memory limit of each process; 0: none.
    memory_bytes: int
    result_bytes_max: int
    # Variables with which a process sees the worker's device only.
    device_environment: Mapping[str, str]
    mps: Mps | None = None
    sharing: Sharing
    progress_timeout_s: float
    cancel_grace_s: float


class ChildProcess:
    """Runs on the event loop. Calls `apply_frame` for each frame, which may raise FrameError; and `died` at the end."""

    def __init__(
        self,
        settings: ProcessSettings,
        slots: int,
        output_fd: int,
        apply_frame: Callable[[frames.Message, list[bytes]], None],
        died: Callable[[Death], None],
        *,
        sources: Sources | None = None,
        imports: tuple[str, ...] | None = None,
    ) -> None:
        """Start the process. Raises OSError if the system has no process, memory or file descriptor left.

        slots: the number of slots for which the shared page has room.
        output_fd: where the process writes its output; closed by this call.
        sources: the version of the handlers to import. None: the process reads the files.
        imports: modules that a process for a model imports first. None: it is the default process.
        """
        # The process can take batches; set by the owner of this object.
        self.ready = False
        self.killed = False
        # No other process follows, so it does not matter which fault ends it.
        self.last = False
        self._mps = settings.mps
        self._died = died
        self._loop = asyncio.get_running_loop()
        # Under MPS: the task that detaches the living process from the GPU, and what the slots ran when it began.
        self._detaching: asyncio.Task[None] | None = None
        self._last_slots: list[SlotState] | None = None
        # Under MPS: the task that cleans up after the dead process.
        self._reaping: asyncio.Task[None] | None = None
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, output_fd)
            self.page = SlotPage.create(slots)
            opened.callback(self.page.close)
            self._blobs = BlobMemory.create()
            opened.callback(self._blobs.close)
            ours, theirs = socket.socketpair()
            opened.enter_context(ours)
            with theirs:
                self._process = self._popen(settings, theirs, output_fd)
            self.pid = self._process.pid
            opened.callback(self._process.wait)
            opened.callback(self._sigkill)
            self._pidfd = os.pidfd_open(self.pid)
            opened.callback(os.close, self._pidfd)
            self._loop.add_reader(self._pidfd, self._exited)
            opened.callback(self._loop.remove_reader, self._pidfd)
            self.channel = EngineChannel(ours, self._blobs, apply_frame, self._broken)
            opened.callback(self.channel.close)
            engine = dataclasses.asdict(dataclasses.replace(settings.engine, models={}))
            limits = settings.memory_bytes, settings.result_bytes_max
            self.channel.send(("settings", engine, slots, sources or {}, imports, *limits), [])
            opened.pop_all()
        os.close(output_fd)
        if self._mps is not None:
            self._mps.started(self.pid)

    def _popen(self, settings: ProcessSettings, theirs: socket.socket, output_fd: int) -> subprocess.Popen[bytes]:
        fds = (theirs.fileno(), self.page.fd, self._blobs.fd)
        return subprocess.Popen(
            [sys.executable, "-m", "multigpu_worker.engine.main", *map(str, fds), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=fds,
            env=_environment(settings),
            start_new_session=True,
        )

    def memory_used_bytes(self) -> int:
        """Resident memory of the process; 0 if it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def kill(self) -> None:
        """End the process and its children; `died` is called later.

        Under MPS that takes a while, and frames that the engine sends meanwhile are ignored.
        """
        self.ready, self.killed = False, True
        if self._process.returncode is not None:
            return
        if self._mps is None:
            self._sigkill()
        elif self._detaching is None and self._reaping is None:
            self._last_slots = self.page.sample()
            self.channel.read_rest()
            self._detaching = supervised(asyncio.create_task(self._detach(self._mps)))

    def _broken(self, error: frames.FrameError) -> None:
        log.error("the engine sent a frame that makes no sense, so it is ended", pid=self.pid, exc_info=error)
        self.kill()

    def _sigkill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _detach(self, mps: Mps) -> None:
        await mps.detach(self.pid)
        self._sigkill()

    def _exited(self) -> None:
        self.ready = False
        self._loop.remove_reader(self._pidfd)
        if self._mps is None:
            self._reap(None)
        else:
            self._mps.reaping_count += 1
            self._reaping = supervised(asyncio.create_task(self._reap_under_mps(self._mps)))

    async def _reap_under_mps(self, mps: Mps) -> None:
        """Detach the children of a dead process from the GPU, and find out whether an MPS fault ended the process."""
        try:
            if self._detaching is not None:
                await self._detaching
            elif any(state not in "ZX" for _, state in await look_for_members(self.pid)):
                await mps.detach(self.pid)  # its children may still be clients of the GPU's server
            fault = None if self.last else await mps.after_death()
        finally:
            mps.reaping_count -= 1
            mps.ended(self.pid)
        self._reap(fault)

    def _reap(self, fault: Fault | None) -> None:
        """The process has ended: read its last frames, reap it, and free the memory that was shared with it."""
        # Kill the group before the process is reaped: afterwards another process group could have its id.
        self._sigkill()
        returncode = self._process.wait()
        os.close(self._pidfd)
        self.channel.read_rest()
        self.channel.close()
        slots = self.page.sample() if self._last_slots is None else self._last_slots
        death = Death(returncode=returncode, slots=slots, prepared=self.page.prepared(), fault=fault)
        self.page.close()
        self._blobs.close()
        self._died(death)


def _environment(settings: ProcessSettings) -> dict[str, str]:
    """The agent's environment, and variables for the device, MPS and the number of threads of numeric libraries."""
    env = dict(os.environ)
    # What user code prints reaches the log line by line.
    env["PYTHONUNBUFFERED"] = "1"
    if threads := settings.engine.threads:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
            env[name] = str(threads)
    env.update(settings.device_environment)
    if settings.mps is not None:
        env.update(settings.mps.environment())
    return env
