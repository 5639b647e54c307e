"""A worker's engines as clients of its GPU's MPS server.

An engine is detached from the server before anybody kills it: a client that dies by a signal while it has work in
progress leaves the server in an undefined state.

A fault stops the server until every client has exited. Each worker ends its own engines and waits until the server has
recovered. The client that the server's log names is to blame (`Fault`).
"""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from multigpu_worker.mps.control import MpsControl, MpsError, MpsState, MpsStatus, ServerLog, UnknownAnswerError
from multigpu_worker.process_group import look_for_members, signal_group, stop_group

log = structlog.get_logger()

# Not shorter, because a poll runs the control program and scans all processes. Most faults show earlier, in engines.
POLL_S = 5.0
FORCE_TIMEOUT_S = 30.0
# A server that stays in the state FAULT for this time is shut down by force.
RECOVERY_TIMEOUT_S = 30.0
RETRY_S = 0.05
# A fault may kill its client before the server reports the fault, so a death is followed by several looks.
_FAULT_LOOKS = 3
_FAULT_LOOK_S = 0.15
_RESTART_DELAY_S = 1.0
_RESTART_DELAY_MAX_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsLimits:
    # Share of the GPU's threads for one engine; 0: no limit.
    active_thread_percentage: float = 0.0
    # GPU memory of one engine; 0: no limit.
    pinned_bytes: int = 0
    # How long the server may take to detach one engine.
    terminate_timeout_s: float = 20.0
    # The maximum number of client contexts on the GPU.
    clients_max: int = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault stopped the GPU's server, and with it every engine on the GPU."""

    # An engine of this worker caused it.
    ours: bool
    message: str
    # It is known which client, or at least that an engine of this worker, caused it.
    cause_known: bool


class Mps:
    """Runs on the event loop."""

    def __init__(self, control: MpsControl, limits: MpsLimits) -> None:
        self.control = control
        self._limits = limits
        self.status = MpsStatus(state=MpsState.RUNNING, clients_max=limits.clients_max)
        self._log = ServerLog(control.log_dir)
        # 0: no server of the daemon is known yet.
        self._server_pid = 0
        # Engines of this worker; each leads its process group.
        self._engine_pids: set[int] = set()
        # The number of engines whose death is being examined. Meanwhile the log's offset must not move.
        self.reaping_count = 0
        # The pids of clients in this worker's engine process groups that were seen so far.
        self._ours: set[int] = set()
        # The number of other clients of the server.
        self._foreign_clients = 0
        # An engine of this worker has been a client.
        self._connected = False
        self._forced = False
        # An engine is being ended or has just died, so new entries of the server's log are about that.
        self._log_in_use = False
        self._unknown_logged = False

    # --- starts ------------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Variables that make an engine a client."""
        env = self.control.environment()
        if self._limits.active_thread_percentage:
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{self._limits.active_thread_percentage:g}"
        if self._limits.pinned_bytes:
            env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={self._limits.pinned_bytes >> 20}M"
        return env

    def started(self, engine_pid: int) -> None:
        if not self._engine_pids:
            self._ours = set()
            self._log_in_use = self._forced = self._connected = False
        self._engine_pids.add(engine_pid)
        self._ours.add(engine_pid)

    def ended(self, engine_pid: int) -> None:
        self._engine_pids.discard(engine_pid)
        if self._engine_pids and self.status.state is not MpsState.FAULT:
            self._log_in_use = self._forced = False

    async def restarted(self) -> None:
        """Wait until an engine can be started again, without a limit."""
        delay_s = _RESTART_DELAY_S
        while True:
            try:
                return await self.wait_until_ready()
            except UnknownAnswerError as error:
                return self._log_unknown(error)  # start the engine: it finds out whether the server accepts it
            except MpsError as error:
                self._set_status(MpsState.FAULT, str(error), clients=0)
                log.error("no engine can start, as MPS fails; trying again", error=str(error), delay_s=delay_s)  # noqa: TRY400
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RESTART_DELAY_MAX_S)

    async def wait_until_ready(self) -> None:
        """Wait until the daemon answers and none of its servers is in the state FAULT. Raises MpsError.

        There need not be a server: the daemon starts one for the first client.
        """
        end_s = time.monotonic() + RECOVERY_TIMEOUT_S
        while True:
            if not self.reaping_count:
                servers = await self.control.servers()
                faulty = [pid for pid in servers if (await self.control.look(pid))[0] == "FAULT"]
                if not faulty:
                    break
                if time.monotonic() > end_s:
                    log.warning("the GPU's MPS server does not recover, so it is shut down", server_pids=faulty)
                    for pid in faulty:
                        await self.control.shut_down_server(pid)
                    end_s = time.monotonic() + RECOVERY_TIMEOUT_S
            await asyncio.sleep(RETRY_S)
        if self.status.state is MpsState.FAULT:
            log.info("MPS works again")
        self._server_pid = next(iter(servers), 0)
        self._log.offset = self._log.size()
        self._log_in_use = False
        self._set_status(MpsState.RUNNING)

    def _set_status(self, state: MpsState, message: str = "", clients: int | None = None) -> None:
        clients = self.status.clients if clients is None else clients
        self.status = MpsStatus(state=state, message=message, clients=clients, clients_max=self._limits.clients_max)

    # --- ends --------------------------------------------------------------------------------------------------------

    async def detach(self, group: int) -> None:
        """Detach every process of a group from the GPU and stop it (SIGSTOP), so that the group can be killed.

        If the server does not detach them in time, it is shut down, which also ends the work of its other clients.
        After an answer in an unknown format the group is only stopped.
        """
        self._log_in_use = True
        try:
            async with asyncio.timeout(self._limits.terminate_timeout_s):
                await self._detach(group)
        except UnknownAnswerError as error:
            self._log_unknown(error)
            signal_group(group, signal.SIGSTOP)
        except (TimeoutError, MpsError, OSError) as error:
            log.error(  # noqa: TRY400  the reason is all there is to say
                "MPS does not let go of the engine, so the GPU's server is shut down; its other clients fail with it",
                engine_pid=group,
                error=str(error) or f"no answer within {self._limits.terminate_timeout_s:g} s",
            )
            await self._force()

    async def _detach(self, group: int) -> None:
        done: set[tuple[int, int]] = set()
        while True:
            left = await self._attached(group) - done
            for server_pid, client in left:
                try:
                    gone = await self.control.terminate(server_pid, client, self._limits.terminate_timeout_s)
                except UnknownAnswerError as error:
                    self._log_unknown(error)
                    gone = True  # unconfirmed, but asking again would not confirm it either
                if gone:
                    done.add((server_pid, client))
            if left - done:
                await asyncio.sleep(RETRY_S)
                continue
            # A process may have connected meanwhile: look again when all are stopped, so that none can connect.
            await stop_group(group)
            if not await self._attached(group) - done:
                return
            signal_group(group, signal.SIGCONT)

    async def _attached(self, group: int) -> set[tuple[int, int]]:
        """The group's clients, each as (server's pid, client's pid)."""
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

    def _log_unknown(self, error: UnknownAnswerError) -> None:
        if not self._unknown_logged:
            self._unknown_logged = True
            log.error("an answer of MPS is not understood, so the ends of engines are unconfirmed", error=str(error))

    async def _force(self) -> None:
        self._forced = True
        try:
            async with asyncio.timeout(FORCE_TIMEOUT_S):
                for pid in await self.control.servers():
                    await self.control.shut_down_server(pid)
        except (TimeoutError, MpsError) as error:
            log.error("the GPU's MPS server can't be shut down; going on", error=str(error))  # noqa: TRY400

    # --- faults ------------------------------------------------------------------------------------------------------

    async def after_death(self) -> Fault | None:
        """The fault of the server that ended an engine of this worker; None: the server had none."""
        self._log_in_use = True
        if self._forced:
            return None
        state = ""
        for look in range(_FAULT_LOOKS):
            if look:
                await asyncio.sleep(_FAULT_LOOK_S)
            try:
                state = (await self._look())[0] or ("gone" if self._server_pid else "none")
            except UnknownAnswerError as error:
                self._log_unknown(error)
                state = "unknown"
            except MpsError:
                continue
            fatal, blamed = self._log.fault()
            if fatal or state in ("FAULT", "gone"):
                return self._fault(blamed, state)
        # Without any answer the daemon is gone, and its server with it.
        return None if state else self._fault(None, "gone")

    def _fault(self, blamed: int | None, state: str) -> Fault:
        if blamed is not None:
            ours = blamed in self._ours
            message = f"the GPU's MPS server had a fatal fault; its log blames client {blamed}"
        elif state == "gone":
            ours, message = False, "the GPU's MPS server was shut down or died"
        else:
            ours = not self._foreign_clients
            message = "the GPU's MPS server had a fatal fault, and its log blames no client"
        message += ", an engine of this worker" if ours else ""
        self._set_status(MpsState.FAULT, message)
        log.error("MPS fault", message=message, ours=ours, server_pid=self._server_pid)
        return Fault(ours=ours, message=message, cause_known=ours or blamed is not None)

    async def watch(self, faulty: Callable[[], Any]) -> None:
        """Poll the server until cancelled. Calls `faulty` at each poll while a fault has stopped the server."""
        answers = True
        while True:
            await asyncio.sleep(POLL_S)
            if self._log_in_use:
                continue
            try:
                if await self._has_fault():
                    faulty()
                answers = True
            except UnknownAnswerError as error:
                self._log_unknown(error)
            except MpsError as error:
                if answers:
                    log.warning("MPS does not answer", error=str(error))
                answers = False

    async def _look(self) -> tuple[str, list[int]]:
        """The server's state and its clients' pids; both empty if it is gone, or if none was started yet."""
        if not self._server_pid:
            self._server_pid = next(iter(await self.control.servers()), 0)
        return await self.control.look(self._server_pid) if self._server_pid else ("", [])

    async def _has_fault(self) -> bool:
        size = self._log.size()
        state, clients = await self._look()
        if not state and self._server_pid and not self._connected:
            self._server_pid = 0  # the server ended while no engine of this worker used it: look for its successor
            state, clients = await self._look()
        states = dict(await look_for_members(*self._engine_pids))
        self._ours |= states.keys() & set(clients)
        self._connected |= bool(states.keys() & set(clients))
        self._foreign_clients = sum(client not in self._ours for client in clients)
        if self._log_in_use:
            return False
        if state == "ACTIVE" and any(states.get(pid, "Z") != "Z" for pid in self._engine_pids):
            # The server is active and an engine alive: earlier log entries did not affect the engine. Skip them.
            self._log.offset = size
        # Clears the message about an earlier fault, because the server answers.
        self._set_status(self.status.state, clients=len(clients))
        return state == "FAULT" or (not state and self._connected)
