"""Files and batches by OpenAI's own client: durable, whole, each line once."""

import asyncio
import hashlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import multigpu
import numpy as np
import openai
import pytest
from multigpu_gateway.openai import batches, files

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess

EMBEDDINGS: Any = "/v1/embeddings"
MODEL = "all-MiniLM-L6-v2"


FORM = "multipart/form-data; boundary=x"
PART = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch'
PARTS = PART + b'\r\n--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nline\n'


def line(number: int, url: str = EMBEDDINGS, **body: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "input": f"text {number}"} if url == EMBEDDINGS else {"model": "tiny"}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": fields | body}


def upload(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    return client.files.create(file=("lines.jsonl", data), purpose="batch").id


def ended(client: openai.OpenAI, batch_id: str, timeout_s: float = 60) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "expired", "cancelled") else None

    return until(look, timeout_s)


def written(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_a_file_is_kept_as_it_is(client: openai.OpenAI) -> None:
    data = random.Random(1).randbytes(9 << 20)  # several chunks
    file = client.files.create(file=("data.bin", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "data.bin", "batch", "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    empty = client.files.create(file=("empty", b""), purpose="user_data")
    assert client.files.content(empty.id).content == b""
    assert {file.id, empty.id} <= {each.id for each in client.files.list()}
    assert file.id not in {each.id for each in client.files.list(purpose="user_data")}
    with pytest.raises(openai.NotFoundError, match="there is no file 'file-nope'"):
        client.files.retrieve("file-nope")
    with pytest.raises(openai.BadRequestError, match="purpose is 'vision'"):
        client.files.create(file=("x", b"x"), purpose="vision")


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("application/json", b"{}", "send the file as multipart/form-data"),
        ("multipart/form-data", b"", "send the file as multipart/form-data"),
        ("multipart/form-data; boundary=x", b"nonsense", "not multipart/form-data"),
        ("multipart/form-data; boundary=x", b"--x--\r\n", "the field file is missing"),
        (FORM, PARTS, "the body has no closing boundary"),
        (FORM, PARTS + b"\r\n--x-", "the body has no closing boundary"),
        (FORM, PARTS + PARTS + b"\r\n--x--", "the form has two fields file"),
        (FORM, PARTS + PART * 15 + b"\r\n--x--", "the form has more than 16 fields"),
    ],
)
def test_an_upload_that_is_no_form_is_rejected(gateway: GatewayProcess, kind: str, body: bytes, says: str) -> None:
    response, answer = gateway.call("POST", "/v1/files", body, {"Content-Type": kind})
    assert response.status == 400
    assert says in answer["error"]["message"]


def test_an_upload_that_breaks_off_leaves_nothing(gateway: GatewayProcess, client: openai.OpenAI, fleet: Fleet) -> None:
    """Chunks that no list shows stayed in the journal for a month, and nobody could delete them."""
    with multigpu.Client(fleet.address) as direct:
        before = direct.count(queue=files.QUEUE)
        response, _ = gateway.call("POST", "/v1/files", PARTS + bytes(9 << 20), {"Content-Type": FORM})
        assert response.status == 400
        with pytest.raises(openai.BadRequestError, match="purpose is 'vision'"):
            client.files.create(file=("x", bytes(9 << 20)), purpose="vision")
        assert direct.count(queue=files.QUEUE) == before


def test_the_fields_of_a_form_have_a_limit(gateway: GatewayProcess) -> None:
    body = (PART + b"x" * 40_000) * 2 + PARTS + b"\r\n--x--"
    response, answer = gateway.call("POST", "/v1/files", body, {"Content-Type": FORM})
    assert (response.status, answer["error"]["message"]) == (
        413, "the fields of the form, without the file, have more than 64 KiB",
    )  # fmt: skip
    body = PARTS + PART + b"\r\n--x--\r\nwhat follows is not read"
    response, answer = gateway.call("POST", "/v1/files", body, {"Content-Type": FORM})
    assert (response.status, answer.get("bytes")) == (200, 5)


def test_a_batch_answers_as_its_endpoint_does(client: openai.OpenAI) -> None:
    texts = [f"text {number}" for number in range(5)]
    file_id = upload(client, [line(number) for number in range(5)])
    batch = client.batches.create(
        input_file_id=file_id, endpoint=EMBEDDINGS, completion_window="24h", metadata={"who": "me"}
    )
    assert batch.status in ("in_progress", "completed")
    batch = ended(client, batch.id)
    assert batch.request_counts.model_dump() == {"total": 5, "completed": 5, "failed": 0}
    assert batch.metadata == {"who": "me"}
    assert batch.error_file_id is None
    answers = written(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"line-{number}" for number in range(5)]
    wanted = client.embeddings.create(input=texts, model=MODEL, encoding_format="float")
    found = [each["response"]["body"]["data"][0]["embedding"] for each in answers]
    assert np.abs(np.array(found) - np.array([each.embedding for each in wanted.data])).max() < 1e-5
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in answers)
    assert client.files.retrieve(batch.output_file_id).bytes == len(client.files.content(batch.output_file_id).content)
    assert batch.id in {each.id for each in client.batches.list(limit=50)}


@pytest.mark.slow
def test_a_batch_of_conversations_has_errors_apart(client: openai.OpenAI) -> None:
    url: Any = "/v1/chat/completions"
    talk = [{"role": "user", "content": "Hello"}]
    lines = [line(0, url, messages=talk, max_tokens=3), line(1, url, messages=[{"role": "wizard", "content": "x"}])]
    batch = client.batches.create(input_file_id=upload(client, lines), endpoint=url, completion_window="24h")
    batch = ended(client, batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (answer,) = written(client, batch.output_file_id)
    assert answer["response"]["body"]["object"] == "chat.completion"
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 3
    (error,) = written(client, batch.error_file_id)
    assert error["custom_id"] == "line-1"
    assert error["response"]["status_code"] == 400
    assert "role 'wizard'" in error["response"]["body"]["error"]["message"]
    assert error["error"] is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "the file has no lines"),
        ([line(1), line(1)], "line 2 of the file: another line has the custom_id 'line-1'"),
        ([line(1), {"custom_id": "x"}], "line 2 of the file: Object missing required field"),
        (
            [line(1, "/v1/completions", prompt="x")],
            "line 1 of the file: POST /v1/completions is not POST /v1/embeddings",
        ),
        ([line(1, input=[])], "line 1 of the file: input is to be a text"),
        ([line(1, model="nobody")], "line 1 of the file: no worker has model 'nobody'"),
        ([line(0), line(1, model="tiny")], "line 2 of the file: no worker has model 'tiny' for /v1/embeddings"),
    ],
)
def test_a_wrong_line_is_named(client: openai.OpenAI, lines: list[dict[str, Any]], says: str) -> None:
    file_id = upload(client, lines)
    with pytest.raises(openai.APIStatusError) as caught:
        client.batches.create(input_file_id=file_id, endpoint=EMBEDDINGS, completion_window="24h")
    assert caught.value.status_code in (400, 404)
    assert says in str(caught.value)


def test_wrong_batches_are_rejected(client: openai.OpenAI) -> None:
    endpoint: Any = "/v1/responses"
    with pytest.raises(openai.BadRequestError, match="endpoint is '/v1/responses'"):
        client.batches.create(input_file_id="x", endpoint=endpoint, completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="there is no file 'x'"):
        client.batches.create(input_file_id="x", endpoint=EMBEDDINGS, completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="there is no batch 'batch_x'"):
        client.batches.retrieve("batch_x")


def test_a_batch_can_be_cancelled(client: openai.OpenAI, fleet: Fleet) -> None:
    url: Any = "/v1/chat/completions"
    talk = [{"role": "user", "content": "Hello"}]
    file_id = upload(client, [line(number, url, messages=talk) for number in range(200)])
    batch = client.batches.create(input_file_id=file_id, endpoint=url, completion_window="24h")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    errors = written(client, batch.error_file_id)
    done = written(client, batch.output_file_id) if batch.output_file_id else []
    assert len(errors) + len(done) == 200
    assert {(each["response"], each["error"]["code"]) for each in errors} == {(None, "batch_cancelled")}


def test_a_batch_completes_though_a_task_of_it_was_cancelled(client: openai.OpenAI, fleet: Fleet) -> None:
    url: Any = "/v1/chat/completions"
    short = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    file_id = upload(client, [line(number, url, **short) for number in range(3)])
    name = f"batch_{hashlib.sha256(b'paused').hexdigest()[:32]}"
    with multigpu.AdminClient(fleet.address) as admin:
        admin.pause_queue(name)  # the line still waits when it is cancelled
    headers = {"Idempotency-Key": "paused"}
    batch = client.batches.create(input_file_id=file_id, endpoint=url, completion_window="24h", extra_headers=headers)
    assert batch.id == name
    with fleet.client() as own:
        assert len(own.cancel(f"{name}:3", reason="its batch was cancelled").cancelled_task_ids) == 1
    with multigpu.AdminClient(fleet.address) as admin:
        admin.resume_queue(name)
    batch = ended(client, batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 1)
    (error,) = written(client, batch.error_file_id)
    assert (error["custom_id"], error["error"]) == ("line-2", None)
    assert (error["response"]["status_code"], error["response"]["body"]["error"]["code"]) == (409, "cancelled")
    assert client.batches.cancel(batch.id).status == "completed"  # it has ended


def test_a_retry_with_the_same_key_is_the_same_batch(client: openai.OpenAI) -> None:
    file_id = upload(client, [line(1)])
    options: Any = {"input_file_id": file_id, "endpoint": EMBEDDINGS, "completion_window": "24h"}
    headers = {"Idempotency-Key": "batch-key"}
    first, second = (client.batches.create(**options, extra_headers=headers) for _ in range(2))
    assert (first.id, first.created_at) == (second.id, second.created_at)
    for change in ({"input_file_id": upload(client, [line(1), line(2)])}, {"endpoint": "/v1/completions"}):
        with pytest.raises(openai.ConflictError, match="the Idempotency-Key belongs to another request") as caught:
            client.batches.create(**(options | change), extra_headers=headers)
        assert caught.value.code == "idempotency_key_in_use"


@pytest.mark.slow
def test_a_large_batch_survives_kills_of_everything(
    gateway: GatewayProcess, client: openai.OpenAI, fleet: Fleet
) -> None:
    """Master, workers and gateway are killed three times each: every line has one result."""
    count, kills = 30_000, 3
    patient = client.with_options(max_retries=50, timeout=600)
    file_id = upload(patient, [line(number, input=f"t{number % 7}") for number in range(count)])
    random_ = random.Random(26)
    options: Any = {"input_file_id": file_id, "endpoint": EMBEDDINGS, "completion_window": "24h"}
    headers = {"Idempotency-Key": "large"}
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: patient.batches.create(**options, extra_headers=headers))
        # On this thread: the kernel ends a process with the thread that began it.
        for what in ("gateway", "worker", "master") * kills:
            time.sleep(random_.uniform(2, 6))
            if what == "gateway":
                gateway.daemon.kill()
                gateway.restart()
            elif what == "worker":
                name = random_.choice(sorted(fleet.workers))
                fleet.workers[name].kill()
                fleet.start_worker(name)
            else:
                fleet.restart_master()
        batch = ended(patient, made.result().id, 120)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": count, "completed": count, "failed": 0}
    answers = written(patient, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"line-{number}" for number in range(count)]
    assert all(each["response"]["status_code"] == 200 for each in answers)


async def test_a_batch_that_nobody_went_on_with_expires(client: openai.OpenAI, fleet: Fleet) -> None:
    """Its gateway was killed while it submitted the lines, and nobody looked for a day."""
    file_id = upload(client, [line(1)])
    old = batches.Record("batch_old", file_id, EMBEDDINGS, "24h", int(time.time()) - batches.WINDOW_S - 1, 1)
    async with multigpu.AsyncClient(fleet.address) as own:
        await files.store(own, old.id, msgspec.json.encode(old), batches.QUEUE)
    batch = await asyncio.to_thread(ended, client, old.id)
    assert batch.status == "expired"
    (error,) = await asyncio.to_thread(written, client, batch.error_file_id)
    assert error["error"]["code"] == "batch_expired"
