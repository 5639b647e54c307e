"""The default process runs tasks that need no model, such as those of handlers. When it dies, another is started."""

import asyncio
import re
from collections.abc import Callable
from functools import partial

import structlog

from multigpu_worker.engines.handlers.sources import Sources, sources_of
from multigpu_worker.engines.registry import KindInfo
from multigpu_worker.processes.child import ChildProcess, ProcessSettings
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.load_watch import LoadWatch
from multigpu_worker.processes.process import Callbacks, EngineProcess
from multigpu_worker.processes.start import NOT_STARTED, READY_S, SLOW_START_S, EngineStart
from multigpu_worker.waiting import until

log = structlog.get_logger()

# The process is started again at once. If it did nothing before it died, there is a delay, which doubles up to a limit.
_RESTART_DELAY_S = 0.1
_RESTART_DELAY_MAX_S = 5.0


class EngineStartError(Exception):
    """The engine process can't start; the message says why and what to do."""


class DefaultProcess(EngineProcess):
    def __init__(self, settings: ProcessSettings, callbacks: Callbacks) -> None:
        super().__init__(settings, callbacks, settings.engine.slots)
        self.kinds: dict[str, KindInfo] = {}
        # Why the last reload kept the previous version of the handlers; empty: it did not.
        self.reload_error = ""
        # What a slow start is doing; empty: no start is slow.
        self.slow_start = ""
        self._sources_before: Sources | None = None
        # The handlers' file that is being imported, and why the agent ended a start that hung.
        self._importing = self._stuck = ""
        self._start = EngineStart()
        # Whether the present process was ready, and whether it has reported something.
        self._was_ready = self._useful = False
        self._first_ready: asyncio.Future[None] = self._loop.create_future()
        self._restart_delay_s = 0.0
        self._device_released = False
        # The process has closed its handlers.
        self._closed = False

    async def start(self) -> None:
        """Start the process and learn what it can run. Raises EngineStartError if it can't start."""
        self._spawn()
        await self._first_ready

    def start_error(self) -> str:
        """Why no process can start; empty: one is ready, or may be soon, or none is wanted."""
        if self._device_released or self.stopping:
            return ""
        return self._start.error(self._loop.time(), ready=self.ready)

    def reload(self) -> None:
        """The next process reads the handlers' files. If it can't import them, the present version goes on."""
        self._sources_before, self.sources, self.reload_error = self.sources, None, ""
        # The process that the reload ends may not be ready yet: its end must not count as a failed start.
        self._was_ready = True

    async def close_handlers(self, grace_s: float) -> None:
        """Before the process is ended: call `close` of the handler classes, and wait at most `grace_s` for it."""
        if not (self.ready and self.settings.engine.handlers):
            return
        child = self.child
        self._closed = False
        self.send(("close", False), [])
        try:
            async with asyncio.timeout(grace_s):
                await until(lambda: self._closed or not self.ready or self.child is not child)
        except TimeoutError:
            log.warning("handlers did not close in time", limit_s=grace_s)

    def release_device(self) -> None:
        """End the process, and start none until `use_device`: the device must be released."""
        self._device_released = True
        self._start.reset()
        self.kill()

    def use_device(self) -> None:
        if self._device_released:
            self._device_released = False
            self._respawn()

    def _may_spawn(self) -> bool:
        return super()._may_spawn() and not self._device_released

    def _spawn(self) -> None:
        super()._spawn()
        self._was_ready = self._useful = False
        self._importing = self.slow_start = self._stuck = ""
        if self.child is not None:
            self._loop.call_later(SLOW_START_S, self._check_start, self.child, LoadWatch(READY_S, SLOW_START_S))

    def _check_start(self, child: ChildProcess, watch: LoadWatch) -> None:
        """Report what a slow start waits for, and end one that hangs."""
        if child is not self.child or self._was_ready:
            return
        doing = f"it imports {self._importing or 'its libraries'}"
        if doing != self.slow_start:
            self.slow_start = doing
            log.warning("the engine is not ready yet", pid=child.pid, why=doing)
        if watch.stuck([child.pid], self._loop.time()):
            self._stuck = (
                f"the engine process was ended before it was ready: {doing}, and did nothing for {READY_S:g} s"
            )
            self.kill()
        else:
            self._loop.call_later(SLOW_START_S, self._check_start, child, watch)

    # Frames.

    def parse_frame(self, message: frames.Message, blobs: list[bytes]) -> Callable[[], None]:
        match message[0]:
            case "ready":
                kinds = {
                    str(kind): KindInfo(
                        kind=str(kind), one_by_one=bool(alone), tasks_max=int(size), delay_s=float(delay_s)
                    )
                    for kind, alone, size, delay_s in message[1]
                }
                return partial(self._is_ready, kinds, sources_of(message[2]))
            case "rejected":
                return partial(self._rejected, str(message[1]))
            case "closed":
                return partial(setattr, self, "_closed", True)
            case "importing":
                return partial(setattr, self, "_importing", str(message[1]))
            case _:
                carry_out = super().parse_frame(message, blobs)
                self._useful = True
                return carry_out

    def _is_ready(self, kinds: dict[str, KindInfo], sources: Sources) -> None:
        if self.child is not None and self.child.killed:  # the process that follows may have other sources
            return
        self.kinds = kinds
        self.slow_start = ""
        if self.sources is None:
            self.sources = sources
        assert self.child is not None
        self.child.ready = True
        self._was_ready = True
        self._start.reset()
        if not self._first_ready.done():
            self._first_ready.set_result(None)
        if self.ready:
            self.occupied = 0
            self.share()
            self._callbacks.dispatcher.engine_ready()

    def _rejected(self, text: str) -> None:
        modules = ", ".join(self.settings.engine.handlers)
        last = text.strip().rpartition("\n")[2]
        if places := re.findall(r'File "([^"]+)", line (\d+)', text):
            last += f" ({places[-1][0]}, line {places[-1][1]})"
        if not self._first_ready.done():
            lacking = last.startswith("ModuleNotFoundError")
            remedy = "correct them, or make them importable (PYTHONPATH)" if lacking else "correct them"
            self._first_ready.set_exception(
                EngineStartError(f"the modules of --handlers ({modules}) can't be loaded: {last}; {remedy}\n{text}")
            )
        elif self.sources is None:
            self.reload_error = last
        else:
            log.error("handlers can't be loaded any more", error=last, handlers=modules)
            self._start.rejected(f"the handlers ({modules}) can't be loaded: {last}; correct them")

    # The end.

    def _died(self, death: Death) -> None:
        if not self._first_ready.done():
            reason = self._stuck or f"the engine process {death.summary} before it was ready; its output is in the log"
            if death.start_error:
                reason = NOT_STARTED.format(death.start_error)
            self._first_ready.set_exception(EngineStartError(reason))
            return
        if self.stopping or self._first_ready.exception() is not None:
            return
        if not self._was_ready and not self._device_released:
            self._died_at_start(death)
        super()._died(death)
        # No delay if a task ends its engine: the task's attempts are limited.
        if self._useful or any(state.batch_id for state in death.slots):
            self._restart_delay_s = 0.0
        delay_s = self._restart_delay_s
        self._restart_delay_s = min(_RESTART_DELAY_MAX_S, max(_RESTART_DELAY_S, 2 * delay_s))
        if delay_s:
            self._loop.call_later(delay_s, self._respawn)
        else:
            self._respawn()

    def _died_at_start(self, death: Death) -> None:
        if death.start_error:  # this says nothing of handlers that are being reloaded: the next process reads them
            self._start.rejected(NOT_STARTED.format(death.start_error))
        elif self.sources is None:
            self.sources = self._sources_before
            while_importing = f"the engine process {death.summary} while it imported them"
            self.reload_error = self.reload_error or self._stuck or while_importing
        else:
            if self._stuck:
                self._start.rejected(self._stuck)
            self._start.died(death.summary, killed=death.killed)
