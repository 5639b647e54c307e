"""The MPS daemon of a GPU, which all workers on the GPU share.

The first worker starts it; the last one ends it, unless another program started it. A worker is admitted if the GPU has
a context and enough pinned memory left. Nothing here blocks the event loop, and every wait has a limit.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from multigpu_worker.mps.claims import Claim, Claims, make_private_folder
from multigpu_worker.mps.control import GpuFullError, MpsControl, MpsError, UnknownAnswerError
from multigpu_worker.process_group import group_of

log = structlog.get_logger()

# Limits for a server to become ready, and for its clients to exit after a fault.
READY_TIMEOUT_S = 60.0
RECOVERY_TIMEOUT_S = 30.0
RETRY_S = 0.05
# A server is requested again after this time.
_SERVER_START_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsLimits:
    # Share of the GPU's threads for one engine; 0: no limit.
    active_thread_percentage: float = 0.0
    # GPU memory of one engine; 0: no limit.
    pinned_bytes: int = 0
    # For the server to detach one engine.
    terminate_timeout_s: float = 20.0
    # Contexts and memory of the GPU.
    clients_max: int = 48
    memory_bytes: int = 0


class MpsDaemon:
    def __init__(self, control: MpsControl, worker_id: str, limits: MpsLimits) -> None:
        self.control = control
        self.claims = Claims(control.pipe_dir)
        self._worker_id = worker_id
        self._limits = limits
        # Holds the pid of a daemon that a worker started.
        self._begun_mark = control.pipe_dir / "begun-by-worker"

    async def open(self) -> None:
        """Start the daemon if necessary, and claim a context. Raises MpsError."""
        try:
            # From the outermost on, so that nothing is created behind a link.
            make_private_folder(self.control.pipe_dir.parent, ours=False)
            for folder in (self.control.pipe_dir, self.control.log_dir):
                make_private_folder(folder, ours=True)
            async with self.claims.lock():
                if not await self.control.alive():
                    await self._start()
                self._admit(await self._strangers())
        except OSError as error:  # includes a timeout of the lock
            raise MpsError(
                f"the pipe directory {self.control.pipe_dir} can't be used: {error or 'it is locked'}; "
                "set mps_pipe_dir to a folder of this user's, or mps to off"
            ) from error

    async def close(self) -> None:
        """Release the claim. End the daemon if a worker started it and it has no users left."""
        try:
            async with self.claims.lock():
                self.claims.release()
                if self._begun_by_worker() and not self.claims.others() and not await self._clients():
                    self._begun_mark.unlink()
                    await self.control.quit()
        except (MpsError, OSError) as error:
            log.warning("the MPS daemon was left as it is", error=str(error))

    def claim(self, engine_pid: int) -> None:
        """One claim stands for all engines of this worker. `engine_pid`: any of them, 0 if none runs."""
        claim = Claim(worker_id=self._worker_id, engine_pid=engine_pid, pinned_bytes=self._limits.pinned_bytes)
        self.claims.hold(claim)

    async def active_server(self, *, known: bool, busy: Callable[[], bool]) -> int:
        """Wait until a server accepts clients, and start one if necessary; its pid. Raises MpsError.

        `known`: the daemon has had a server before. `busy`: the current server must not be replaced yet.
        """
        end_s = time.monotonic() + READY_TIMEOUT_S
        faulty_since_s: float | None = None
        requested_s = -_SERVER_START_S
        while True:
            if busy() and time.monotonic() <= end_s:
                await asyncio.sleep(RETRY_S)
                continue
            async with self.claims.lock():
                servers = await self._servers(known=known)
                if not servers and time.monotonic() - requested_s > _SERVER_START_S:
                    requested_s = time.monotonic()
                    await self.control.start_server()
                for pid in servers:
                    state, clients = await self.control.look(pid)
                    if state == "ACTIVE":
                        return pid
                    if state != "FAULT":
                        continue
                    faulty_since_s = faulty_since_s or time.monotonic()
                    overdue = time.monotonic() - faulty_since_s > RECOVERY_TIMEOUT_S
                    if not clients or overdue:
                        log.warning("the GPU's MPS server is started again", server_pid=pid, clients_left=clients)
                        await self.control.shut_down_server(pid, force=overdue)
                        await self.control.start_server()
            if time.monotonic() > end_s:
                raise MpsError(f"the GPU's MPS server is not ready; see {self.control.log_dir}/server.log")
            await asyncio.sleep(RETRY_S)

    # The methods below are called under the lock.

    async def _servers(self, *, known: bool) -> list[int]:
        """The daemon's servers. Starts the daemon if it is gone and a worker may do so."""
        try:
            return await self.control.servers()
        except UnknownAnswerError:
            raise
        except MpsError:
            if not self._begun_mark.exists() and known:
                raise MpsError("the MPS daemon is gone; whoever started it has to start it again") from None
            await self._start()
            return await self.control.servers()

    async def _start(self) -> None:
        await self.control.start()
        end_s = time.monotonic() + READY_TIMEOUT_S
        while not await self.control.alive():
            if time.monotonic() > end_s:
                raise MpsError(f"the MPS daemon does not come up; see {self.control.log_dir}/control.log")
            await asyncio.sleep(RETRY_S)
        self._begun_mark.write_text(self.control.daemon_pid(), encoding="ascii")
        log.info("MPS daemon started", device_id=self.control.device_id, pipe_dir=str(self.control.pipe_dir))

    def _begun_by_worker(self) -> bool:
        try:
            begun = self._begun_mark.read_text(encoding="ascii")
        except FileNotFoundError:
            return False
        return begun == self.control.daemon_pid()

    def _admit(self, strangers: int) -> None:
        """Claim a context and pinned memory. Raises GpuFullError. `strangers`: clients that belong to no worker."""
        limits = self._limits
        others = self.claims.others()
        taken = len(others) + strangers
        if taken >= limits.clients_max:
            raise GpuFullError(
                f"the GPU {self.control.device_id} has {taken} of {limits.clients_max} MPS contexts taken: "
                "run fewer workers on it"
            )
        pinned_bytes = sum(claim.pinned_bytes for claim in others)
        if limits.pinned_bytes and pinned_bytes + limits.pinned_bytes > limits.memory_bytes:
            raise GpuFullError(
                f"the workers of GPU {self.control.device_id} have claimed {pinned_bytes >> 20} MiB of its "
                f"{limits.memory_bytes >> 20} MiB already, so {limits.pinned_bytes >> 20} MiB more can't be "
                "had: lower mps_pinned_device_mem_limit_bytes, or run fewer workers on it"
            )
        self.claim(0)

    async def _clients(self) -> list[int]:
        return [client for pid in await self.control.servers() for client in (await self.control.look(pid))[1]]

    async def _strangers(self) -> int:
        """The number of clients that belong to no worker's engine."""
        engines = {claim.engine_pid for claim in self.claims.others()}
        return sum(group_of(client) not in engines for client in await self._clients())
