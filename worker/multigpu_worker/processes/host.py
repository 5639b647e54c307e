"""The agent's side of the engine process: starts it, talks to it, samples it, and ends it.

Death is the end of the process, learned from its pidfd, and not the end of the socket: a child that user code forked
may hold the socket open for ever. What the engine said before it died is read to the end and counts. The whole process
group is killed with it. Under MPS (mps/engines.py) it is taken off the GPU first, which takes a while.

There are two sorts of processes. The base runs what needs no model; when it dies, another takes its place. The others
are for one model each: they import what they are told to, load a model once they are asked, and are not replaced when
they end. Knows nothing of leases' lives: process.py does.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.handlers.sources import Sources, sources_of
from multigpu_worker.engines.registry import KindInfo
from multigpu_worker.models.load_watch import LoadWatch
from multigpu_worker.mps.engines import Fault, Mps
from multigpu_worker.process_group import look_for_members
from multigpu_worker.processes import ipc
from multigpu_worker.processes.blobs import BlobMemory
from multigpu_worker.processes.output import OutputLog
from multigpu_worker.processes.start import READY_S, SLOW_START_S, EngineStart
from multigpu_worker.supervision import supervised

log = structlog.get_logger()

# An engine is started again at once, unless it did nothing before it died: then with a delay, doubling up to the limit.
_RESTART_DELAY_S = 0.1
_RESTART_DELAY_MAX_S = 5.0
_GONE_POLL_S = 0.02
# More than a socket can hold.
_READS_MAX = 10_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Slots that a process for a model has room for: how many it uses is known when its model is.
MODEL_SLOTS_MAX = 256


class EngineStartError(Exception):
    """The engine process can't start; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How an engine process ended."""

    # As subprocess says it: negative for a signal.
    returncode: int
    # What each slot ran at that moment, or when we began to end it.
    slots: list[ipc.SlotState]
    # The batch that it was preparing; 0: none.
    prepared: int = 0
    # What the GPU's MPS server has to do with it.
    fault: Fault | None = None

    @property
    def killed(self) -> bool:
        """By us, an operator, or the kernel short of memory: no engine ends itself so, and no device does it."""
        return self.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def words(self) -> str:
        if self.returncode < 0:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        return f"ended with exit code {self.returncode}"


class EngineEvents(Protocol):
    """What the host tells its owner, on the event loop."""

    def engine_ready(self) -> None: ...
    def engine_said(self, message: ipc.Message, blobs: list[bytes]) -> Callable[[], None]:
        """Read a frame; the answer carries it out. TypeError, ValueError, LookupError: it makes no sense."""

    def engine_died(self, death: Death) -> None: ...


class EngineHost:
    def __init__(
        self,
        settings: EngineSettings,
        events: EngineEvents,
        *,
        memory_bytes: int,
        result_bytes_max: int,
        visible_devices: str | None,
        mps: Mps | None = None,
        imports: tuple[str, ...] | None = None,
    ) -> None:
        """`imports`: modules that a process for a model imports first; None: it is the base."""
        self.settings = settings
        self.imports = imports
        self.events = events
        self.memory_bytes = memory_bytes
        self.result_bytes_max = result_bytes_max
        # For CUDA_VISIBLE_DEVICES; None: as it is.
        self.visible_devices = visible_devices
        self.mps = mps
        # Started and able to take batches.
        self.ready = False
        self.kinds: dict[str, KindInfo] = {}
        # The version of the handlers that engines import. None: the next one reads the files.
        self.sources: Sources | None = None
        self._sources_before: Sources | None = None
        # The file of the handlers whose code runs before the engine is ready; what to say of a start that takes long,
        # and why it was ended.
        self.importing = self.starts_slowly = self._stuck = ""
        # Why the last reload left the version as it was.
        self.reload_error = ""
        self.pid = 0
        self.page = ipc.SlotPage.create(settings.slots if imports is None else MODEL_SLOTS_MAX)
        self._blobs = BlobMemory.create()
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._pidfd = -1
        self._decoder = ipc.Decoder(self._blobs.up)
        self._unsent: deque[memoryview] = deque()
        self._paused = False
        # The engine was ready, and has reported something, since its start.
        self._was_ready = self._useful = False
        self._start = EngineStart()
        self._restart_delay_s = 0.0
        self._stopping = False
        self._parked = False
        # Under MPS: its being ended, from the first word to its last breath, and what the slots ran at its beginning.
        self._ending: asyncio.Task[None] | None = None
        self._last_slots: list[ipc.SlotState] | None = None
        self._after: asyncio.Task[None] | None = None
        # Under MPS: it is dead, and not buried yet.
        self._dying = False
        self._first_ready: asyncio.Future[None] = self._loop.create_future()
        # What a process for a model is to load, once it is there.
        self._load: ipc.Message | None = None
        self._gone = False
        # It was asked to end by itself.
        self._closing: asyncio.TimerHandle | None = None
        self._output = OutputLog(self._loop)

    async def start(self) -> None:
        """Start the engine and learn what it can run. EngineStartError: it rejected, or ended at once."""
        self._spawn()
        await self._first_ready

    def begin(self) -> None:
        """Start a process for a model."""
        assert self.imports is not None
        self._first_ready.set_result(None)
        self._respawn()

    def load(self, model: str, spec: ModelSpec, slots: int) -> None:
        """Have a model loaded. The engine says "loaded" or "load_failed", or dies."""
        assert self.imports is not None
        assert slots <= MODEL_SLOTS_MAX
        self.page.slots = slots
        self._load = ("load", model, spec.plain(), slots)
        if self._process is not None:
            self._write(ipc.encode(self._load, [], self._blobs.down))

    def end(self, grace_s: float) -> None:
        """Have a process for a model write what it has yet to write and end, or be killed after so long."""
        self.ready = False
        self._stopping = True
        if self._process is None:
            self._loop.call_soon(self._never_was)
        elif self._closing is None:
            self._write(ipc.encode(("close", self.mps is None), [], self._blobs.down))
            self._closing = self._loop.call_later(grace_s, self.kill)

    def send(self, message: ipc.Message, blobs: list[bytes]) -> None:
        """Send a frame; what the socket doesn't take now follows as soon as it does."""
        assert self.ready
        self._write(ipc.encode(message, blobs, self._blobs.down))

    def sample(self) -> list[ipc.SlotState]:
        return self.page.sample()

    def memory_used_bytes(self) -> int:
        """Resident memory of the engine process; 0 if it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def pause(self, paused: bool) -> None:
        """Read nothing more from the engine for now: it waits when the socket is full. Or go on."""
        if paused == self._paused or self._sock is None or self._last_slots is not None:
            return
        self._paused = paused
        if paused:
            self._loop.remove_reader(self._sock)
        else:
            self._loop.add_reader(self._sock, self._readable)

    def kill(self) -> None:
        """End the engine and all its children now. `engine_died` follows, and another engine after that.

        Under MPS its end takes a while; what it says from now on doesn't count.
        """
        self.ready = False
        if self._process is None:
            return
        if self.mps is None:
            self._sigkill(self._process.pid)
        elif self._ending is None and not self._dying:
            self._last_slots = self.page.sample()
            self._hear_out()
            self._ending = supervised(asyncio.create_task(self._end(self.mps, self._process.pid)))

    def reload(self) -> None:
        """The next engine reads the handlers' files anew. If it can't import them, this version goes on."""
        self._sources_before, self.sources, self.reload_error = self.sources, None, ""

    def start_error(self) -> str:
        """Why no engine can start now; empty: one is ready, or may be soon, or none is wanted."""
        if self._parked or self._stopping:
            return ""
        return self._start.error(self._loop.time(), ready=self.ready)

    def park(self) -> None:
        """End the engine, and start no other one until `unpark`: the device must be let go of."""
        self._parked = True
        self._start.begun_anew()
        self.kill()

    def unpark(self) -> None:
        """Start an engine, unless there is one."""
        if self._parked:
            self._parked = False
            if self._process is None:
                self._respawn()

    def stop(self) -> None:
        """End the engine for good: at once, but under MPS, where `stopped` waits for it."""
        self._stopping = True
        if self.mps is not None:
            self.kill()
            return
        if self._process is not None:
            self.kill()
            self._dead()
        elif self.imports is not None and not self._gone:
            self._release()
        self._output.close()

    async def stopped(self) -> None:
        """Wait until a stopped engine is gone."""
        if self.mps is None:
            return
        if self._ending is not None:
            await self._ending
        while self._process is not None:  # noqa: ASYNC110  it is told to nobody else
            await asyncio.sleep(_GONE_POLL_S)
        if self._after is not None:
            self._after.cancel()
            await asyncio.gather(self._after, return_exceptions=True)
        self._output.close()

    async def _end(self, mps: Mps, pid: int) -> None:
        """Take the engine off the GPU, then kill it."""
        await mps.detach(pid)
        self._sigkill(pid)

    def _sigkill(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def _hear_out(self) -> None:
        """Take what the engine has said so far, and nothing that it may say later."""
        assert self._sock is not None
        self._loop.remove_reader(self._sock)
        self._read_all(self._sock)

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
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
                env=_environment(self.settings, self.visible_devices, self.mps),
                start_new_session=True,
            )
            os.close(output_fd)
        self.pid = self._process.pid
        if self.mps is not None:
            self.mps.started(self.pid)
        self._ending = self._last_slots = None
        self._dying = False
        self._was_ready = self._useful = False
        self._sock = ours
        self._pidfd = os.pidfd_open(self.pid)
        self._decoder = ipc.Decoder(self._blobs.up)
        self._unsent.clear()
        self._paused = False
        self._loop.add_reader(self._pidfd, self._dead if self.mps is None else self._dead_under_mps)
        self._loop.add_reader(ours, self._readable)
        self.importing = self.starts_slowly = self._stuck = ""
        if self.imports is None:
            self._loop.call_later(SLOW_START_S, self._look_at_start, self.pid, LoadWatch(READY_S))
        self._write(ipc.encode(self._settings_message(), [], self._blobs.down))
        if self._load is not None:
            self._write(ipc.encode(self._load, [], self._blobs.down))

    def _settings_message(self) -> ipc.Message:
        settings = self.settings
        return (
            "settings",
            settings.device,
            self.page.capacity,
            settings.threads,
            settings.handlers,
            self.sources or {},
            self.imports,
            (settings.engine, settings.precision, settings.artifacts, settings.artifacts_bytes_max),
            self.memory_bytes,
            self.result_bytes_max,
            list(dataclasses.asdict(settings.embedding_cache).items()),
        )

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            frames = self._decoder.feed(self._sock)
        except BlockingIOError:
            return
        except (EOFError, ConnectionError):
            self._loop.remove_reader(self._sock)  # its death will be told by the pidfd
            return
        except ipc.FrameError as error:
            self._babbles(error)
            return
        try:
            for message, blobs in frames:
                self.said(message, blobs)
        except ipc.FrameError as error:
            self._babbles(error)

    def _babbles(self, error: ipc.FrameError) -> None:
        """The engine says what makes no sense: nothing that follows can be trusted."""
        log.error("the engine's words make no sense, so it is ended", pid=self.pid, exc_info=error)
        assert self._sock is not None
        self._loop.remove_reader(self._sock)
        self.kill()

    def said(self, message: ipc.Message, blobs: list[bytes]) -> None:
        """Takes a frame. FrameError: it makes no sense. What our own code raises is not the engine's fault."""
        try:
            carry_out = self._read(message, blobs)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ipc.FrameError(f"a frame makes no sense: {error!r}") from error
        carry_out()

    def _read(self, message: ipc.Message, blobs: list[bytes]) -> Callable[[], None]:
        match message[0]:
            case "ready" if self.imports is not None:
                return self.events.engine_ready
            case "ready":
                kinds = {kind: KindInfo(kind=kind, one_by_one=one_by_one) for kind, one_by_one in message[1]}
                if not all(isinstance(kind, str) for kind in kinds):
                    raise TypeError(f"kinds that are {kinds!r}")
                return partial(self._is_ready, kinds, sources_of(message[2]))
            case "closed":  # under MPS: it is taken off the GPU before it ends
                return self.kill
            case "rejected":
                return partial(self._rejected, str(message[1]))
            case "importing":
                return partial(setattr, self, "importing", str(message[1]))
            case what:
                return partial(self._carry_out, what, self.events.engine_said(message, blobs))

    def _is_ready(self, kinds: dict[str, KindInfo], sources: Sources) -> None:
        self.kinds = kinds
        self.starts_slowly = ""
        if self.sources is None:
            self.sources = sources
        self.ready = self._ending is None
        self._was_ready = True
        self._start.begun_anew()
        if not self._first_ready.done():
            self._first_ready.set_result(None)
        if self.ready:
            self.events.engine_ready()

    def _carry_out(self, what: str, frame: Callable[[], None]) -> None:
        self._useful = True
        if what == "loaded":
            self.ready = self._ending is None and not self._stopping
        frame()

    def _look_at_start(self, pid: int, watch: LoadWatch) -> None:
        """Say what a slow start waits for, and end one that hangs."""
        if pid != self.pid or self._process is None or self._was_ready:
            return
        doing = f"it imports {self.importing or 'its libraries'}"
        if doing != self.starts_slowly:
            self.starts_slowly = doing
            log.warning("the engine is not ready yet", pid=pid, why=doing)
        if watch.stuck([pid], self._loop.time()):
            self._stuck = (
                f"the engine process was ended before it was ready: {doing}, and did nothing for {READY_S:g} s"
            )
            self.kill()
        else:
            self._loop.call_later(SLOW_START_S, self._look_at_start, pid, watch)

    def _rejected(self, text: str) -> None:
        modules = ", ".join(self.settings.handlers)
        last = text.strip().rpartition("\n")[2]
        if not self._first_ready.done():
            remedy = f"correct --handlers ({modules}), or make the modules importable (PYTHONPATH)"
            self._first_ready.set_exception(
                EngineStartError(f"the handlers can't be imported: {last}; {remedy}\n{text}")
            )
        elif self.sources is None:
            self.reload_error = last
        else:
            log.error("handlers can't be imported any more", error=last, handlers=modules)
            self._start.rejected(f"the handlers ({modules}) can't be imported: {last}; correct them")

    def _write(self, buffers: list[bytes]) -> None:
        assert self._sock is not None
        waiting = bool(self._unsent)
        self._unsent += [memoryview(buffer) for buffer in buffers if buffer]
        if not waiting:
            self._writable()
            if self._unsent:
                self._loop.add_writer(self._sock, self._continue)

    def _continue(self) -> None:
        self._writable()
        if not self._unsent and self._sock is not None:
            self._loop.remove_writer(self._sock)

    def _writable(self) -> None:
        """Write as much as the socket takes."""
        assert self._sock is not None
        try:
            while self._unsent:
                sent_bytes = self._sock.send(self._unsent[0])
                if sent_bytes == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent_bytes:]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # its death will be told by the pidfd

    def _dead_under_mps(self) -> None:
        """The process has ended; its children may still be clients of the GPU's server."""
        assert self._process is not None
        assert self.mps is not None
        self.ready = False
        self._dying = True
        self._loop.remove_reader(self._pidfd)
        self.mps.burying += 1
        self._after = supervised(asyncio.create_task(self._bury(self.mps, self._process.pid, self._ending)))

    async def _bury(self, mps: Mps, group: int, ending: asyncio.Task[None] | None) -> None:
        """See to what a dead engine leaves on the GPU, whom to blame, and that the next one can start."""
        try:
            if ending is not None:
                await ending
            elif any(state not in "ZX" for _, state in await look_for_members(group)):
                await mps.detach(group)
            fault = None if self._stopping else await mps.after_death()
        finally:
            mps.burying -= 1
            mps.ended(group)
        self._dead(fault)

    def _dead(self, fault: Fault | None = None) -> None:
        """The process has ended: read its last words, tell, and start another."""
        assert self._process is not None
        assert self._sock is not None
        process, sock = self._process, self._sock
        self.ready = False
        # Before it is reaped, so that its process group can't be anybody else's.
        self._sigkill(process.pid)
        self._loop.remove_reader(self._pidfd)
        returncode = process.wait()
        os.close(self._pidfd)
        self._loop.remove_writer(sock)
        self._loop.remove_reader(sock)
        if self._last_slots is None:
            self._read_all(sock)
        sock.close()
        self._sock = self._process = None
        if self._closing is not None:
            self._closing.cancel()
        slots = self.page.sample() if self._last_slots is None else self._last_slots
        death = Death(returncode=returncode, slots=slots, prepared=self.page.prepared(), fault=fault)
        self.page.clear()
        self._blobs.reset()
        if not self._first_ready.done():
            words = self._stuck or f"the engine process {death.words} before it was ready; its output is in the log"
            self._first_ready.set_exception(EngineStartError(words))
            return
        if self.imports is not None:
            self._stopping = True
            self._release()
            self.events.engine_died(death)
            return
        if self._stopping or self._first_ready.exception() is not None:
            return
        if not self._was_ready and not self._parked and self.sources is None:
            self.sources = self._sources_before
            self.reload_error = (
                self.reload_error or self._stuck or f"the engine process {death.words} while it imported them"
            )
        elif not self._was_ready and not self._parked:
            if self._stuck:
                self._start.rejected(self._stuck)
            self._start.died(death.words, killed=death.killed)
        self.events.engine_died(death)
        # A task that ends its engine has to answer for it; its attempts are counted, so no delay is needed.
        if self._useful or any(state.batch_id for state in death.slots):
            self._restart_delay_s = 0.0
        delay_s = self._restart_delay_s
        self._restart_delay_s = min(_RESTART_DELAY_MAX_S, max(_RESTART_DELAY_S, 2 * delay_s))
        if delay_s:
            self._loop.call_later(delay_s, self._respawn)
        else:
            self._respawn()

    def _never_was(self) -> None:
        if not self._gone:
            self._release()
            self.events.engine_died(Death(returncode=0, slots=[]))

    def _release(self) -> None:
        """The process of a model is gone for good: give back what it shared with us."""
        self._gone = True
        self._output.close()
        self.page.close()
        self._blobs.close()

    def _may_spawn(self) -> bool:
        return not self._stopping and not self._parked and self._process is None

    def _respawn(self) -> None:
        if not self._may_spawn():
            return
        if self.mps is None:
            self._spawn()
        else:
            self._after = supervised(asyncio.create_task(self._respawn_under_mps(self.mps)))

    async def _respawn_under_mps(self, mps: Mps) -> None:
        await mps.restarted()
        if self._may_spawn():
            self._spawn()

    def _read_all(self, sock: socket.socket) -> None:
        """Take what the engine has said and we have not read. Bounded: a living one may go on for ever."""
        with contextlib.suppress(BlockingIOError, EOFError, ConnectionError, ipc.FrameError):
            for _ in range(_READS_MAX):
                for message, blobs in self._decoder.feed(sock):
                    if message[0] not in ("ready", "loaded"):
                        self.said(message, blobs)


def _environment(settings: EngineSettings, visible_devices: str | None, mps: Mps | None) -> dict[str, str]:
    """The engine's environment: the agent's, with the device and the threads made plain to numeric libraries."""
    env = dict(os.environ)
    # What user code prints reaches the log line by line.
    env["PYTHONUNBUFFERED"] = "1"
    if settings.threads:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
            env[name] = str(settings.threads)
    if visible_devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible_devices
    if mps is not None:
        env.update(mps.environment())
    return env
