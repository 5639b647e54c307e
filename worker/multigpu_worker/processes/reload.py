"""`mgpuctl handlers reload`: the default engine process is replaced by one that reads the handlers' files anew."""

import asyncio
from collections.abc import Callable

import structlog
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.engines.handlers.sources import version_of
from multigpu_worker.processes.pool import HANDLERS_CLOSE_S
from multigpu_worker.processes.process import DefaultProcess
from multigpu_worker.waiting import until

log = structlog.get_logger()

ERROR_CHARS_MAX = 1 << 10


class HandlersReload:
    """On the event loop. `reloaded` is called after each reload, when the engine is ready."""

    def __init__(self, process: DefaultProcess, drain_timeout_s: float, reloaded: Callable[[], None]) -> None:
        self._process = process
        self._drain_timeout_s = drain_timeout_s
        self._reloaded = reloaded
        self._wanted = asyncio.Event()
        # Reloads that have ended, and why the last one changed nothing.
        self._count = 0
        self._error = ""

    @property
    def version(self) -> str:
        return version_of(self._process.host.sources or {})

    def message(self) -> pb.Handlers | None:
        """For heartbeats. None: there are no handlers."""
        if not self._process.host.settings.engine.handlers:
            return None
        return pb.Handlers(version=self.version, reloads=self._count, error=self._error[:ERROR_CHARS_MAX])

    def want(self) -> None:
        self._wanted.set()

    async def run(self) -> None:
        """Reload when that is wanted, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._reload()

    async def _reload(self) -> None:
        process, host, before = self._process, self._process.host, self.version
        process.retiring = True
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await until(lambda: not process.batches)
        except TimeoutError:
            leases = sum(len(batch.leases) for batch in process.batches.values())
            log.warning("tasks begin anew with the reloaded handlers", leases=leases)
        await host.close_handlers(HANDLERS_CLOSE_S)
        host.reload()
        process.replace()
        await until(lambda: host.sources is not None and host.ready)
        process.retiring = False
        self._error = host.reload_error
        self._count += 1
        log.info("handlers reloaded", before=before, version=self.version, error=self._error)
        self._reloaded()
