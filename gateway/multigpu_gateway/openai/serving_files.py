"""The routes below /v1/files."""

import asyncio
import contextlib
import math
import tempfile
import time
import uuid
from typing import Any

import msgspec
from multigpu import AsyncClient
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, NOT_FOUND, TOO_LARGE, UNAVAILABLE, HttpError
from multigpu_gateway.http import Request
from multigpu_gateway.openai import batches
from multigpu_gateway.openai.files import (
    CHUNK_BYTES,
    FILE_BYTES_MAX,
    INFO,
    PATH,
    PURPOSES,
    QUEUE,
    READ_TIMEOUT_S,
    FileInfo,
    list_ids,
    metadata,
    read,
    store,
    try_read,
)  # fmt: skip

LIST_MAX = 10_000
# Limits of an upload: the number of form fields, and the bytes of all fields but the file.
_FIELDS_MAX, _FIELD_BYTES_MAX = 16, 1 << 16


async def upload(request: Request, pair: ClientPair) -> None:
    """Stores a file, such as the requests of a batch."""
    if request.path.rstrip("/") != PATH:
        raise HttpError(NOT_FOUND, f"there is no POST {request.path}")
    with contextlib.closing(_Upload(pair.client, request.header(b"content-type"))) as body:
        # Before a body is received that may fill the disk: the master checks the token, and has no such task.
        await pair.client.cancel(body.id)
        async for data in request.parts(FILE_BYTES_MAX):
            await body.take(data)
        info = await body.end()
    await request.respond(200, msgspec.json.encode(info.as_dict()))


async def get(request: Request, pair: ClientPair) -> None:
    """Lists all files, or returns the metadata or the content of one."""
    file_id, _, rest = request.path.removeprefix(PATH).strip("/").partition("/")
    if rest not in ("", "content"):
        raise HttpError(NOT_FOUND, f"there is no {request.path}")
    client = pair.client
    async with request.while_connected():
        if not file_id:
            await _list(request, client)
        elif batches.is_output(file_id):
            parts = await batches.output(client, file_id, request.body_bytes_max)
            if rest:
                await request.respond_parts(parts, b"application/jsonl")
                return
            size = sum([len(part) async for part in parts])
            answer = FileInfo(file_id, size, int(time.time()), f"{file_id}.jsonl", "batch_output", 0).as_dict()
            await request.respond(200, msgspec.json.encode(answer))
        elif rest:
            await request.respond_parts(read(client, await metadata(client, file_id)), b"application/octet-stream")
        else:
            await request.respond(200, msgspec.json.encode((await metadata(client, file_id)).as_dict()))


async def _list(request: Request, client: AsyncClient) -> None:
    found: list[dict[str, Any]] = []
    purpose = request.query.get("purpose", "")
    give_up = asyncio.get_running_loop().time() + READ_TIMEOUT_S
    async for file_id in list_ids(client, QUEUE):
        if len(found) < LIST_MAX:
            info = await try_read(client, file_id, INFO, give_up)
            if info is not None and purpose in ("", info.purpose):
                found.append(info.as_dict())
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
    await request.respond(200, msgspec.json.encode({"object": "list", "data": found, "has_more": False, **ends}))


class _Upload:
    """Receives a multipart/form-data body with the fields `purpose` and `file`, and stores the file."""

    def __init__(self, client: AsyncClient, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise HttpError(BAD_REQUEST, "send the file as multipart/form-data, with the fields purpose and file")
        self._client = client
        self.id = f"file-{uuid.uuid4().hex}"
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._part_begins, "on_header_field": self._header_field,
                "on_header_value": self._header_value, "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end, "on_part_data": self._data, "on_end": self._ends,
            },
        )  # fmt: skip
        self._name = self._value = b""
        self._disposition: dict[bytes, bytes] = {}
        self._fields: dict[bytes, bytearray] = {}
        self._field = bytearray()
        self._filename: str | None = None
        self._in_file = False
        self._content = bytearray()
        # Nothing is stored in the master until the body is complete: what is stored there can't be deleted.
        self._received = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed by close()
        self._field_count = self._field_bytes = 0
        self._ended = False

    async def take(self, data: bytes) -> None:
        """Receives the next part of the body. Raises HttpError if it is malformed, or if the disk is full."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise HttpError(BAD_REQUEST, f"the body is not multipart/form-data: {error}") from None
        if len(self._content) >= CHUNK_BYTES:
            await self._keep()

    async def end(self) -> FileInfo:
        """Stores the chunks, then the metadata. Raises HttpError if the body is incomplete or a field is invalid."""
        if not self._ended:
            raise HttpError(BAD_REQUEST, "the body has no closing boundary: its end is missing")
        if self._filename is None:
            raise HttpError(BAD_REQUEST, "the field file is missing", param="file")
        purpose = self._purpose()
        await self._keep()
        size = self._received.tell()
        self._received.seek(0)
        chunks = max(1, math.ceil(size / CHUNK_BYTES))
        for number in range(chunks):
            chunk = await asyncio.to_thread(self._received.read, CHUNK_BYTES)
            await store(self._client, f"{self.id}:{number}", chunk)
        info = FileInfo(self.id, size, int(time.time()), self._filename, purpose, chunks)
        await store(self._client, self.id, msgspec.json.encode(info))
        return info

    def close(self) -> None:
        """Deletes the temporary file."""
        self._received.close()

    async def _keep(self) -> None:
        """Moves the received bytes to the temporary file. Raises HttpError if they can't be written."""
        data, self._content = self._content, bytearray()
        try:
            written = await asyncio.to_thread(self._received.write, data)
        except OSError as error:
            written, reason = 0, f": {error.strerror}"
        else:
            reason = ""
        if written < len(data):
            message = f"the gateway's folder for temporary files ({tempfile.gettempdir()}) can't hold the file{reason}"
            raise HttpError(UNAVAILABLE, message)

    def _purpose(self) -> str:
        """Returns the field purpose. Raises HttpError if it is not in PURPOSES."""
        purpose = bytes(self._fields.get(b"purpose", b"")).decode("utf-8", "replace")
        if purpose not in PURPOSES:
            message = f"purpose is {purpose!r}: this server keeps files for {' or '.join(PURPOSES)}"
            raise HttpError(BAD_REQUEST, message, param="purpose")
        return purpose

    # Callbacks of the parser.

    def _part_begins(self) -> None:
        self._name = self._value = b""
        self._disposition = {}
        self._in_file = False
        self._field_count += 1
        if self._field_count > _FIELDS_MAX:
            raise HttpError(BAD_REQUEST, f"the form has more than {_FIELDS_MAX} fields: send purpose and file")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        if self._name.lower() == b"content-disposition":
            _, self._disposition = parse_options_header(self._value)
        self._name = self._value = b""

    def _headers_end(self) -> None:
        name = self._disposition.get(b"name", b"")
        self._in_file = name == b"file"
        if self._in_file:
            if self._filename is not None:
                raise HttpError(BAD_REQUEST, "the form has two fields file: send one in each request", param="file")
            self._filename = self._disposition.get(b"filename", b"file").decode("utf-8", "replace")
            if b"purpose" in self._fields:  # OpenAI's client sends it first
                self._purpose()
        self._field = self._fields[name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._content += data[start:end]
            return
        self._field_bytes += end - start
        if self._field_bytes > _FIELD_BYTES_MAX:
            raise HttpError(TOO_LARGE, "the fields of the form, without the file, have more than 64 KiB")
        self._field += data[start:end]

    def _ends(self) -> None:
        self._ended = True
