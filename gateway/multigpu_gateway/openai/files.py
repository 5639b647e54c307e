"""Files in the master, for batches.

A file consists of durable tasks of kind "echo", whose results are the chunks and, in one more task, the metadata.
The metadata is submitted last, so a file that has it is complete. The master deletes the results after FILE_TTL_S.
A file can't be read before a worker has run its tasks.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from multigpu import AsyncClient, NotFoundError
from multigpu.outcome import TaskError

from multigpu_gateway.errors import BAD_REQUEST, NOT_FOUND, UNAVAILABLE, HttpError

T = TypeVar("T")
KIND, QUEUE = "echo", "openai-files"
PATH = "/v1/files"
FILE_TTL_S = 30 * 86_400
FILE_BYTES_MAX = 1 << 30
CHUNK_BYTES = 4 << 20
# How long reading a chunk or the metadata waits until a worker has run its task.
READ_TIMEOUT_S = 30.0
# Chunks that are read ahead.
_AHEAD = 4
# `lines` lets the event loop run other tasks each time it has yielded this many bytes.
YIELD_BYTES = 64 << 10
# Errors of reading what is stored under a name: it has expired, its task failed, or the name is another program's task.
UNREADABLE = (NotFoundError, TaskError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
PURPOSES = ("batch", "user_data")


class FileInfo(msgspec.Struct):
    """The metadata of a file. `chunks`: how many tasks hold its bytes."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    chunks: int

    def as_dict(self) -> dict[str, Any]:
        """Returns OpenAI's file object."""
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at,
            "expires_at": self.created_at + FILE_TTL_S, "filename": self.filename, "purpose": self.purpose,
            "status": "processed",
        }  # fmt: skip


INFO = msgspec.json.Decoder(FileInfo)


async def store(client: AsyncClient, name: str, data: bytes, queue: str = QUEUE) -> None:
    """Stores bytes under a name in the master, for FILE_TTL_S. Returns once they are on the master's disk."""
    options: dict[str, Any] = {"queue": queue, "result_ttl_s": FILE_TTL_S, "request_id": name}
    await client.submit(KIND, data, wait_for_worker=True, **options)


async def fetch(client: AsyncClient, name: str, wait_s: float = READ_TIMEOUT_S) -> bytes:
    """Returns the bytes stored under a name. Raises NotFoundError if there are none, HttpError if no worker has run the
    task within `wait_s`, and the task's error if it did not succeed.
    """
    outcome = (await client.get(name, wait_s=wait_s)).outcome
    if outcome is None:
        raise HttpError(UNAVAILABLE, "no worker has run the tasks of the file yet: start one, or wait", retry_s=1.0)
    if not outcome.succeeded:
        raise outcome.to_error()
    return outcome.result


async def metadata(client: AsyncClient, file_id: str) -> FileInfo:
    """Returns the metadata of a file. Raises HttpError if there is none, or if no worker has run its task."""
    try:
        return INFO.decode(await fetch(client, file_id))
    except UNREADABLE:
        raise HttpError(NOT_FOUND, f"there is no file {file_id!r}, or no longer", param="file_id") from None


async def list_ids(client: AsyncClient, queue: str) -> AsyncIterator[str]:
    """Yields the ids of the files or batches in a queue, the newest first. Other tasks have a colon in their name."""
    async for task in client.list_tasks(queue=queue, kind=KIND):
        if task.request_id and ":" not in task.request_id:
            yield task.request_id


async def try_read(client: AsyncClient, name: str, decoder: "msgspec.json.Decoder[T]", give_up: float) -> T | None:
    """Returns the metadata or record stored under a name, for a list. Returns None, so that the list skips the
    entry, if it can't be read, or if no worker has run its task by `give_up` (on the loop's clock).
    """
    try:
        return decoder.decode(await fetch(client, name, max(0.0, give_up - asyncio.get_running_loop().time())))
    except (*UNREADABLE, HttpError):
        return None


async def read(client: AsyncClient, file: FileInfo) -> AsyncIterator[bytes]:
    """Yields the chunks of a file."""
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


async def lines(client: AsyncClient, file: FileInfo, bytes_max: int) -> AsyncIterator[bytes]:
    """Yields the lines of a file that are not blank, without their ends. Raises HttpError if a line has more than
    `bytes_max` bytes. Lets the event loop run other tasks in between.
    """
    rest: list[bytes] = []
    number = taken = 0
    async for chunk in read(client, file):
        first, *others = chunk.split(b"\n")
        rest.append(first)
        whole: list[bytes] = []
        if others:
            whole, rest = [b"".join(rest), *others[:-1]], others[-1:]
        for line in whole:
            if line.strip():
                number += 1
                _check_size(number, len(line), bytes_max)
                yield line
            taken += len(line) + 1
            if taken >= YIELD_BYTES:
                taken = 0
                await asyncio.sleep(0)
        _check_size(number + 1, sum(map(len, rest)), bytes_max)
    line = b"".join(rest)
    if line.strip():
        yield line


def _check_size(number: int, size: int, bytes_max: int) -> None:
    if size > bytes_max:
        message = f"line {number} of the file: it has more than {bytes_max:,} bytes (body_bytes_max)"
        raise HttpError(BAD_REQUEST, message, param="input_file_id")
