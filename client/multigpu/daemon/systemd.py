"""What a service reports to systemd: ready, status, progress, stopping.

The protocol is sd_notify(3): one datagram of KEY=value lines to the socket that NOTIFY_SOCKET names. Without that
variable every call does nothing: daemons run the same way without systemd.
"""

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable, MutableMapping

import structlog

log = structlog.get_logger()

# Share of the watchdog's time between two reports: less than the half that sd_watchdog_enabled(3) asks for.
_SHARE = 0.4
_STATUS_INTERVAL_S = 5.0
# As LimitNOFILE of the units. Containers have hard limits of a billion, for which some libraries make tables.
DESCRIPTORS = 65_536


def raise_descriptor_limit() -> int:
    """Raises the soft limit of file descriptors to DESCRIPTORS, as far as the hard one allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, min(hard, DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class Notifier:
    """Reports to systemd. Removes NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID from `env`, so that children don't
    report in its name.
    """

    def __init__(self, env: MutableMapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        address = env.pop("NOTIFY_SOCKET", "")
        period_us, pid = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", str(os.getpid()))
        # 0: no watchdog.
        self.watchdog_s = int(period_us) / 1e6 if period_us.isdecimal() and pid == str(os.getpid()) else 0.0
        self._status = ""
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            # "@" stands for the zero byte of an abstract name.
            self._address = "\0" + address[1:] if address.startswith("@") else address

    def ready(self, status: str = "") -> None:
        """The service has started, or a reload has ended."""
        self._send("READY=1", *self._about(status))

    def status(self, status: str) -> None:
        """One line for `systemctl status`; sent only if it has changed."""
        if about := self._about(status):
            self._send(*about)

    def reload(self, *steps: Callable[[], object]) -> None:
        """A reload, for SIGHUP. An error of a step is logged, and what was before stays in force."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            for step in steps:
                step()
        except Exception as error:  # noqa: BLE001  a wrong file must not end the service
            log.error("reload failed: what was before stays in force", error=str(error))  # noqa: TRY400  no traceback
        else:
            log.info("reloaded")
        self.ready()

    def stopping(self, status: str = "") -> None:
        self._send("STOPPING=1", *self._about(status))

    def alive(self) -> None:
        """Feeds the watchdog."""
        self._send("WATCHDOG=1")

    async def keep(self, progress: Callable[[], bool], status: Callable[[], str]) -> None:
        """Until cancelled: feeds the watchdog whenever `progress()` is true, and updates the status.

        It runs on the service's event loop: while that is blocked, the watchdog is not fed.
        """
        if self._socket is None:
            return
        interval_s = min(_STATUS_INTERVAL_S, self.watchdog_s * _SHARE or _STATUS_INTERVAL_S)
        while True:
            if progress():
                self.alive()
            self.status(status())
            await asyncio.sleep(interval_s)

    def _about(self, status: str) -> tuple[str, ...]:
        if not status or status == self._status:
            return ()
        self._status = status
        return ("STATUS=" + " ".join(status.splitlines()),)

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:  # systemd may be restarting, or its socket be full: the next report repeats the status
            self._status = ""
