"""Files in the master, for batches.

A file is durable tasks of kind "echo": one for each chunk, whose result is the chunk, and one with the file's
description, which is submitted last. So a file that has a description is whole, lies in the journal like every other
result, and is deleted by itself after FILE_TTL_S. Reading it needs one connected worker to have run the tasks.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from multigpu import AsyncClient, NotFoundError
from multigpu.outcome import TaskError

from multigpu_gateway.errors import NOT_FOUND, UNAVAILABLE, HttpError

KIND, QUEUE = "echo", "openai-files"
PATH = "/v1/files"
FILE_TTL_S = 30 * 86_400
FILE_BYTES_MAX = 1 << 30
CHUNK_BYTES = 4 << 20
# How long reading waits for a worker to have run the tasks of a file.
READ_TIMEOUT_S = 30.0
# Chunks that are read ahead.
_AHEAD = 4
PURPOSES = ("batch", "user_data")


class FileInfo(msgspec.Struct):
    """The description of a file. `chunks`: how many tasks hold its bytes."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    chunks: int

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at,
            "expires_at": self.created_at + FILE_TTL_S, "filename": self.filename, "purpose": self.purpose,
            "status": "processed",
        }  # fmt: skip


_info = msgspec.json.Decoder(FileInfo)


async def store(client: AsyncClient, name: str, data: bytes, queue: str = QUEUE) -> None:
    """Keeps bytes under a name in the master for FILE_TTL_S. Returns once they are on its disk."""
    options: dict[str, Any] = {"queue": queue, "result_ttl_s": FILE_TTL_S, "request_id": name}
    await client.submit(KIND, data, wait_for_worker=True, **options)


async def fetch(client: AsyncClient, name: str) -> bytes:
    """The bytes kept under a name. NotFoundError: there are none. HttpError: no worker has run their task yet."""
    outcome = (await client.get(name, wait_s=READ_TIMEOUT_S)).outcome
    if outcome is None:
        raise HttpError(UNAVAILABLE, "the master has not got the file ready: it takes a connected worker", retry_s=1.0)
    if not outcome.succeeded:
        raise outcome.to_error()
    return outcome.result


async def describe(client: AsyncClient, file_id: str) -> FileInfo:
    """The description of a file. HttpError: there is no such file."""
    try:
        return _info.decode(await fetch(client, file_id))
    except (NotFoundError, TaskError, msgspec.DecodeError):
        raise HttpError(NOT_FOUND, f"there is no file {file_id!r}, or no longer", param="file_id") from None


async def read(client: AsyncClient, file: FileInfo) -> AsyncIterator[bytes]:
    """The chunks of a file."""
    waiting: list[asyncio.Task[bytes]] = []
    try:
        for number in range(file.chunks):
            waiting.append(asyncio.ensure_future(fetch(client, f"{file.id}:{number}")))
            if len(waiting) == _AHEAD:
                yield await waiting.pop(0)
        while waiting:
            yield await waiting.pop(0)
    finally:
        for each in waiting:
            each.cancel()


async def lines(client: AsyncClient, file: FileInfo) -> AsyncIterator[bytes]:
    """The lines of a file, without their ends and without empty ones."""
    rest = b""
    async for chunk in read(client, file):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
    if rest.strip():
        yield rest
