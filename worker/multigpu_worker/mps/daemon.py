"""NVIDIA's Multi-Process Service on the worker's GPU: one daemon and pipe directory a GPU, shared by its workers.

Three things are done here. The daemon and its server are kept up, and a worker is let in only if the GPU has a context
and pinned memory left for it. An engine is taken off the GPU (`detach`) before anybody kills it: a client that dies by
a signal with work under way leaves the server undefined. And a fault is contained: the server stands still until every
client has exited, so each worker ends its own engine, the last one has the server started again, and the client that
the server's log names answers for it (`Fault`).

None of it blocks the event loop, and everything has a limit in time.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import structlog

from multigpu_worker.mps.claims import Claim, Claims, make_private_folder
from multigpu_worker.mps.control import GpuFullError, MpsControl, MpsError, ServerLog, UnknownAnswerError

log = structlog.get_logger()

POLL_S = 1.0
# How long a server may take to be ready, and other clients to exit after a fault.
READY_TIMEOUT_S = 60.0
RECOVERY_TIMEOUT_S = 30.0
_RETRY_S = 0.05
# After a request for a server, another one is made no sooner.
_SERVER_PATIENCE_S = 2.0
FORCE_TIMEOUT_S = 30.0
# A fault may kill its client a moment before the server says so.
_FAULT_LOOKS = 3
_FAULT_LOOK_S = 0.15
_RESTART_DELAY_S = 1.0
_RESTART_DELAY_MAX_S = 15.0


class MpsState(Enum):
    """The values are those of multigpu.v1.MpsState."""

    OFF = 1
    RUNNING = 2
    FAULT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsStatus:
    """The fields are those of multigpu.v1.MpsStatus."""

    state: MpsState
    message: str = ""
    clients: int = 0
    clients_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsLimits:
    """What an engine may take of its GPU."""

    # Of its threads; 0: no limit.
    active_thread_percentage: float = 0.0
    # Of its memory; 0: no limit.
    pinned_bytes: int = 0
    # How long the server may take to let go of it.
    terminate_timeout_s: float = 20.0
    # Of the GPU: contexts, and memory.
    clients_max: int = 48
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault stopped the GPU's server, and with it every engine on the GPU."""

    # An engine of ours did it.
    ours: bool
    message: str
    # It is known whose doing it was.
    known: bool


class Mps:
    """A worker's part in the MPS of its GPU. Must be used on one event loop."""

    def __init__(self, control: MpsControl, worker_id: str, limits: MpsLimits) -> None:
        self.control = control
        self.worker_id = worker_id
        self.limits = limits
        self.claims = Claims(control.pipe_dir)
        self.log = ServerLog(control.log_dir)
        self.status = MpsStatus(state=MpsState.RUNNING, clients_max=limits.clients_max)
        # Was begun by a worker, so that the last one ends it.
        self._begun_mark = control.pipe_dir / "begun-by-worker"
        self._server_pid = 0
        # Our engines: the base, and those of models.
        self._engine_pids: set[int] = set()
        # Engines of ours whose end is being looked into: what the log says of it must still be there.
        self.burying = 0
        # Clients of our engine's process group, as far as they were seen.
        self._ours: set[int] = set()
        # Clients of others on the server, as of the last look.
        self._strangers = 0
        # Some process of our engine's group was a client.
        self._connected = False
        self._forced = False
        # An engine is being ended, or has just died: what the log says is about it.
        self._blaming = False
        self._unknown_told = False

    # The daemon.

    async def open(self) -> None:
        """Have a daemon and a server, and a place on the GPU. MpsError: it can't be had."""
        try:
            # One after the other, so that nothing is made behind a link.
            make_private_folder(self.control.pipe_dir.parent, ours=False)
            for folder in (self.control.pipe_dir, self.control.log_dir):
                make_private_folder(folder, ours=True)
            async with self.claims.lock():
                if not await self.control.alive():
                    await self._start_daemon()
                self._admit(await self._strangers_on(await self.control.servers()))
        except OSError as error:  # a timeout of the lock among them
            raise MpsError(
                f"the pipe directory {self.control.pipe_dir} can't be used: {error or 'it is locked'}; "
                "set mps_pipe_dir to a folder of this user's, or mps to off"
            ) from error
        try:
            await self.before_start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Give our place up. The last one out ends the daemon, if a worker began it and nobody uses it."""
        try:
            async with self.claims.lock():
                self.claims.release()
                if self._begun_by_worker() and not self.claims.others():
                    servers = await self.control.servers()
                    if not any([(await self.control.look(pid))[1] for pid in servers]):
                        self._begun_mark.unlink()
                        await self.control.quit()
        except (MpsError, OSError) as error:
            log.warning("the MPS daemon was left as it is", error=str(error))

    async def _start_daemon(self) -> None:
        """Under the lock."""
        await self.control.start()
        end_s = time.monotonic() + READY_TIMEOUT_S
        while not await self.control.alive():
            if time.monotonic() > end_s:
                raise MpsError(f"the MPS daemon does not come up; see {self.control.log_dir}/control.log")
            await asyncio.sleep(_RETRY_S)
        self._begun_mark.write_text(self.control.daemon_pid(), encoding="ascii")
        log.info("MPS daemon started", device_id=self.control.device_id, pipe_dir=str(self.control.pipe_dir))

    def _begun_by_worker(self) -> bool:
        """Whether the daemon that runs now is one that a worker began."""
        try:
            begun = self._begun_mark.read_text(encoding="ascii")
        except FileNotFoundError:
            return False
        return begun == self.control.daemon_pid()

    def _admit(self, strangers: int) -> None:
        """Under the lock: claim a context and our pinned memory, if they can be had. `strangers`: clients of nobody."""
        others = self.claims.others()
        taken = len(others) + strangers
        if taken >= self.limits.clients_max:
            raise GpuFullError(
                f"the GPU {self.control.device_id} has {taken} of {self.limits.clients_max} MPS contexts taken: "
                "run fewer workers on it"
            )
        pinned_bytes = sum(claim.pinned_bytes for claim in others)
        if self.limits.pinned_bytes and pinned_bytes + self.limits.pinned_bytes > self.limits.memory_bytes:
            raise GpuFullError(
                f"the workers of GPU {self.control.device_id} have claimed {pinned_bytes >> 20} MiB of its "
                f"{self.limits.memory_bytes >> 20} MiB already, so {self.limits.pinned_bytes >> 20} MiB more can't be "
                "had: lower mps_pinned_device_mem_limit_bytes, or run fewer workers on it"
            )
        self._claim()

    def _claim(self) -> None:
        # One stands for all of ours: the others count as what they are, contexts that are taken.
        engine_pid = min(self._engine_pids, default=0)
        claim = Claim(worker_id=self.worker_id, engine_pid=engine_pid, pinned_bytes=self.limits.pinned_bytes)
        self.claims.hold(claim)

    async def _strangers_on(self, servers: list[int]) -> int:
        """Under the lock: how many clients belong to no worker's engine."""
        engines = {claim.engine_pid for claim in self.claims.others()}
        clients = [client for pid in servers for client in (await self.control.look(pid))[1]]
        return sum(_group_of(client) not in engines for client in clients)

    # The engine's life, as processes/host.py tells it.

    def environment(self) -> dict[str, str]:
        """What makes an engine a client."""
        env = self.control.environment()
        if self.limits.active_thread_percentage:
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{self.limits.active_thread_percentage:g}"
        if self.limits.pinned_bytes:
            env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={self.limits.pinned_bytes >> 20}M"
        return env

    def started(self, engine_pid: int) -> None:
        """An engine process of ours began; it leads its process group."""
        if not self._engine_pids:
            self._ours = set()
            self._blaming = self._forced = self._connected = False
        self._engine_pids.add(engine_pid)
        self._ours.add(engine_pid)
        self._claim()

    def ended(self, engine_pid: int) -> None:
        """It is gone."""
        self._engine_pids.discard(engine_pid)
        if self._engine_pids and self.status.state is not MpsState.FAULT:
            self._blaming = self._forced = False

    async def before_start(self) -> None:
        """Wait until the server takes clients, and see to it that it does. MpsError."""
        end_s = time.monotonic() + READY_TIMEOUT_S
        faulty_since_s: float | None = None
        asked_s = -_SERVER_PATIENCE_S
        while True:
            if self.burying and time.monotonic() <= end_s:
                await asyncio.sleep(_RETRY_S)
                continue
            async with self.claims.lock():
                try:
                    servers = await self.control.servers()
                except UnknownAnswerError:
                    raise
                except MpsError:
                    if not self._begun_mark.exists() and self._server_pid:
                        raise MpsError("the MPS daemon is gone; whoever started it has to start it again") from None
                    await self._start_daemon()
                    continue
                if not servers and time.monotonic() - asked_s > _SERVER_PATIENCE_S:
                    asked_s = time.monotonic()
                    await self.control.start_server()
                for pid in servers:
                    state, clients = await self.control.look(pid)
                    if state == "ACTIVE":
                        self._set_active(pid)
                        return
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
            await asyncio.sleep(_RETRY_S)

    async def restarted(self) -> None:
        """Wait until an engine can be started again, however long that takes."""
        delay_s = _RESTART_DELAY_S
        while True:
            try:
                return await self.before_start()
            except UnknownAnswerError as error:
                return self._unknown(error)  # the engine will see whether the server takes it
            except (MpsError, OSError) as error:
                self.status = MpsStatus(state=MpsState.FAULT, message=str(error), clients_max=self.limits.clients_max)
                log.error("no engine, as MPS doesn't work; trying again", error=str(error), delay_s=delay_s)  # noqa: TRY400
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RESTART_DELAY_MAX_S)

    def _set_active(self, server_pid: int) -> None:
        if self.status.state is MpsState.FAULT or server_pid != self._server_pid:
            log.info("MPS server is active", server_pid=server_pid)
        self._server_pid = server_pid
        self.log.offset = self.log.size()
        self._blaming = False
        self.status = MpsStatus(
            state=MpsState.RUNNING, clients=self.status.clients, clients_max=self.limits.clients_max
        )

    async def detach(self, group: int) -> None:
        """Take every process of the group off the GPU, so that it can be killed; they are stopped when this returns.

        Bounded: if the server won't let go, it is shut down, which ends the other clients' work too. An answer in an
        unknown format is no reason for that: the group alone is ended.
        """
        self._blaming = True
        try:
            async with asyncio.timeout(self.limits.terminate_timeout_s):
                await self._detach(group)
        except UnknownAnswerError as error:
            self._unknown(error)
            _signal(group, signal.SIGSTOP)
        except (TimeoutError, MpsError, OSError) as error:
            log.error(  # noqa: TRY400  the reason is all there is to say
                "MPS does not let go of the engine, so the GPU's server is shut down; its other clients fail with it",
                engine_pid=group,
                error=str(error) or f"no answer within {self.limits.terminate_timeout_s:g} s",
            )
            await self._force()

    async def _detach(self, group: int) -> None:
        done: set[tuple[int, int]] = set()
        while True:
            left = await self._attached(group) - done
            for server_pid, client in left:
                try:
                    gone = await self.control.terminate(server_pid, client, self.limits.terminate_timeout_s)
                except UnknownAnswerError as error:
                    self._unknown(error)
                    gone = True  # unconfirmed, and to ask again would tell no more
                if gone:
                    done.add((server_pid, client))
            if left - done:
                await asyncio.sleep(_RETRY_S)
                continue
            # Might one of them just be connecting? When they can't, we look again.
            _signal(group, signal.SIGSTOP)
            while any(state not in "TtZX" for _, state in await look_for_members(group)):  # noqa: ASYNC110  nobody tells us
                await asyncio.sleep(0.001)
            if not await self._attached(group) - done:
                return
            _signal(group, signal.SIGCONT)

    async def _attached(self, group: int) -> set[tuple[int, int]]:
        """The group's clients, each with its server."""
        pids = {pid for pid, _ in await look_for_members(group)}
        attached = {
            (server_pid, client)
            for server_pid in await self.control.servers()
            for client in (await self.control.look(server_pid))[1]
            if client in pids
        }
        self._ours |= {client for _, client in attached}
        self._connected |= bool(attached)
        return attached

    def _unknown(self, error: UnknownAnswerError) -> None:
        """Say once that the daemon isn't understood."""
        if not self._unknown_told:
            self._unknown_told = True
            log.error("MPS is not understood, so the ends of engines are unconfirmed", error=str(error))

    async def _force(self) -> None:
        self._forced = True
        try:
            async with asyncio.timeout(FORCE_TIMEOUT_S):
                for pid in await self.control.servers():
                    await self.control.shut_down_server(pid, force=True)
        except (TimeoutError, MpsError) as error:
            log.error("the GPU's MPS server can't be shut down either; going on", error=str(error))  # noqa: TRY400

    async def after_death(self) -> Fault | None:
        """Whether a fault of the server's is behind the end of our engine, and whose it was."""
        self._blaming = True
        if self._forced:
            return None
        state = ""
        for look in range(_FAULT_LOOKS):
            if look:
                await asyncio.sleep(_FAULT_LOOK_S)
            try:
                state = (await self.control.look(self._server_pid))[0] or "gone"
            except UnknownAnswerError as error:
                self._unknown(error)
                state = "unknown"
            except MpsError:
                continue
            told, blamed = self.log.fault()
            if told or state in ("FAULT", "gone"):
                return self._fault(blamed, state)
        # Not one answer: the daemon is gone, and its server with it.
        return None if state else self._fault(None, "gone")

    def _fault(self, blamed: int | None, state: str) -> Fault:
        if blamed is not None:
            ours = blamed in self._ours
            message = f"the GPU's MPS server had a fatal fault; its log blames client {blamed}"
        elif state == "gone":
            ours, message = False, "the GPU's MPS server was shut down or died"
        else:
            ours = not self._strangers
            message = "the GPU's MPS server had a fatal fault, and its log blames no client"
        message += ", an engine of this worker" if ours else ""
        self.status = MpsStatus(
            state=MpsState.FAULT,
            message=message,
            clients=self.status.clients,
            clients_max=self.limits.clients_max,
        )
        log.error("MPS fault", message=message, ours=ours, server_pid=self._server_pid)
        return Fault(ours=ours, message=message, known=ours or blamed is not None)

    # Between lives.

    async def watch(self, faulty: Callable[[], Any]) -> None:
        """Look at the server for ever, and call `faulty` as long as it stands still for a fault."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._blaming:
                continue
            try:
                if await self._look():
                    faulty()
            except UnknownAnswerError as error:
                self._unknown(error)
            except MpsError as error:
                log.warning("MPS doesn't tell how it is", error=str(error))

    async def _look(self) -> bool:
        """True: the server is in FAULT."""
        size = self.log.size()
        state, clients = await self.control.look(self._server_pid)
        if not state and not self._connected and (servers := await self.control.servers()):
            self._server_pid = servers[0]  # it was exchanged while we did not use it
            state, clients = await self.control.look(self._server_pid)
        states = {pid: state for group in list(self._engine_pids) for pid, state in await look_for_members(group)}
        self._ours |= states.keys() & set(clients)
        self._connected |= bool(states.keys() & set(clients))
        self._strangers = sum(client not in self._ours for client in clients)
        if self._blaming:
            return False
        if state == "ACTIVE" and any(states.get(pid, "Z") != "Z" for pid in self._engine_pids):
            # An engine that lives beside an active server was not hit by any fault before.
            self.log.offset = size
        self.status = MpsStatus(state=self.status.state, clients=len(clients), clients_max=self.limits.clients_max)
        return state == "FAULT" or (not state and self._connected)


async def look_for_members(group: int) -> list[tuple[int, str]]:
    """`members`, off the event loop: on a host of many processes that takes long."""
    return await asyncio.to_thread(members, group)


def members(group: int) -> list[tuple[int, str]]:
    """The processes of a process group, each with its state as /proc has it."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            fields = stat.rpartition(") ")[2].split()
            if int(fields[2]) == group:
                found.append((int(entry.name), fields[0]))
    return found


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _signal(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)
