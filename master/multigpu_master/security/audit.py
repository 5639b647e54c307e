"""The audit log of administrative calls: `audit.log` in the data directory, one JSON line for each such call that
passes authentication, successful or not.

A call is rejected, and has no effect, if the file can't be opened. Otherwise the line is on the disk before the caller
gets the answer; if the write fails, the line goes to the master's own log, and the answer is the same. If the caller
cancels a call, the call still runs to its end, and its line is written.
"""

import asyncio
import datetime as dt
import errno
import json
import os
import threading
from collections.abc import Callable, MutableSequence
from pathlib import Path
from typing import Any

import structlog
from google.protobuf import json_format

from multigpu_master.errors import InvalidArgumentError, PreconditionError, call_error
from multigpu_master.journal.sqlite.files import sync
from multigpu_master.security.auth import Serve, current_caller, is_administrative

log = structlog.get_logger()

FILE = "audit.log"
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
FILE_BYTES_MAX, FILES_MAX = 10_000_000, 5
# Longer requests are cut: a call may name ten thousand tasks.
REQUEST_CHARS_MAX = 4000


class Audit:
    """The audit log of one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / FILE
        self._running_calls: set[asyncio.Task[Any]] = set()
        self._write_lock, self._directory_lock = threading.Lock(), threading.Lock()
        self._synced_inode = 0  # inode of the file whose directory entry is synced

    def wrap(self, serve: Serve, method: str, parse: Callable[[bytes], Any]) -> Serve:
        """Returns a wrapper of `serve` that audits each call, or `serve` itself if `method`, which is "Service/Method",
        is not administrative. `parse`: raises InvalidArgumentError if the bytes are not a request.

        One asyncio task serves the call and writes its line. The task continues if the caller cancels the call.
        """
        if not is_administrative(method):
            return serve

        async def audited(request: Any, context: Any) -> Any:
            record = _record(method, parse, request, context)
            try:
                descriptor = self._open()
            except OSError as error:
                text = f"nothing was done: {self.path} can't be written ({error.strerror}); repair that, then try again"
                raise PreconditionError(text) from None
            work = asyncio.create_task(self._serve_and_write(serve, record, request, descriptor))
            self._running_calls.add(work)
            work.add_done_callback(self._running_calls.discard)
            return await asyncio.shield(work)

        return audited

    async def finish(self, timeout_s: float) -> None:
        """Waits for the calls in progress."""
        if self._running_calls:
            await asyncio.wait(self._running_calls, timeout=timeout_s)

    async def _serve_and_write(self, serve: Serve, record: dict[str, Any], request: bytes, descriptor: int) -> Any:
        try:
            response = await serve(request, None)  # the call, and so its context, may have ended
        except Exception as error:  # noqa: BLE001  every exception becomes a status
            failure = call_error(error, record["method"].rpartition("/")[2])
            record["result"] = failure.code.name
            raise failure from None
        else:
            record["result"] = "OK"
            return response
        finally:
            try:
                line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
                await asyncio.to_thread(self._append, descriptor, line)
            except OSError as error:
                log.exception("the audit log can't be written", path=str(self.path), reason=str(error), record=record)

    def _open(self) -> int:
        """Returns a descriptor of the file; begins a new file if it is full. Runs before the call takes effect, because
        the process may have no descriptor left afterwards.
        """
        descriptor = os.open(self.path, FLAGS, 0o600)
        if os.fstat(descriptor).st_size < FILE_BYTES_MAX:
            return descriptor
        os.close(descriptor)
        older = [self.path.with_name(f"{FILE}.{n}") for n in range(1, FILES_MAX)]
        for source, target in reversed(list(zip([self.path, *older], older, strict=False))):
            if source.exists():
                source.replace(target)
        return os.open(self.path, FLAGS, 0o600)

    def _append(self, descriptor: int, line: bytes) -> None:
        """Runs on a thread. Raises OSError unless the whole line is on the disk."""
        try:
            with self._write_lock:  # without it, `pread` could see a part of another thread's line
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # the previous line was written only in part
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
            with self._directory_lock:  # the directory entry of the file is synced before any call is answered
                inode = os.fstat(descriptor).st_ino
                if not size or inode != self._synced_inode:
                    sync(self.path.parent)
                    self._synced_inode = inode
        finally:
            os.close(descriptor)


def _record(method: str, parse: Callable[[bytes], Any], request: bytes, context: Any) -> dict[str, Any]:
    caller = current_caller()
    names = context.auth_context().get("x509_common_name", ())
    return {
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        "method": method,
        "result": "CANCELLED",  # if the master stops first; else `_serve_and_write` sets the result
        "token_id": caller.token_id if caller is not None else None,
        "name": caller.name if caller is not None else None,
        "peer": context.peer(),
        "certificate": [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in names] or None,
        "request": _request(parse, request),
    }


def _request(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        message = parse(data)
    except InvalidArgumentError:
        return "not a request"
    for field, value in message.ListFields():  # the rest of a long value is not logged; converting it is slow
        if isinstance(value, str):
            setattr(message, field.name, value[: REQUEST_CHARS_MAX + 1])
        elif isinstance(value, MutableSequence):
            del value[REQUEST_CHARS_MAX:]
    try:
        fields: Any = json_format.MessageToDict(message, preserving_proto_field_name=True)
        text = json.dumps(fields, ensure_ascii=False)
    except (json_format.Error, ValueError):  # for example a duration out of JSON's range
        fields = text = str(message)
    return fields if len(text) <= REQUEST_CHARS_MAX else text[:REQUEST_CHARS_MAX] + "…"
