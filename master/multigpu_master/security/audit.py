"""The book of what administrators did: `audit.log` in the data directory, a JSON line for each call that changes the
fleet, failed ones too. The line of one that succeeded is on the disk (fsync) before the caller gets the answer, and a
call that its caller cancels ends as it would have ended otherwise, line included.
"""

import asyncio
import datetime as dt
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import json_format
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from multigpu_master.journal.sqlite.files import sync_directory
from multigpu_master.rpc.status import reject
from multigpu_master.security.auth import CALLER, ROLES_OF, Serve

log = structlog.get_logger()

FILE = "audit.log"
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
FILE_BYTES_MAX, FILES_MAX = 10 << 20, 5
# Of a request that names ten thousand tasks the beginning is kept.
REQUEST_CHARS_MAX = 4000


class _Answer:
    """A call's context for work that may outlive the call: gRPC must not be asked about a call that has ended."""

    def __init__(self) -> None:
        self.status: tuple[grpc.StatusCode, str] | None = None

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self.status = code, details
        raise grpc.aio.AbortError


class Audit:
    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / FILE
        self._descriptor = -1  # kept open: none may be left later
        self._lock = asyncio.Lock()
        self._works: set[asyncio.Task[Any]] = set()

    def wrap(self, serve: Serve, method: str, message_type: Any) -> Serve:
        """`serve`, written down, if "Service/Method" changes something that is the administrators'. Its effect and its
        line are one piece of work, which goes on when the caller cancels the call.
        """
        if method in ROLES_OF:
            return serve

        async def audited(request: Any, context: Any) -> Any:
            line, answer = self._line(method, message_type, request, context), _Answer()
            try:
                async with self._lock:
                    await asyncio.to_thread(self._open)
            except OSError as error:
                text = f"nothing was done: {self.path} can't be written ({error.strerror}); see to it, then try again"
                await reject(context, grpc.StatusCode.FAILED_PRECONDITION, text)
            work = asyncio.create_task(self._work(serve, line, request, answer))
            self._works.add(work)
            work.add_done_callback(self._works.discard)
            response = await asyncio.shield(work)
            if answer.status is not None:
                await context.abort(*answer.status)
            return response

        return audited

    async def finish(self, timeout_s: float) -> None:
        """Waits for what is under way."""
        if self._works:
            await asyncio.wait(self._works, timeout=timeout_s)

    async def _work(self, serve: Serve, line: dict[str, Any], request: bytes, answer: _Answer) -> Any:
        try:
            response = await serve(request, answer)
        except grpc.aio.AbortError:
            line["result"] = answer.status[0].name if answer.status is not None else "UNKNOWN"
            return None
        else:
            line["result"] = "OK"
            return response
        finally:
            async with self._lock:
                try:
                    await asyncio.to_thread(self._append, json.dumps(line, ensure_ascii=False).encode() + b"\n")
                except OSError as error:
                    log.exception("the audit log can't be written", path=str(self.path), reason=str(error), record=line)

    def _line(self, method: str, message_type: Any, request: bytes, context: Any) -> dict[str, Any]:
        caller = CALLER.get()
        return {
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            "method": method,
            "result": "CANCELLED",  # by the master's end; `_work` knows better
            "token_id": caller.token_id if caller is not None else None,
            "name": caller.name if caller is not None else None,
            "peer": context.peer(),
            "certificate": [_text(v) for v in context.auth_context().get("x509_common_name", ())] or None,
            "request": _request(message_type, request),
        }

    def _open(self) -> None:
        """On a thread. Also when somebody else has moved the file. OSError: there is no file to write to."""
        if self._descriptor >= 0:
            try:
                if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                    return
            except FileNotFoundError:
                pass
        self._use(os.open(self.path, FLAGS, 0o600))

    def _use(self, descriptor: int) -> None:
        before, self._descriptor = self._descriptor, descriptor
        if before >= 0:
            os.close(before)

    def _append(self, line: bytes) -> None:
        """On a thread."""
        self._open()
        if os.fstat(self._descriptor).st_size + len(line) > FILE_BYTES_MAX:
            try:
                self._rotate()
            except OSError as error:
                log.warning("the audit log goes on in a file that is too large", reason=str(error))
        os.write(self._descriptor, line)
        os.fsync(self._descriptor)

    def _rotate(self) -> None:
        """Begins a new file. It is opened first: without a descriptor nothing changes."""
        new = self.path.with_name(f"{FILE}.new")
        descriptor = os.open(new, FLAGS, 0o600)
        older: Sequence[Path] = [self.path.with_name(f"{FILE}.{n}") for n in range(1, FILES_MAX)]
        for source, target in reversed(list(zip([self.path, *older], older, strict=False))):
            if source.exists():
                source.replace(target)
        new.replace(self.path)
        self._use(descriptor)
        sync_directory(self.path.parent)


def _request(message_type: Any, data: bytes) -> Any:
    try:
        message = message_type.FromString(data)
    except DecodeError:
        return "not a request"
    try:
        told: Any = MessageToDict(message, preserving_proto_field_name=True)
        text = json.dumps(told, ensure_ascii=False)
    except (json_format.Error, ValueError):  # a duration out of its range, say, which JSON can't tell
        told = text = str(message)
    return told if len(text) <= REQUEST_CHARS_MAX else text[:REQUEST_CHARS_MAX] + "…"


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
