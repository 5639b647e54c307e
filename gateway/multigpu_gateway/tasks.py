"""Options of a request's tasks (queue, priority, durability), from headers that clients of every protocol can set."""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from multigpu_gateway.errors import BAD_REQUEST, TOO_LARGE, HttpError

T = TypeVar("T")
IDEMPOTENCY_KEY = b"idempotency-key"
QUEUE, PRIORITY, DURABLE = b"x-multigpu-queue", b"x-multigpu-priority", b"x-multigpu-durable"
TASK_HEADERS = (IDEMPOTENCY_KEY, QUEUE, PRIORITY, DURABLE)
# A longer Idempotency-Key is rejected.
_KEY_CHARACTERS_MAX = 200
# Limit of the bytes that are added when each task gets a copy of a field: a small request must not fill the memory.
COPIES_BYTES_MAX = 64 << 20


class Call(Protocol):
    """A request of any protocol."""

    # The timeout of its tasks.
    timeout_s: float

    def header(self, name: bytes) -> str:
        """Returns the value of a header, "" if there is none. `name`: in lower case."""


class TaskSettings:
    """The options of the tasks of one request. Raises HttpError if a header has an invalid value."""

    def __init__(self, request: Call, model: str) -> None:
        self.key = request.header(IDEMPOTENCY_KEY)
        if len(self.key) > _KEY_CHARACTERS_MAX or not self.key.isprintable():
            message = f"Idempotency-Key is to have at most {_KEY_CHARACTERS_MAX} printable characters"
            raise HttpError(BAD_REQUEST, message)
        durable = request.header(DURABLE).lower()
        if durable not in ("", "true", "false"):
            raise HttpError(BAD_REQUEST, "X-Multigpu-Durable is to be true or false")
        # A task with a key is durable: otherwise a retry after a restart of the master would run it again.
        self.options: dict[str, Any] = {
            "model": model, "timeout": request.timeout_s, "ephemeral": durable != "true" and not self.key,
        }  # fmt: skip
        if queue := request.header(QUEUE):
            self.options["queue"] = queue
        if priority := request.header(PRIORITY):
            if priority not in ("1", "2", "3", "4", "5"):
                raise HttpError(BAD_REQUEST, "X-Multigpu-Priority is to be 1 (served first) to 5")
            self.options["priority"] = int(priority)

    def options_of_tasks(self) -> Iterator[dict[str, Any]]:
        """Yields the options of task 0, 1, 2 and so on without end. With an Idempotency-Key, the request_id of task 0
        is KEY, that of task N is KEY:N.
        """
        number = 0
        while True:
            key = f"{self.key}:{number}" if self.key and number else self.key
            yield self.options | ({"request_id": key} if key else {})
            number += 1


def check_copies(param: str, size_bytes: int, tasks: int) -> None:
    """Raises HttpError if copies of `size_bytes` for all tasks but the first exceed COPIES_BYTES_MAX in all."""
    if size_bytes * (tasks - 1) > COPIES_BYTES_MAX:
        message = (
            f"{param}: its {size_bytes:,} bytes go to each of {tasks} tasks, more than {COPIES_BYTES_MAX:,} bytes in "
            "all: make it shorter, or send several requests"
        )
        raise HttpError(TOO_LARGE, message, param=param)


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs the calls concurrently, and returns their results in order. Raises the first error, and cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [run.result() for run in runs]
