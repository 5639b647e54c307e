"""The life of an engine process: started, killed, dead. default_host.py and model_host.py are the two sorts.

The end of the process counts, reported by its pidfd, and not the end of the socket: a child that user code forked may
hold the socket open. Frames that the engine sent before it died are read to the end and count. The whole process group
is killed with it. Under MPS (mps/engines.py) it is taken off the GPU first, which takes a while.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
from multigpu_worker.processes.output import OutputLog
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.supervision import supervised
from multigpu_worker.waiting import until

log = structlog.get_logger()

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class EngineProcessCallbacks(Protocol):
    """Called on the event loop."""

    def engine_ready(self) -> None: ...
    def read(self, message: frames.Message, blobs: list[bytes]) -> Callable[[], None]:
        """Read a frame; the result carries it out. TypeError, ValueError, LookupError: it makes no sense."""

    def engine_died(self, death: Death) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What all engine processes of a worker have in common."""

    engine: EngineSettings
    # Of each process; 0: no limit.
    memory_bytes: int
    result_bytes_max: int
    # For CUDA_VISIBLE_DEVICES; None: as it is.
    visible_devices: str | None
    mps: Mps | None = None
    sharing: Sharing
    progress_timeout_s: float
    cancel_grace_s: float


class EngineHost:
    """Subclasses start the process, read its frames, and decide what follows its death."""

    # Modules that a process for a model imports first; None: it is the default process.
    imports: tuple[str, ...] | None = None
    # The version of the handlers to import. None: the files are read.
    sources: Sources | None = None

    def __init__(self, settings: ProcessSettings, callbacks: EngineProcessCallbacks, slots: int) -> None:
        """`slots`: how many the shared page has room for."""
        self.settings = settings
        self.callbacks = callbacks
        self.mps = settings.mps
        # Able to take batches.
        self.ready = False
        self.pid = 0
        self.page = SlotPage.create(slots)
        self.channel: EngineChannel | None = None
        self.stopping = False
        self._blobs = BlobMemory.create()
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._output = OutputLog(self._loop)
        # Under MPS: taking the living process off the GPU, and what the slots ran when that began.
        self._detaching: asyncio.Task[None] | None = None
        self._last_slots: list[SlotState] | None = None
        # Under MPS: clearing up after a dead process, or waiting until the next one may start.
        self._pending: asyncio.Task[None] | None = None

    def send(self, message: frames.Message, blobs: list[bytes]) -> None:
        assert self.ready
        self._send(message, blobs)

    def pause(self, *, paused: bool) -> None:
        """Read nothing from the engine for now, or go on."""
        if self.channel is not None:
            self.channel.pause(paused=paused)

    def memory_used_bytes(self) -> int:
        """Resident memory of the process; 0 if it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def kill(self) -> None:
        """End the process and its children; `engine_died` follows.

        Under MPS that takes a while, and what the engine sends meanwhile does not count.
        """
        self.ready = False
        if self._process is None:
            return
        if self.mps is None:
            self._sigkill(self._process.pid)
        elif self._detaching is None and self._pending is None:
            assert self.channel is not None
            self._last_slots = self.page.sample()
            self.channel.read_rest()
            self._detaching = supervised(asyncio.create_task(self._detach(self.mps, self._process.pid)))

    def stop(self) -> None:
        """End the process for good; `stopped` waits for that."""
        self.stopping = True
        self.kill()

    async def stopped(self) -> None:
        await until(lambda: self._process is None)
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
        self._output.close()

    def take(self, message: frames.Message, blobs: list[bytes]) -> None:
        """Carry out a frame. FrameError: it makes no sense. Other errors are ours, and not the engine's."""
        try:
            carry_out = self._read(message, blobs)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise frames.FrameError(f"a frame makes no sense: {error!r}") from error
        carry_out()

    # For subclasses.

    def _read(self, message: frames.Message, blobs: list[bytes]) -> Callable[[], None]:
        """As EngineProcessCallbacks.read."""
        raise NotImplementedError

    def _died(self, death: Death) -> None:
        raise NotImplementedError

    def _may_spawn(self) -> bool:
        return not self.stopping and self._process is None

    def _respawn(self) -> None:
        """Start the process, under MPS as soon as its server is ready for one."""
        if not self._may_spawn():
            return
        if self.mps is None:
            self._spawn()
        elif self._pending is None:
            self._pending = supervised(asyncio.create_task(self._respawn_under_mps(self.mps)))

    async def _respawn_under_mps(self, mps: Mps) -> None:
        await mps.restarted()
        self._pending = None
        if self._may_spawn():
            self._spawn()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), self.page.fd, self._blobs.fd)
            output_fd = self._output.open()
            command = [sys.executable, "-m", "multigpu_worker.engine.main"]
            command += [*map(str, fds), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                pass_fds=fds,
                env=self._environment(),
                start_new_session=True,
            )
            os.close(output_fd)
        self.pid = self._process.pid
        if self.mps is not None:
            self.mps.started(self.pid)
        self._detaching = self._last_slots = None
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._exited)
        self.channel = EngineChannel(ours, self._blobs, self.take, self._broken)
        engine = dataclasses.asdict(dataclasses.replace(self.settings.engine, models={}))
        limits = self.settings.memory_bytes, self.settings.result_bytes_max
        self._send(("settings", engine, self.page.capacity, self.sources or {}, self.imports, *limits), [])

    def _send(self, message: frames.Message, blobs: list[bytes]) -> None:
        assert self.channel is not None
        self.channel.send(message, blobs)

    def _environment(self) -> dict[str, str]:
        """The agent's environment, with the device, and the number of threads for numeric libraries."""
        env = dict(os.environ)
        # What user code prints reaches the log line by line.
        env["PYTHONUNBUFFERED"] = "1"
        if threads := self.settings.engine.threads:
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
                env[name] = str(threads)
        if self.settings.visible_devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = self.settings.visible_devices
        if self.mps is not None:
            env.update(self.mps.environment())
        return env

    def _broken(self, error: frames.FrameError) -> None:
        log.error("the engine sent a frame that makes no sense, so it is ended", pid=self.pid, exc_info=error)
        self.kill()

    # The end.

    def _sigkill(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    async def _detach(self, mps: Mps, pid: int) -> None:
        await mps.detach(pid)
        self._sigkill(pid)

    def _exited(self) -> None:
        assert self._process is not None
        self.ready = False
        self._loop.remove_reader(self._pidfd)
        if self.mps is None:
            self._bury(None)
        else:
            self.mps.burying += 1
            self._pending = supervised(asyncio.create_task(self._bury_under_mps(self.mps, self._process.pid)))

    async def _bury_under_mps(self, mps: Mps, group: int) -> None:
        """Take what is left of a dead process off the GPU, and learn which fault ended it."""
        try:
            if self._detaching is not None:
                await self._detaching
            elif any(state not in "ZX" for _, state in await look_for_members(group)):
                await mps.detach(group)  # its children may still be clients of the GPU's server
            fault = None if self.stopping else await mps.after_death()
        finally:
            mps.burying -= 1
            mps.ended(group)
        self._pending = None
        self._bury(fault)

    def _bury(self, fault: Fault | None) -> None:
        """The process has ended: read its last frames, reap it, and decide what follows."""
        assert self._process is not None
        assert self.channel is not None
        # Before it is reaped, so that no other process group can have its id.
        self._sigkill(self._process.pid)
        returncode = self._process.wait()
        os.close(self._pidfd)
        self.channel.read_rest()
        self.channel.close()
        self.channel = self._process = None
        slots = self.page.sample() if self._last_slots is None else self._last_slots
        death = Death(returncode=returncode, slots=slots, prepared=self.page.prepared(), fault=fault)
        self.page.clear()
        self._blobs.reset()
        self._died(death)

    def _release(self) -> None:
        """No process will be started any more: give back what was shared with it."""
        self._output.close()
        self.page.close()
        self._blobs.close()
