"""The life of a worker: start the engine, keep a session with the master, drain, stop."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from multigpu.config.config import WorkerConfig

from multigpu_worker.daemon_thread import to_daemon_thread
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.dispatcher import Dispatcher
from multigpu_worker.health_monitor import HealthMonitor
from multigpu_worker.master_stream import MasterStream
from multigpu_worker.models.loader import ModelLoader
from multigpu_worker.processes.default_process import EngineStartError
from multigpu_worker.processes.pool import EnginePool
from multigpu_worker.processes.reload import HandlersReload
from multigpu_worker.repository.model import ModelFolderError, Scan
from multigpu_worker.session.master_connection import MasterConnection, ProtocolMismatchError, TakenOverError
from multigpu_worker.supervision import Supervision

log = structlog.get_logger()

TICK_S = 0.05
# The engines' memory is checked once in this number of ticks.
MEMORY_TICKS = 2
# A heartbeat waits this long for a fresh sample of the device's sensors, then it contains the last sample.
SAMPLE_TIMEOUT_S = 0.5


@dataclasses.dataclass(slots=True, kw_only=True)
class Agent:
    """Created by composition.py; runs on the event loop."""

    config: WorkerConfig
    dispatcher: Dispatcher
    pool: EnginePool
    loader: ModelLoader
    health_monitor: HealthMonitor
    sampler: Sampler
    handlers: HandlersReload
    stream: MasterStream
    connection: MasterConnection
    find_catalog: Callable[[], Scan]
    # The number of ticks so far: systemd's watchdog is fed while it grows.
    ticks: int = 0

    async def run(self) -> None:
        """Start the engine, then work until `drain` or `stop` has ended.

        Raises EngineStartError if the engine can't start, ProtocolMismatchError if the master speaks another version,
        TakenOverError if another worker has the same worker_id, ExceptionGroup if a background task or callback fails.
        """
        supervision = Supervision()
        try:
            try:
                await self.pool.start()
            except EngineStartError:
                if self.dispatcher.stopped:  # before the engine was ready
                    return
                raise
            kinds = sorted({kind for kind, _ in self.dispatcher.offers()})
            log.info("engine ready", pid=self.pool.default.pid, kinds=kinds)
            self.sampler.start()
            background_tasks = [
                supervision.watch(),
                self._beat(),
                self._tick(),
                self.health_monitor.run(),
                self.handlers.run(),
            ]
            if self.config.model_repository and self.config.repository_poll_s:
                background_tasks.append(self._poll())
            if self.pool.mps is not None:
                background_tasks.append(self.pool.mps.watch(self.pool.end_all_after_fault))
            await self._keep_session(background_tasks)
        finally:
            self.sampler.stop()
            self.pool.stop()
            await self.pool.stopped()

    async def _keep_session(self, background_tasks: list[Coroutine[Any, Any, None]]) -> None:
        """Keep the session until it is closed or rejected, and run `background_tasks` meanwhile.

        If one of them fails, all end.
        """
        rejected: Exception | None = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in background_tasks]
            try:
                await self.connection.run()
            except (ProtocolMismatchError, TakenOverError) as error:
                rejected = error
            for task in tasks:
                task.cancel()
        if rejected is not None:
            raise rejected

    async def drain(self, timeout_s: float) -> None:
        """Ask the master for no more leases, wait at most `timeout_s` for the held ones to end, give back the others,
        and end the stream.
        """
        dispatcher, session = self.dispatcher, self.dispatcher.session
        self.stream.draining = True
        dispatcher.want_heartbeat()
        log.info("draining", leases=len(session.leases), timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while not dispatcher.stopped and (session.leases or session.has_unsent()):
                    dispatcher.settled.clear()
                    await dispatcher.settled.wait()
        except TimeoutError:
            log.warning("giving back the leases that did not finish in time", leases=len(session.leases))
        if not dispatcher.stopped:
            self._return_all_leases("the worker is stopping")
            await self.pool.close()
        if not dispatcher.stopped:
            self.stop("the worker is stopping")

    def stop(self, reason: str) -> None:
        """Give back all leases, and end the engines and the stream."""
        self.dispatcher.stopped = True
        self.dispatcher.settled.set()
        self._return_all_leases(reason)
        self.pool.stop()
        self.connection.close()

    def _return_all_leases(self, reason: str) -> None:
        self.dispatcher.session.return_all_leases(reason, time.time_ns())
        self.pool.forget()

    async def _beat(self) -> None:
        """Send a heartbeat at the master's interval, with the device's state."""
        while True:
            await self.sampler.sample(min(SAMPLE_TIMEOUT_S, self.stream.heartbeat_s))
            self.sampler.count_sharers(self.pool.owns)
            self.pool.acknowledge_pinned()
            if self.dispatcher.session.connected:
                self.dispatcher.want_heartbeat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.stream.heartbeat_s):
                    await self.stream.welcomed.wait()
            self.stream.welcomed.clear()

    async def _poll(self) -> None:
        """Look for models that came, went or changed in the repository."""
        while True:
            await asyncio.sleep(self.config.repository_poll_s)
            try:
                found = await to_daemon_thread(self.find_catalog)
            except (ModelFolderError, OSError, ValueError) as error:
                log.warning("the model repository can't be read; the models found before stay", error=str(error))
                continue
            if found != self.loader.routes.catalog:
                log.info("the model repository has changed", models=len(found.models), errors=len(found.errors))
                await self.loader.put(found)

    async def _tick(self) -> None:
        """End engines whose tasks break a limit, and load and unload models. Does neither while engines are paused."""
        while True:
            await asyncio.sleep(TICK_S)
            self.ticks += 1
            if self.dispatcher.paused:
                continue
            if self.pool.check(memory=self.ticks % MEMORY_TICKS == 0):
                self.dispatcher.want_heartbeat()
            if self.sampler.meter is not None and self.pool.busy:
                self.sampler.running = self.pool.batches_running()
            self.loader.tick()
