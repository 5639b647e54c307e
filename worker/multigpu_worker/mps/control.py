"""NVIDIA's `nvidia-cuda-mps-control`, spoken to as its documentation says: one command on standard input, one answer.

https://docs.nvidia.com/deploy/mps. A control daemon answers on the socket in its pipe directory; it starts a server for
each user, and CUDA programs that see the same pipe directory become that server's clients.
"""

import asyncio
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
# A daemon that works answers at once; a server takes longer to come up on a host of many GPUs without persistence mode.
COMMAND_TIMEOUT_S = 10.0
_QUOTED_MAX = 200
# Of terminate_client: a number or a name of CUDA's results.
_RESULT = re.compile(r"\d+|CUDA_\w+")
_STATES = ("INITIALIZING", "ACTIVE", "FAULT")
_BLAMED = re.compile(r"client\D{0,12}?(\d+)", re.IGNORECASE)
_FATAL = re.compile(r"fatal|mmu fault|memory fault", re.IGNORECASE)


class MpsError(Exception):
    """MPS doesn't do what is needed; the message says what is wrong and what to do."""


class UnknownAnswerError(MpsError):
    """The daemon answers in a format that we don't know: what we asked for may be done or not."""

    def __init__(self, command: str, answer: str) -> None:
        super().__init__(
            f"{PROGRAM} answers {command} in a format that this worker doesn't know: {answer[:_QUOTED_MAX]!r}; "
            "set mps to off, and report the answer and the driver's version"
        )


class GpuFullError(MpsError):
    """The GPU has no context, or not enough pinned memory, left for another worker."""


class MpsControl:
    """One GPU's control daemon."""

    def __init__(self, device_id: str, pipe_dir: Path) -> None:
        self.device_id = device_id
        self.pipe_dir = pipe_dir
        self.log_dir = pipe_dir / "log"

    def environment(self) -> dict[str, str]:
        """Where the daemon is, for the daemon itself and for its clients."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_dir), "CUDA_MPS_LOG_DIRECTORY": str(self.log_dir)}

    async def start(self) -> None:
        """Start the daemon in the background, for this GPU alone. MpsError."""
        await self._run(["-d"], "", {"CUDA_VISIBLE_DEVICES": self.device_id})

    async def alive(self) -> bool:
        """Whether a daemon answers here."""
        try:
            await self.ask("get_server_list")
        except MpsError:
            return False
        return True

    def daemon_pid(self) -> str:
        """The daemon's process id, as it wrote it down; empty if it didn't."""
        try:
            return (self.pipe_dir / f"{PROGRAM}.pid").read_text(encoding="ascii").strip()
        except OSError:
            return ""

    async def servers(self) -> list[int]:
        """The process ids of its servers. MpsError."""
        return _pids("get_server_list", await self.ask("get_server_list"))

    async def look(self, server_pid: int) -> tuple[str, list[int]]:
        """A server's state, INITIALIZING, ACTIVE or FAULT, and the process ids of its clients. MpsError.

        The state is empty if there is no such server.
        """
        answer = await self.ask(f"get_server_status {server_pid}\nget_client_list {server_pid}")
        first, _, rest = answer.strip().partition("\n")
        state = next((state for state in _STATES if state in first.split()), "")
        if state:
            return state, _pids("get_client_list", rest)
        # How the lack of a server is worded is not documented.
        if server_pid in await self.servers():
            raise UnknownAnswerError("get_server_status", first)
        return "", []

    async def terminate(self, server_pid: int, client_pid: int, timeout_s: float) -> bool:
        """Take a client's contexts off the GPU; True: the server says that it is done. MpsError."""
        answer = (await self.ask(f"terminate_client {server_pid} {client_pid}", timeout_s)).strip()
        if not _RESULT.fullmatch(answer):
            raise UnknownAnswerError("terminate_client", answer)
        return answer in ("0", "CUDA_SUCCESS")

    async def start_server(self) -> None:
        """Have a server for this user started. MpsError."""
        await self.ask(f"start_server -uid {os.getuid()}")

    async def shut_down_server(self, server_pid: int, *, force: bool) -> None:
        """End a server when its last client has gone, or at once. MpsError."""
        await self.ask(f"shutdown_server {server_pid}{' -f' if force else ''}")

    async def quit(self) -> None:
        """End the daemon and its servers. MpsError."""
        await self.ask("quit")

    async def ask(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """One command's answer. MpsError: the daemon doesn't run, or doesn't answer."""
        return await self._run([], command + "\n", {}, timeout_s)

    async def _run(
        self, arguments: list[str], words: str, extra: dict[str, str], timeout_s: float = COMMAND_TIMEOUT_S
    ) -> str:
        # In a thread, and by subprocess: asyncio's own way forks, for which gRPC's threads are not made.
        return await asyncio.to_thread(self._run_blocking, arguments, words, extra, timeout_s)

    def _run_blocking(self, arguments: list[str], words: str, extra: dict[str, str], timeout_s: float) -> str:
        what = " ".join([PROGRAM, *arguments]) + (f" ({words.strip()})" if words else "")
        try:
            done = subprocess.run(
                [PROGRAM, *arguments],
                input=words.encode(),
                # A daemon keeps what it inherits: a pipe to it would never end.
                stdout=subprocess.DEVNULL if arguments else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **self.environment(), **extra},
                start_new_session=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MpsError(f"{what} has not answered within {timeout_s:g} s; see {self.log_dir}/control.log") from None
        except OSError as error:
            raise MpsError(f"{PROGRAM} can't be run: {error}; it comes with NVIDIA's driver") from error
        text = (done.stdout or b"").decode(errors="replace")
        if done.returncode:
            detail = text.strip() or f"exit code {done.returncode}"
            raise MpsError(f"{what} failed: {detail}; see {self.log_dir}/control.log")
        return text


def _pids(command: str, answer: str) -> list[int]:
    """Process ids, one a line. UnknownAnswerError."""
    pids = [line.strip() for line in answer.splitlines() if line.strip()]
    if not all(pid.isdecimal() for pid in pids):
        raise UnknownAnswerError(command, answer.strip())
    return [int(pid) for pid in pids]


class ServerLog:
    """The servers' log of one daemon, read from where we last stood: whom does it blame for a fault?

    A line that speaks of a fatal error and of a client names it by its process id; the first one named is to blame, as
    those after it only heard of it. The format is not documented in full, so a log that names nobody is no error.
    """

    def __init__(self, log_dir: Path) -> None:
        self.path = log_dir / "server.log"
        self.offset = self.size()

    def size(self) -> int:
        """Its length in bytes; 0 if it isn't there."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def fault(self) -> tuple[bool, int | None]:
        """Whether it tells of a fatal error since `offset`, and the process id that it blames."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset if self.offset <= self.size() else 0)  # it may have been rotated
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return False, None
        fatal = [line for line in lines if _FATAL.search(line)]
        # The head of a line, in brackets, has numbers of its own.
        named: Callable[[str], re.Match[str] | None] = lambda line: _BLAMED.search(line.rpartition("] ")[2])  # noqa: E731
        blamed = next((int(match[1]) for line in fatal if (match := named(line))), None)
        return bool(fatal), blamed
