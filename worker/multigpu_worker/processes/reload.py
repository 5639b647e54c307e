"""`mgpuctl handlers reload`: the default engine process gives way to one that reads the handlers' files anew."""

import asyncio
from collections.abc import Callable

import structlog
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.engines.handlers.sources import version_of
from multigpu_worker.processes.process import EngineProcess

log = structlog.get_logger()

_POLL_S = 0.02
ERROR_CHARS_MAX = 1 << 10


class HandlersReload:
    """On the event loop. `reloaded` is called after each, with the engine ready."""

    def __init__(self, base: EngineProcess, drain_timeout_s: float, reloaded: Callable[[], None]) -> None:
        self._base = base
        self._drain_timeout_s = drain_timeout_s
        self._reloaded = reloaded
        self._wanted = asyncio.Event()
        # How many have ended, and why the last one changed nothing.
        self.count = 0
        self.error = ""

    @property
    def version(self) -> str:
        return version_of(self._base.host.sources or {})

    def message(self) -> pb.Handlers | None:
        """As heartbeats tell it. None: there are no handlers."""
        if not self._base.host.settings.handlers:
            return None
        return pb.Handlers(version=self.version, reloads=self.count, error=self.error[:ERROR_CHARS_MAX])

    def want(self) -> None:
        self._wanted.set()

    async def run(self) -> None:
        """Reload when that is wanted, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._reload()

    async def _reload(self) -> None:
        base, before = self._base, self.version
        base.retiring = True
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while base.batches:  # noqa: ASYNC110  it is told to nobody else
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            log.warning(
                "tasks begin anew with the reloaded handlers", leases=sum(len(b.leases) for b in base.batches.values())
            )
        base.host.reload()
        base.replace()
        while base.host.sources is None or not base.host.ready:  # noqa: ASYNC110  as above
            await asyncio.sleep(_POLL_S)
        base.retiring = False
        self.error = base.host.reload_error
        self.count += 1
        log.info("handlers reloaded", before=before, version=self.version, error=self.error)
        self._reloaded()
