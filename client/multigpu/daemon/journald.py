"""Sends log lines to journald as entries with fields: each key of a line is a field, so that
`journalctl MGPU_TASK_ID=17` finds the lines about a task.

The protocol is systemd's "Native Journal Protocol": each entry is a datagram to journald's socket. An entry too large
for a datagram is written to a sealed memory file, whose descriptor is sent instead.
"""

import array
import errno
import fcntl
import logging
import os
import re
import socket
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

SOCKET = "/run/systemd/journal/socket"
# syslog(3)'s numbers.
_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
# Keys that are no field of their own: they are in the message, or in a standard field of journald.
_TAKEN = frozenset({"event", "level", "timestamp", "exception", "logger"})


def is_journal(stream: TextIO) -> bool:
    """Whether systemd connected this stream to journald: it sets JOURNAL_STREAM to the stream's device and inode."""
    wanted = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return wanted == f"{status.st_dev}:{status.st_ino}"


class Journal:
    """The socket to journald. If journald does not listen, lines go to stderr, where systemd may collect them."""

    def __init__(self, path: str = "") -> None:
        self._path = path or SOCKET
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._name = os.path.basename(sys.argv[0]) or "multigpu"  # noqa: PTH119  no path is looked at

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        """Sends an entry. Called as structlog's last processor; returns "", so that structlog writes nothing."""
        self.send(event)
        return ""

    def send(self, event: MutableMapping[str, Any]) -> None:
        """Sends an entry, or prints it to stderr."""
        data = fields(event, self._name)
        try:
            self._socket.sendto(data, self._path)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
                print(message(event), file=sys.stderr, flush=True)  # noqa: T201  the last resort
                return
            self._send_file(data)

    def _send_file(self, data: bytes) -> None:
        fd = os.memfd_create("multigpu-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]).tobytes())
            self._socket.sendmsg([], [rights], 0, self._path)
        finally:
            os.close(fd)


def fields(event: MutableMapping[str, Any], identifier: str) -> bytes:
    """An entry in journald's wire format."""
    entry = {
        "MESSAGE": message(event),
        "PRIORITY": str(_PRIORITIES.get(str(event.get("level")), 6)),
        "SYSLOG_IDENTIFIER": identifier,
    }
    if "logger" in event:
        entry["MGPU_LOGGER"] = str(event["logger"])
    for key, value in event.items():
        if key not in _TAKEN:
            entry[_field_name(key)] = str(value)
    return b"".join(_field(name, value) for name, value in entry.items())


def message(event: MutableMapping[str, Any]) -> str:
    """The line as text: the event, its keys, and the traceback if there is one."""
    parts = [str(event.get("event", ""))]
    parts += [f"{key}={value}" for key, value in event.items() if key not in _TAKEN]
    text = " ".join(parts)
    return f"{text}\n{event['exception']}" if event.get("exception") else text


def _field_name(key: str) -> str:
    """The field for a key. Journald accepts at most 64 capital letters, digits and underscores."""
    return ("MGPU_" + re.sub(r"[^A-Z0-9_]", "_", key.upper()))[:64]


def _field(name: str, value: str) -> bytes:
    data = value.encode("utf-8", "replace")
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"


class SentHandler(logging.Handler):
    """A handler for the standard library's loggers. Its formatter ends with Journal, which sends the line."""

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)
