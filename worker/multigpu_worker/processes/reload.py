"""`mgpuctl handlers reload`: replaces the default engine process by one that reads the handlers' files again."""

import asyncio
from collections.abc import Callable

import structlog
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.engines.handlers.sources import version_of
from multigpu_worker.processes.default_process import DefaultProcess
from multigpu_worker.processes.pool import HANDLERS_CLOSE_S
from multigpu_worker.waiting import until

log = structlog.get_logger()

ERROR_CHARS_MAX = 1 << 10


class HandlersReload:
    """Runs on the event loop. `reloaded` is called after each reload, when the engine is ready."""

    def __init__(self, process: DefaultProcess, drain_timeout_s: float, reloaded: Callable[[], None]) -> None:
        self._process = process
        self._drain_timeout_s = drain_timeout_s
        self._reloaded = reloaded
        self._wanted = asyncio.Event()
        # The number of reloads that have ended, and why the last one kept the previous handlers; empty: it did not.
        self._count = 0
        self._error = ""

    @property
    def version(self) -> str:
        return version_of(self._process.sources or {})

    def message(self) -> pb.Handlers | None:
        """For heartbeats. None: there are no handlers."""
        if not self._process.settings.engine.handlers:
            return None
        return pb.Handlers(version=self.version, reloads=self._count, error=self._error[:ERROR_CHARS_MAX])

    def want(self) -> None:
        self._wanted.set()

    async def run(self) -> None:
        """Reload after each call of `want`, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._reload()

    async def _reload(self) -> None:
        process, before = self._process, self.version
        process.takes_no_batches = True
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await until(lambda: not process.batches)
        except TimeoutError:
            leases = sum(len(batch.leases) for batch in process.batches.values())
            log.warning("tasks begin anew with the reloaded handlers", leases=leases)
        await process.close_handlers(HANDLERS_CLOSE_S)
        process.reload()
        process.end_uncharged()
        await until(lambda: process.sources is not None and process.ready)
        process.takes_no_batches = False
        self._error = process.reload_error
        self._count += 1
        log.info("handlers reloaded", before=before, version=self.version, error=self._error)
        self._reloaded()
