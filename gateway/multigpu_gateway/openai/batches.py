"""/v1/batches: runs the requests in a file as durable tasks.

A batch consists of a record, stored like the metadata of a file (see files.py), and one task for each line. The
tasks have request_ids BATCH:LINE, and a queue with the name of the batch. Everything else is derived: the state of the
batch from the counts of its queue, the output from the outcomes of its tasks. If some tasks were not submitted (the
gateway ended, or the master rejected them), a GET of the batch on any gateway submits all of them again: the master
ignores request_ids that it has.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from multigpu import AsyncClient, Input, MultigpuError, NotFoundError, RejectedError
from multigpu.outcome import Outcome, OutcomeState, TaskError

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import (
    BAD_REQUEST,
    CONFLICT,
    LATE,
    NOT_FOUND,
    TOO_MANY,
    UNAVAILABLE,
    HttpError,
    http_error,
)
from multigpu_gateway.http import Request
from multigpu_gateway.openai import files
from multigpu_gateway.openai.endpoints import ENDPOINTS, Endpoint
from multigpu_gateway.openai.errors import error_body
from multigpu_gateway.tasks import IDEMPOTENCY_KEY

log = structlog.get_logger()

PATH = "/v1/batches"
QUEUE = "openai-batches"
WINDOW_S = 24 * 3600
LINES_MAX = 1_000_000
# The lowest priority. For each level of difference, at most 1,024 later tasks overtake a line.
PRIORITY = 5
LIST_MAX = 100
# The lines of one submit_many, and the outcomes that are fetched concurrently.
_SUBMIT_LINES, _FETCH = 5_000, 64
OUTPUT, ERRORS = "-output", "-errors"
ENDED = ("completed", "expired", "cancelled")
# Statuses of temporary errors: a limit is reached, or the master is not available.
_PASSING = (TOO_MANY, UNAVAILABLE, LATE)


class BatchRequest(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


class Record(msgspec.Struct):
    """What is stored of a batch."""

    id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    lines: int
    metadata: dict[str, str] | None = None

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    @property
    def expired(self) -> bool:
        """Whether expires_at has passed, after which no line may start."""
        return time.time() >= self.expires_at

    def name(self, line: int) -> str:
        """The request_id of a line's task; lines count from 1."""
        return f"{self.id}:{line}"


_request = msgspec.json.Decoder(BatchRequest)
_line = msgspec.json.Decoder(Line)
_record = msgspec.json.Decoder(Record)


async def post(request: Request, pair: ClientPair) -> None:
    """Creates a batch, or cancels one."""
    batch_id, _, rest = request.path.removeprefix(PATH).strip("/").partition("/")
    if not batch_id:
        await _make(request, pair)
    elif rest == "cancel":
        await _cancel(request, pair.client, batch_id)
    else:
        raise HttpError(NOT_FOUND, f"there is no POST {request.path}")


async def get(request: Request, pair: ClientPair) -> None:
    """Lists batches, or returns one, of which it first submits tasks that are missing."""
    batch_id = request.path.removeprefix(PATH).strip("/")
    client = pair.client
    async with request.while_connected():
        if not batch_id:
            answer = await _list(request, client)
        else:
            record = await _get(client, batch_id)
            answer = await _state(client, record)
            if answer["status"] == "validating":
                await _submit_missing(client, record, request.body_bytes_max)
                answer = await _state(client, record)
    await request.respond(200, msgspec.json.encode(answer))


async def _make(request: Request, pair: ClientPair) -> None:
    body = await request.json(_request)
    endpoint = ENDPOINTS.get(body.endpoint)
    if endpoint is None:
        message = f"endpoint is {body.endpoint!r}: there are {', '.join(ENDPOINTS)}"
        raise HttpError(BAD_REQUEST, message, param="endpoint")
    if body.completion_window != "24h":
        raise HttpError(BAD_REQUEST, "completion_window: it is 24h", param="completion_window")
    async with request.while_connected():
        client = pair.client
        key = request.header(IDEMPOTENCY_KEY)
        digest = hashlib.sha256(key.encode()).hexdigest() if key else uuid.uuid4().hex
        batch_id = f"batch_{digest[:32]}"
        record = await _find(client, batch_id) if key else None  # a retry: the batch may be there
        if record is None:
            file = await files.metadata(client, body.input_file_id)
            lines = await _check(pair, file, body.endpoint, endpoint, request.body_bytes_max)
            record = Record(
                batch_id, file.id, body.endpoint, body.completion_window, int(time.time()), lines, body.metadata
            )
            await files.store(client, record.id, msgspec.json.encode(record), QUEUE)
        elif (record.input_file_id, record.endpoint) != (body.input_file_id, body.endpoint):
            message = f"the Idempotency-Key belongs to another request, of {record.id}: use another key"
            raise HttpError(CONFLICT, message, code="idempotency_key_in_use")
        await _submit_missing(client, record, request.body_bytes_max)
        answer = await _state_or_validating(client, record)
    await request.respond(200, msgspec.json.encode(answer))


async def _submit_missing(client: AsyncClient, record: Record, line_bytes_max: int) -> None:
    """Submits the tasks that are missing. A temporary error is only logged: the record is stored already, and a client
    that got the error would create another batch. The next GET of the batch submits again.
    """
    try:
        file = await files.metadata(client, record.input_file_id)
        await _submit(client, record, file, line_bytes_max)
    except (HttpError, MultigpuError) as error:
        if http_error(error).status not in _PASSING:
            raise
        log.info("lines of a batch wait to be submitted", batch=record.id, reason=str(error))


async def _state_or_validating(client: AsyncClient, record: Record) -> dict[str, Any]:
    """Returns the state of a batch whose record has been stored: "validating" on a temporary error."""
    try:
        return await _state(client, record)
    except MultigpuError as error:
        if http_error(error).status not in _PASSING:
            raise
        return _as_dict(record, "validating", 0, 0)


async def _list(request: Request, client: AsyncClient) -> dict[str, Any]:
    """Returns a page of batches, the newest first, with OpenAI's parameters `limit` and `after`."""
    query = request.query
    limit = query.get("limit", "20")
    if not limit.isdecimal() or len(limit) > len(str(LIST_MAX)) or not 1 <= int(limit) <= LIST_MAX:
        raise HttpError(BAD_REQUEST, f"limit is {limit!r}: 1 to {LIST_MAX}", param="limit")
    found: list[dict[str, Any]] = []
    more, after = False, query.get("after", "")
    give_up = asyncio.get_running_loop().time() + files.READ_TIMEOUT_S
    async for batch_id in files.list_ids(client, QUEUE):
        if after:
            after = "" if batch_id == after else after
        elif len(found) == int(limit):
            more = True
            break
        elif (record := await files.try_read(client, batch_id, _record, give_up)) is not None:
            found.append(await _state(client, record))
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, "has_more": more, **ends}


async def _cancel(request: Request, client: AsyncClient, batch_id: str) -> None:
    async with request.while_connected():
        record = await _get(client, batch_id)
        answer = await _state(client, record)
        if answer["status"] not in ENDED:
            await files.store(client, f"{record.id}:cancelled", b"", QUEUE)
            await _cancel_lines(client, record)
            answer = await _state(client, record)
    await request.respond(200, msgspec.json.encode(answer))


async def _cancel_lines(client: AsyncClient, record: Record) -> None:
    """Cancels the tasks of all lines that have been submitted."""
    names = [record.name(line) for line in range(1, record.lines + 1)]
    await client.cancel(*names, reason="its batch was cancelled")


def is_output(file_id: str) -> bool:
    """Whether this is the id of the output file or the error file of a batch."""
    return file_id.startswith("file-batch_") and file_id.endswith((OUTPUT, ERRORS))


async def output(client: AsyncClient, file_id: str, line_bytes_max: int) -> AsyncIterator[bytes]:
    """Returns the content of an output or error file. Raises HttpError if its batch does not exist or has not ended."""
    suffix = OUTPUT if file_id.endswith(OUTPUT) else ERRORS
    record = await _get(client, file_id.removeprefix("file-").removesuffix(suffix))
    if (await _state(client, record))["status"] not in ENDED:
        raise HttpError(NOT_FOUND, f"the batch {record.id} has not ended", param="file_id")
    return _output_lines(client, record, line_bytes_max, errors=suffix == ERRORS)


async def _check(pair: ClientPair, file: files.FileInfo, url: str, endpoint: Endpoint, line_bytes_max: int) -> int:
    """Checks all lines of a file, and returns their number. Raises HttpError if there are none or too many, or if a
    line is invalid or too long, or names a model that no worker has.
    """
    seen: set[str] = set()
    models: dict[str, int] = {}
    number = 0
    async for text in files.lines(pair.client, file, line_bytes_max):
        number += 1
        try:
            line = _line.decode(text)
            if line.url != url or line.method != "POST":
                raise HttpError(BAD_REQUEST, f"{line.method} {line.url} is not POST {url}")  # noqa: TRY301
            model, _, _ = endpoint.task(bytes(line.body))
        except (msgspec.DecodeError, RecursionError, HttpError) as error:
            raise HttpError(BAD_REQUEST, f"line {number} of the file: {error}", param="input_file_id") from None
        if line.custom_id in seen:
            message = f"line {number} of the file: another line has the custom_id {line.custom_id!r}"
            raise HttpError(BAD_REQUEST, message, param="input_file_id")
        seen.add(line.custom_id)
        models.setdefault(model, number)
        if number > LINES_MAX:
            raise HttpError(BAD_REQUEST, f"the file has more than {LINES_MAX:,} lines", param="input_file_id")
    if not number:
        raise HttpError(BAD_REQUEST, "the file has no lines", param="input_file_id")
    entries = await pair.admin.list_models()
    offered = {entry.model.name for entry in entries if entry.model.kind == endpoint.kind}
    for model, first in models.items():
        if model.partition(":")[0] not in offered:
            there = ", ".join(sorted(offered)) or "none"
            message = f"line {first} of the file: no worker has model {model!r} for {url}; there are: {there}"
            raise HttpError(NOT_FOUND, message, code="model_not_found", param="input_file_id")
    return number


async def _submit(client: AsyncClient, record: Record, file: files.FileInfo, line_bytes_max: int) -> None:
    """Submits the tasks of all lines; the master ignores those that it has. Stops if the batch is cancelled or expires,
    and cancels the lines that were submitted while the batch was being cancelled.
    """
    if not await _is_open(client, record):
        return
    endpoint = ENDPOINTS[record.endpoint]
    deadline = datetime.fromtimestamp(record.expires_at, UTC)
    options: dict[str, Any] = {
        "queue": record.id, "priority": PRIORITY, "wait_for_worker": True, "deadline": deadline,
        "result_ttl_s": files.FILE_TTL_S,
    }  # fmt: skip
    due: list[Input] = []
    model_of_due = ""

    async def submit() -> bool:
        """Submits the tasks in `due`. Returns False if the batch was cancelled or has expired."""
        if not due:
            return True
        if not await _is_open(client, record):
            return False
        for answer in await client.submit_many(endpoint.kind, due, model=model_of_due, **options):
            if isinstance(answer, RejectedError):
                raise answer
        due.clear()
        return True

    number = 0
    try:
        async for text in files.lines(client, file, line_bytes_max):
            number += 1
            model, payload, units = endpoint.task(bytes(_line.decode(text).body))
            if model != model_of_due or len(due) == _SUBMIT_LINES:
                if not await submit():
                    return
                model_of_due = model
            due.append(Input(payload=payload, request_id=record.name(number), units=units))
        await submit()
    finally:  # a concurrent cancel has cancelled only the lines that were submitted before it
        if await _is_cancelled(client, record):
            await _cancel_lines(client, record)


async def _is_open(client: AsyncClient, record: Record) -> bool:
    """Whether more lines may be submitted."""
    return not (record.expired or await _is_cancelled(client, record))


async def _is_cancelled(client: AsyncClient, record: Record) -> bool:
    try:
        await client.get(f"{record.id}:cancelled")
    except NotFoundError:
        return False
    return True


async def _find(client: AsyncClient, batch_id: str) -> Record | None:
    try:
        return _record.decode(await files.fetch(client, batch_id))
    except files.UNREADABLE:
        return None


async def _get(client: AsyncClient, batch_id: str) -> Record:
    """Returns the record of a batch. Raises HttpError if there is none."""
    record = await _find(client, batch_id)
    if record is None:
        raise HttpError(NOT_FOUND, f"there is no batch {batch_id!r}, or no longer", param="batch_id")
    return record


async def _state(client: AsyncClient, record: Record) -> dict[str, Any]:
    """Returns OpenAI's batch object, with the state that follows from the counts of the batch's queue."""
    counts = await client.count(queue=record.id)
    failed = counts.failed + counts.dead_lettered + counts.expired + counts.cancelled
    pending = counts.queued + counts.leased
    missing = pending + counts.succeeded + failed < record.lines
    # If only tasks of the batch were cancelled, these are errors of their lines.
    if (counts.cancelled or missing) and await _is_cancelled(client, record):
        status = "cancelling" if pending else "cancelled"
    elif missing and not record.expired:
        status = "validating"
    elif pending:
        status = "in_progress"
    else:
        status = "expired" if counts.expired or missing else "completed"
    return _as_dict(record, status, counts.succeeded, failed)


def _as_dict(record: Record, status: str, succeeded: int, failed: int) -> dict[str, Any]:
    """Returns OpenAI's batch object."""
    ended = status in ENDED
    return {
        "id": record.id, "object": "batch", "endpoint": record.endpoint, "errors": None,
        "input_file_id": record.input_file_id, "completion_window": record.completion_window, "status": status,
        "output_file_id": f"file-{record.id}{OUTPUT}" if ended and succeeded else None,
        "error_file_id": f"file-{record.id}{ERRORS}" if ended and succeeded < record.lines else None,
        "created_at": record.created_at, "in_progress_at": record.created_at, "expires_at": record.expires_at,
        "request_counts": {"total": record.lines, "completed": succeeded, "failed": failed},
        "metadata": record.metadata,
    }  # fmt: skip


async def _output_lines(
    client: AsyncClient, record: Record, line_bytes_max: int, *, errors: bool
) -> AsyncIterator[bytes]:
    """Yields the lines of the output file or of the error file, in the order of the input file."""
    endpoint = ENDPOINTS[record.endpoint]
    file = await files.metadata(client, record.input_file_id)
    cancelled = await _is_cancelled(client, record)
    number = 0
    part: list[bytes] = []
    async for text in files.lines(client, file, line_bytes_max):
        part.append(text)
        number += 1
        if len(part) == _FETCH or number == record.lines:
            first = number - len(part) + 1
            outcomes = await asyncio.gather(*(_outcome(client, record.name(first + at)) for at in range(len(part))))
            found = [
                _line_of(record, endpoint, first + at, line, outcome, batch_cancelled=cancelled)
                for at, (line, outcome) in enumerate(zip(part, outcomes, strict=True))
                if (outcome is None or not outcome.succeeded) is errors
            ]
            part.clear()
            if found:
                yield b"".join(found)


async def _outcome(client: AsyncClient, name: str) -> Outcome | None:
    """Returns the outcome of a line, None if its task was not submitted before the batch was cancelled or expired."""
    try:
        return (await client.get(name)).outcome
    except NotFoundError:
        return None


def _line_of(
    record: Record, endpoint: Endpoint, number: int, text: bytes, outcome: Outcome | None, *, batch_cancelled: bool
) -> bytes:
    line = _line.decode(text)
    response, error = None, None
    state = outcome.state if outcome is not None else None
    if state is OutcomeState.EXPIRED or (state is None and record.expired):
        error = {"code": "batch_expired", "message": "the batch expired before this request ran"}
    elif outcome is None or (state is OutcomeState.CANCELLED and batch_cancelled):
        error = {"code": "batch_cancelled", "message": "the batch was cancelled before this request ran"}
    else:
        status = 200
        try:
            body = endpoint.answer(endpoint.parse(bytes(line.body)), [outcome])
        except (HttpError, TaskError) as failed:
            failure = http_error(failed)
            status, body = failure.status, error_body(failure)
        response = {"status_code": status, "request_id": record.name(number), "body": body}
    name = f"batch_req_{record.id.removeprefix('batch_')}_{number}"
    written = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(written) + b"\n"
