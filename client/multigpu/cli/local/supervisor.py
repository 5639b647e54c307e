"""The supervisor of a local fleet: starts child processes, restarts those that die, and ends them in order.

It has one thread, one event loop and no gRPC, so that forking is safe; pidfds report deaths at once. If the supervisor
is killed, the kernel ends its children (PR_SET_PDEATHSIG). Each child has its own session, so that a terminal's Ctrl-C
reaches only the supervisor, which stops the workers first, to drain, and then the master.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESTART_DELAY_MIN_S = 0.1
RESTART_DELAY_MAX_S = 5.0
# After this lifetime the next restart is immediate again.
HEALTHY_AFTER_S = 10.0
# Deaths in a row after which a fleet that has never been ready gives up.
HOPELESS_DEATHS = 8
READ_BYTES = 64 * 1024
LINE_BYTES_MAX = 64 * 1024
PR_SET_PDEATHSIG = 1


def restart_delay_s(deaths_in_a_row: int) -> float:
    """None after the first death, then doubling up to RESTART_DELAY_MAX_S."""
    assert deaths_in_a_row >= 1
    if deaths_in_a_row == 1:
        return 0.0
    # An unbounded exponent would overflow a float after a night of deaths.
    return min(RESTART_DELAY_MAX_S, RESTART_DELAY_MIN_S * 2.0 ** min(deaths_in_a_row - 2, 16))


def describe_exit(returncode: int) -> str:
    """For the log: "killed by SIGKILL", "exit code 3"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """A command, and its name in the log."""

    name: str
    argv: Sequence[str]
    # Exit codes that mean that a restart can't help; its last lines say what would.
    rejections: frozenset[int] = frozenset()
    # Once the fleet has been ready, such an exit is restarted like any other.
    may_recover: bool = False
    # Never restarted.
    once: bool = False


class Child:
    """One process of the fleet and its restarts."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        on_line: Callable[[str, str], None],
        on_exit: Callable[["Child", int], None],
    ) -> None:
        self.spec = spec
        self.deaths_in_a_row = 0
        self.restart_timer: asyncio.TimerHandle | None = None
        self._on_line = on_line
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._gone = asyncio.Event()
        self._gone.set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        assert self._process is None, f"{self.spec.name} runs already"
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        try:
            process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509  this process has one thread, and never imports gRPC
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._process = process
        self._started_at = time.monotonic()
        self._gone.clear()
        loop = asyncio.get_running_loop()
        loop.add_reader(read_fd, _LineReader(read_fd, self.spec.name, self._on_line).read)
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, self._reap, pidfd)

    def signal(self, number: int) -> None:
        """Signals the process itself, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kills the process and its process group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Returns once no process runs."""
        await self._gone.wait()

    def _reap(self, pidfd: int) -> None:
        process = self._process
        assert process is not None
        returncode = process.poll()
        if returncode is None:
            return
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        lived_s = time.monotonic() - self._started_at
        self.deaths_in_a_row = 1 if lived_s >= HEALTHY_AFTER_S else self.deaths_in_a_row + 1
        self._process = None
        self._gone.set()
        self._on_exit(self, returncode)


class Supervisor:
    """Keeps a master and its workers alive until `stop`."""

    def __init__(
        self,
        *,
        on_line: Callable[[str, str], None],
        on_event: Callable[[str, str], None],
    ) -> None:
        """`on_line(child, text)` gets the lines of children, `on_event(child, text)` the supervisor's events."""
        self._on_line = on_line
        self._on_event = on_event
        self._children: list[Child] = []
        self._stopping = False
        self.stop_asked = asyncio.Event()
        # Set by the owner once the fleet has been ready.
        self.proven = False
        self.rejected: Child | None = None
        self.finished_once: dict[str, int] = {}

    def add(self, spec: ChildSpec) -> Child:
        child = Child(spec, on_line=self._on_line, on_exit=self._child_ended)
        self._children.append(child)
        self._start(child)
        return child

    def _start(self, child: Child) -> None:
        child.restart_timer = None
        if self._stopping:
            return
        try:
            child.start()
        except OSError as error:
            # No memory or no process slot: temporary.
            self._on_event(child.spec.name, f"can't be started: {error}; trying again in {RESTART_DELAY_MAX_S:.1f} s")
            child.restart_timer = asyncio.get_running_loop().call_later(RESTART_DELAY_MAX_S, self._start, child)
            return
        if not child.spec.once:
            self._on_event(child.spec.name, f"started (pid {child.pid})")

    def _child_ended(self, child: Child, returncode: int) -> None:
        name = child.spec.name
        if child.spec.once:
            self._children.remove(child)
            self.finished_once[name] = returncode
            self._on_event(name, f"ended: {describe_exit(returncode)}")
            return
        if self._stopping:
            self._on_event(name, f"stopped: {describe_exit(returncode)}")
            return
        if returncode in child.spec.rejections and not (self.proven and child.spec.may_recover):
            self._on_event(name, f"did not run ({describe_exit(returncode)}); its last lines above say why")
            self._give_up(child)
            return
        if child.deaths_in_a_row >= HOPELESS_DEATHS and not self.proven:
            self._on_event(name, f"died {HOPELESS_DEATHS} times in a row; its last lines above say why")
            self._give_up(child)
            return
        delay_s = restart_delay_s(child.deaths_in_a_row)
        if delay_s == 0:
            self._on_event(name, f"died: {describe_exit(returncode)}; starting it again")
            self._start(child)
        else:
            self._on_event(name, f"died: {describe_exit(returncode)}; starting it again in {delay_s:.1f} s")
            child.restart_timer = asyncio.get_running_loop().call_later(delay_s, self._start, child)

    def _give_up(self, child: Child) -> None:
        self.rejected = child
        self.stop_asked.set()

    async def stop(self, *rounds: tuple[Sequence[Child], float]) -> None:
        """Ends children round by round: SIGTERM, and after the round's seconds SIGKILL."""
        self._stopping = True
        for child in self._children:
            if child.restart_timer is not None:
                child.restart_timer.cancel()
        for child in [child for child in self._children if child.spec.once]:
            child.kill_group()
            await child.gone()
        for children, timeout_s in rounds:
            await self._stop_round(children, timeout_s)
        assert not any(child.pid for child in self._children), "a child that is in no round was left running"

    async def _stop_round(self, children: Sequence[Child], timeout_s: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        alive = {asyncio.ensure_future(child.gone()): child for child in children}
        if not alive:
            return
        _, late = await asyncio.wait(alive, timeout=timeout_s)
        for waiter in late:
            child = alive[waiter]
            self._on_event(child.spec.name, f"did not stop within {timeout_s:.1f} s: killing it")
            child.kill_group()
        if late:
            await asyncio.wait(late)

    def kill_all(self) -> None:
        """Kills every child at once; a `stop` in progress then returns."""
        self._stopping = True
        for child in list(self._children):
            child.kill_group()


class _LineReader:
    """Splits a child's output into lines, until every process with the pipe, grandchildren too, has closed it."""

    def __init__(self, fd: int, name: str, on_line: Callable[[str, str], None]) -> None:
        self._fd = fd
        self._name = name
        self._on_line = on_line
        self._rest = b""

    def read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > LINE_BYTES_MAX):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(self._name, line.decode("utf-8", "replace").rstrip("\r"))
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)


def die_with(parent_pid: int) -> Callable[[], None]:
    """For a child between fork and exec: it ends when its parent ends, however that happens."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_kernel() -> None:
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            os._exit(127)
        # If the parent died before prctl, no signal would come.
        if os.getppid() != parent_pid:
            os._exit(127)

    return ask_kernel
