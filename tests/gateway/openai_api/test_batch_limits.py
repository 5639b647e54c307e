"""Batches at a limit: a full queue, a cancellation in the midst of the submit, entries and lines that are no good."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import openai
import pytest
from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import HttpError
from multigpu_gateway.http import Request
from multigpu_gateway.openai import batches, files, serving_files
from multigpu_gateway.routes import Serve

from tests.fleet import Fleet
from tests.gateway.conftest import GatewayProcess
from tests.gateway.openai_api.test_batches import EMBEDDINGS, ended, line, upload, written

QUEUE_TASKS_MAX = 8


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    limit = ["--queue-tasks-max", str(QUEUE_TASKS_MAX)]
    with Fleet(tmp_path_factory.mktemp("fleet"), workers=1, master_flags=limit) as running:
        yield running
        assert not running.faults()


@pytest.fixture(scope="module")
def gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with GatewayProcess(folder, fleet.address, "--body-bytes-max", "4096") as running:
        yield running


@pytest.fixture
async def pair(fleet: Fleet) -> AsyncIterator[ClientPair]:
    found = ClientPair({"master": fleet.address}, "")
    yield found
    await found.close()


async def call(serve: Serve, pair: ClientPair, method: str, path: str, body: Any = None) -> Any:
    """What a route answers in this process."""
    sent: list[Any] = []
    arriving: asyncio.Queue[Any] = asyncio.Queue()
    arriving.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"method": method, "path": path, "query_string": b"", "headers": []}
    await serve(Request(scope, arriving.get, send, body_bytes_max=1 << 20, timeout_s=60), pair)
    assert sent[0]["status"] == 200
    return json.loads(b"".join(each.get("body", b"") for each in sent[1:]))


async def keep(pair: ClientPair, name: str, *chunks: bytes) -> files.FileInfo:
    """A file of these chunks."""
    for number, chunk in enumerate(chunks):
        await files.store(pair.client, f"{name}:{number}", chunk)
    info = files.FileInfo(name, sum(map(len, chunks)), int(time.time()), "lines.jsonl", "batch", len(chunks))
    await files.store(pair.client, name, msgspec.json.encode(info))
    return info


def test_a_batch_for_a_full_queue_goes_on_when_it_is_looked_at(client: openai.OpenAI) -> None:
    count = 3 * QUEUE_TASKS_MAX
    file_id = upload(client, [line(number) for number in range(count)])
    batch = client.batches.create(input_file_id=file_id, endpoint=EMBEDDINGS, completion_window="24h")
    assert batch.status == "validating"
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    answers = written(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"line-{number}" for number in range(count)]
    assert [each.id for each in client.batches.list()] == [batch.id]


@pytest.mark.parametrize("before", [2, 3])
async def test_no_line_runs_that_is_submitted_while_its_batch_is_cancelled(
    pair: ClientPair, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """`before`: the submit that the cancellation comes in before; the third is the last."""
    client = pair.client
    monkeypatch.setattr(batches, "_SUBMIT_LINES", 2)
    lines = [json.dumps(line(number, model="nobody")).encode() for number in range(6)]
    file = await keep(pair, f"file-cancelled-{before}", b"\n".join(lines))
    record = batches.Record(f"batch_cancelled-{before}", file.id, EMBEDDINGS, "24h", int(time.time()), len(lines))
    await files.store(client, record.id, msgspec.json.encode(record), batches.QUEUE)
    submit_many = client.submit_many
    submits = 0

    async def cancelled_meanwhile(kind: str, *args: Any, **options: Any) -> Any:
        nonlocal submits
        if kind == "embed":  # `submit`, which stores the mark of the cancellation, calls it too
            submits += 1
            if submits == before:
                await call(batches.post, pair, "POST", f"{batches.PATH}/{record.id}/cancel")
        return await submit_many(kind, *args, **options)

    monkeypatch.setattr(client, "submit_many", cancelled_meanwhile)
    batch = await call(batches.get, pair, "GET", f"{batches.PATH}/{record.id}")
    assert submits == before
    assert batch["status"] == "cancelled"
    counts = await client.count(queue=record.id)
    assert (counts.queued, counts.cancelled) == (0, 2 * before)


@pytest.mark.parametrize(
    ("serve", "path", "queue"),
    [(serving_files.get, files.PATH, files.QUEUE), (batches.get, batches.PATH, batches.QUEUE)],
)
async def test_entries_that_cannot_be_read_do_not_spoil_a_list(
    pair: ClientPair, monkeypatch: pytest.MonkeyPatch, serve: Serve, path: str, queue: str
) -> None:
    client = pair.client
    file = await keep(pair, f"file-{queue}", b"x")
    record = batches.Record(f"batch_{queue}", file.id, EMBEDDINGS, "24h", int(time.time()), 1)
    await files.store(client, record.id, msgspec.json.encode(record), batches.QUEUE)
    for name in (file.id, record.id):
        await client.get(name, wait_s=60)
    for payload in ({"id": "other"}, b"\xff", b'"\xff"', b"[" * 100_000):
        handle = await client.submit("echo", payload, queue=queue)
        await handle.outcome()
    waiting = [
        await client.submit("echo", b"", queue=queue, labels={"there is": "none"}, wait_for_worker=True) for _ in "12"
    ]
    await waiting[0].cancel()
    monkeypatch.setattr(files, "READ_TIMEOUT_S", 2.0)
    monkeypatch.setattr(serving_files, "READ_TIMEOUT_S", 2.0)
    try:
        listed = await call(serve, pair, "GET", path)
    finally:
        await waiting[1].cancel()
    assert {file.id, record.id} & {each["id"] for each in listed["data"]}
    assert "other" not in {each["id"] for each in listed["data"]}


def test_a_line_has_a_limit(client: openai.OpenAI) -> None:
    file_id = upload(client, [line(1), line(2, input="x" * 4096), line(3)])
    with pytest.raises(openai.BadRequestError, match="line 2 of the file: it has more than 4,096 bytes") as caught:
        client.batches.create(input_file_id=file_id, endpoint=EMBEDDINGS, completion_window="24h")
    assert caught.value.param == "input_file_id"


async def test_lines_are_found_across_chunks(pair: ClientPair) -> None:
    file = await keep(pair, "file-chunks", b"a", b"b\n\n \nc", b"d", b"e\n", b"fgh", b"i")
    assert [each async for each in files.lines(pair.client, file, 4)] == [b"ab", b"cde", b"fghi"]
    lines = files.lines(pair.client, file, 3)
    assert [await anext(lines), await anext(lines)] == [b"ab", b"cde"]
    with pytest.raises(HttpError, match="line 3 of the file: it has more than 3 bytes"):
        await anext(lines)


async def test_other_tasks_run_while_lines_are_read(pair: ClientPair) -> None:
    """A chunk is in memory, and its lines are not all taken at once."""
    file = await keep(pair, "file-turns", b"line\n" * 100_000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    lines = files.lines(pair.client, file, 10)
    await anext(lines)
    counting = asyncio.get_running_loop().create_task(count())
    assert sum([1 async for _ in lines]) == 99_999
    counting.cancel()
    assert turns >= 5


async def test_a_batch_is_made_once_though_the_master_goes_away(
    client: openai.OpenAI, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller learns its id: by sending the request again it would make another one."""
    pair = ClientPair({"master": fleet.address, "connect_timeout_s": 1.0}, "")
    submit_many = pair.client.submit_many

    async def without_master(kind: str, *args: Any, **options: Any) -> Any:
        if kind == "embed":
            fleet.master.kill()
        return await submit_many(kind, *args, **options)

    monkeypatch.setattr(pair.client, "submit_many", without_master)
    file_id = await asyncio.to_thread(upload, client, [line(1)])
    body = {"input_file_id": file_id, "endpoint": EMBEDDINGS}
    batch = await call(batches.post, pair, "POST", batches.PATH, body)
    await pair.close()
    assert (batch["status"], batch["request_counts"]["total"]) == ("validating", 1)
    await asyncio.to_thread(fleet.restart_master)
    await asyncio.to_thread(fleet.wait_for_workers, "w0")
    assert (await asyncio.to_thread(ended, client, batch["id"])).status == "completed"
