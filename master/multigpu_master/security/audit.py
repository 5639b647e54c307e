"""The book of what administrators did: `audit.log` in the data directory, a JSON line for each call that changes the
fleet, failed ones too. The line of one that succeeded is on the disk (fsync) before the caller gets the answer.
"""

import asyncio
import datetime as dt
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.protobuf import json_format
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from multigpu_master.security.gate import CALLER, ROLES_OF, Serve

log = structlog.get_logger()

FILE = "audit.log"
FILE_BYTES_MAX, FILES_MAX = 10 << 20, 5
# Of a request that names ten thousand tasks the beginning is kept.
REQUEST_CHARS_MAX = 4000


class Audit:
    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / FILE
        self._lock = asyncio.Lock()

    def wrap(self, serve: Serve, method: str, message_type: Any) -> Serve:
        """`serve`, written down, if "Service/Method" changes something that is the administrators'."""
        if method in ROLES_OF:
            return serve

        async def audited(request: Any, context: Any) -> Any:
            try:
                response = await serve(request, context)
            except BaseException:
                await self._write(method, message_type, request, context, failed=True)
                raise
            await self._write(method, message_type, request, context, failed=False)
            return response

        return audited

    async def _write(self, method: str, message_type: Any, request: bytes, context: Any, *, failed: bool) -> None:
        caller = CALLER.get()
        line = {
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            "method": method,
            "result": _result(context) if failed else "OK",
            "token_id": caller.token_id if caller is not None else None,
            "name": caller.name if caller is not None else None,
            "peer": context.peer(),
            "certificate": [_text(v) for v in context.auth_context().get("x509_common_name", ())] or None,
            "request": _request(message_type, request),
        }
        async with self._lock:
            try:
                await asyncio.to_thread(self._append, json.dumps(line, ensure_ascii=False).encode() + b"\n")
            except OSError as error:
                log.exception("the audit log can't be written", path=str(self.path), reason=str(error), record=line)

    def _append(self, line: bytes) -> None:
        """On a thread."""
        if self.path.exists() and self.path.stat().st_size + len(line) > FILE_BYTES_MAX:
            older: Sequence[Path] = [self.path.with_name(f"{FILE}.{n}") for n in range(1, FILES_MAX)]
            for source, target in reversed(list(zip([self.path, *older], older, strict=False))):
                if source.exists():
                    source.replace(target)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _result(context: Any) -> str:
    code = context.code()  # a StatusCode, or its number; 0 if nobody set one
    names: dict[int, str] = {c.value[0]: c.name for c in grpc.StatusCode}
    return names.get(code.value[0] if isinstance(code, grpc.StatusCode) else code or 1, "UNKNOWN")


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
