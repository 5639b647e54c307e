"""Commands for NVIDIA's `nvidia-cuda-mps-control`: one command on standard input, one answer on standard output.

See https://docs.nvidia.com/deploy/mps. A control daemon answers on the socket in its pipe directory and starts a server
for each user when the first client connects. CUDA programs with the same pipe directory become that server's clients.
The host's operator starts and stops the daemon; workers do not.
"""

import asyncio
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
# On a host with many GPUs and without persistence mode a server takes long to start.
COMMAND_TIMEOUT_S = 10.0
_QUOTED_MAX = 200
# The answer to terminate_client: number or name of a CUDA result.
_RESULT = re.compile(r"\d+|CUDA_\w+")
_STATES = ("INITIALIZING", "ACTIVE", "FAULT")
_BLAMED = re.compile(r"client\D{0,12}?(\d+)", re.IGNORECASE)
_FATAL = re.compile(r"fatal|mmu fault|memory fault", re.IGNORECASE)


class MpsState(Enum):
    """Values as in multigpu.v1.MpsState."""

    OFF = 1
    RUNNING = 2
    FAULT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsStatus:
    """Fields as in multigpu.v1.MpsStatus."""

    state: MpsState
    message: str = ""
    clients: int = 0
    clients_max: int = 0


class MpsError(Exception):
    """MPS cannot be used. The message says why, and what to do."""


class UnknownAnswerError(MpsError):
    """The daemon's answer has an unknown format: the command may have succeeded or not."""

    def __init__(self, command: str, answer: str) -> None:
        super().__init__(
            f"{PROGRAM} answers {command} in a format that this worker doesn't know: {answer[:_QUOTED_MAX]!r}; "
            "set mps to off, and report the answer and the driver's version"
        )


class MpsControl:
    def __init__(self, device_id: str, pipe_dir: Path) -> None:
        self.device_id = device_id
        self.pipe_dir = pipe_dir
        self.log_dir = pipe_dir / "log"

    def environment(self) -> dict[str, str]:
        """Variables for the control program and for clients."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_dir), "CUDA_MPS_LOG_DIRECTORY": str(self.log_dir)}

    async def servers(self) -> list[int]:
        """The pids of the daemon's servers. All commands raise MpsError."""
        return _pids("get_server_list", await self.ask("get_server_list"))

    async def look(self, server_pid: int) -> tuple[str, list[int]]:
        """A server's state (INITIALIZING, ACTIVE or FAULT) and its clients' pids; both empty if it does not exist."""
        answer = await self.ask(f"get_server_status {server_pid}\nget_client_list {server_pid}")
        first, _, rest = answer.strip().partition("\n")
        state = next((state for state in _STATES if state in first.split()), "")
        if state:
            return state, _pids("get_client_list", rest)
        # The answer for a server that does not exist is not documented.
        if server_pid in await self.servers():
            raise UnknownAnswerError("get_server_status", first)
        return "", []

    async def terminate(self, server_pid: int, client_pid: int, timeout_s: float) -> bool:
        """Destroy a client's contexts. Returns whether the server confirms that."""
        answer = (await self.ask(f"terminate_client {server_pid} {client_pid}", timeout_s)).strip()
        if not _RESULT.fullmatch(answer):
            raise UnknownAnswerError("terminate_client", answer)
        return answer in ("0", "CUDA_SUCCESS")

    async def shut_down_server(self, server_pid: int) -> None:
        """End a server at once. Its clients fail."""
        await self.ask(f"shutdown_server {server_pid} -f")

    async def ask(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run one command and return its answer."""
        # In a thread and with subprocess: asyncio's subprocesses fork, which gRPC's threads do not support.
        return await asyncio.to_thread(self._ask_blocking, command, timeout_s)

    def _ask_blocking(self, command: str, timeout_s: float) -> str:
        what = f"{PROGRAM} ({command})"
        try:
            done = subprocess.run(
                [PROGRAM],
                input=f"{command}\n".encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **self.environment()},
                start_new_session=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MpsError(f"{what} has not answered within {timeout_s:g} s; see {self.log_dir}/control.log") from None
        except OSError as error:
            raise MpsError(f"{PROGRAM} can't be run: {error}; it comes with NVIDIA's driver") from error
        text = done.stdout.decode(errors="replace")
        if done.returncode:
            detail = text.strip() or f"exit code {done.returncode}"
            raise MpsError(f"{what} failed: {detail}; if no control daemon runs, start it: {self._start_command()}")
        return text

    def _start_command(self) -> str:
        """What an operator runs to start the daemon."""
        variables = {"CUDA_VISIBLE_DEVICES": self.device_id, **self.environment()}
        assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return (
            f"systemctl start mgpu-mps@{self.device_id}, or without systemd "
            f"mkdir -p {shlex.quote(str(self.log_dir))} && {assigned} {PROGRAM} -d"
        )


def _pids(command: str, answer: str) -> list[int]:
    """Pids, one in each line. Raises UnknownAnswerError."""
    pids = [line.strip() for line in answer.splitlines() if line.strip()]
    if not all(pid.isdecimal() for pid in pids):
        raise UnknownAnswerError(command, answer.strip())
    return [int(pid) for pid in pids]


class ServerLog:
    """Finds the client that is to blame for a fault, in the part of the servers' log after `offset`.

    It is the first client that a line about a fatal error names by its pid; clients in later lines were only informed
    of the fault. The format is not fully documented, so a log that names no client is no error.
    """

    def __init__(self, log_dir: Path) -> None:
        self.path = log_dir / "server.log"
        self.offset = self.size()

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def fault(self) -> tuple[bool, int | None]:
        """Whether there is a fatal error, and the client to blame."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset if self.offset <= self.size() else 0)  # past the end: the log was rotated
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return False, None
        fatal = [line for line in lines if _FATAL.search(line)]
        # The prefix of a line, in brackets, contains numbers too.
        named = (_BLAMED.search(line.rpartition("] ")[2]) for line in fatal)
        return bool(fatal), next((int(match[1]) for match in named if match), None)
