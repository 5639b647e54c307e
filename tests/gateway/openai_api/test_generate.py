"""Text by OpenAI's own client, unmodified, against a real fleet."""

import asyncio
import contextlib
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import multigpu
import pytest

pytest.importorskip("openai", reason="OpenAI's client is not installed")
import openai

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.worker.generate.generating import Plain

MODEL = "all-MiniLM-L6-v2"
TALK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Plain:
    return Plain.load(tiny)


def greedy(plain: Plain, max_tokens: int) -> str:
    """Transformers' answer in the conversation."""
    prompt = plain.tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    return str(plain.tokenizer.decode(plain.greedy(prompt, max_tokens), skip_special_tokens=True))


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no worker has model 'gpt-4o'") as caught:
        client.chat.completions.create(model="gpt-4o", messages=TALK)
    assert "wait_for_worker" not in str(caught.value)
    assert (caught.value.code, caught.value.param, caught.value.type) == ("model_not_found", "model", "not_found_error")
    with pytest.raises(openai.NotFoundError, match="no worker has model 'gpt-4o'"):
        client.chat.completions.create(model="gpt-4o", messages=TALK, stream=True)


# Conversations.


def test_a_greedy_answer_is_that_of_transformers(client: openai.OpenAI, plain: Plain) -> None:
    answer = client.chat.completions.create(model="tiny", messages=TALK, temperature=0, max_completion_tokens=24)
    assert answer.choices[0].message.content == greedy(plain, 24)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.role) == ("length", "assistant")
    assert answer.usage is not None
    prompt = plain.tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=True)
    tokens = len(prompt["input_ids"] if hasattr(prompt, "keys") else prompt)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (tokens, 24)


def test_a_stream_has_the_pieces_of_the_answer(client: openai.OpenAI, plain: Plain) -> None:
    options: Any = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 24}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    *pieces, end, usage = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == greedy(plain, 24)
    assert len(pieces) > 5
    assert end.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 24
    assert len({each.id for each in chunks}) == 1
    assert all(each.usage is None for each in client.chat.completions.create(**options, stream=True))


def test_a_seed_repeats_the_answers_and_n_differs(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": TALK, "max_tokens": 12, "n": 3, "seed": -5}
    first = [choice.message.content for choice in client.chat.completions.create(**options).choices]
    assert len(set(first)) == 3
    assert [choice.message.content for choice in client.chat.completions.create(**options).choices] == first
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == first


def test_the_usage_ends_a_stream_of_several_choices(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": TALK, "max_tokens": 6, "n": 3, "temperature": 0}
    whole = client.chat.completions.create(**options).usage
    *chunks, last = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], whole)
    assert sum(chunk.choices[0].finish_reason == "length" for chunk in chunks) == 3


def test_a_stop_string_ends_the_answer(client: openai.OpenAI, plain: Plain) -> None:
    whole = greedy(plain, 24)
    stop = whole[9:11]
    answer = client.chat.completions.create(model="tiny", messages=TALK, temperature=0, max_tokens=24, stop=stop)
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_without_a_limit_the_answer_goes_on_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 1700}])
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048


def test_logprobs_of_a_conversation(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=3).choices[0]
    assert answer.logprobs is not None
    assert answer.logprobs.content is not None
    assert len(answer.logprobs.content) == 8
    for each in answer.logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].token == each.token
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob)
        assert each.logprob <= 0
    text = b"".join(bytes(each.bytes or ()) for each in answer.logprobs.content).decode(errors="replace")
    assert text == answer.message.content
    streamed = [
        each
        for chunk in client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs is not None
        for each in chunk.choices[0].logprobs.content or ()
    ]
    assert [each.token for each in streamed] == [each.token for each in answer.logprobs.content]


def test_a_json_schema_is_followed(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(model="ending", messages=TALK, response_format=form, seed=seed)
        person = json.loads(answer.choices[0].message.content or "")
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 99
        assert len(person["name"]) <= 5
        assert answer.choices[0].finish_reason == "stop"
    form["json_schema"]["schema"] = {"type": "nonsense"}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(model="ending", messages=TALK, response_format=form)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("messages", [], "there are none"),
        ("messages", [{"role": "wizard", "content": "x"}], "role 'wizard' is none of"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "'image_url' can't be read"),
        ("temperature", 3, "temperature is 3"),
        ("temperature", "hot", "temperature: Expected `float | null`, got `str`"),
        ("n", 0, "1 to 128 answers"),
        ("messages", [{"role": "user"}], "a message of the role 'user' has no content"),
        ("top_p", 0, "more than 0"),
        ("tool_choice", "required", "calls tools"),
        ("modalities", ["audio"], "write text"),
        ("max_tokens", 0, "too small"),
        ("max_tokens", -1, "too small"),
        ("max_tokens", 10**6, "the model's context is 2048"),
        ("top_logprobs", 3, "needs logprobs=true"),
        ("presence_penalty", 1, "does not have it"),
        ("tools", [{"type": "function"}], "calls tools"),
    ],
)
def test_wrong_fields_are_bad_requests(client: openai.OpenAI, field: str, value: Any, says: str) -> None:
    options: Any = {"model": "tiny", "messages": TALK, "max_tokens": 4} | {field: value}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**options, stream=stream)
        assert says in str(caught.value)


def test_the_developers_message_and_parts_of_text_are_read(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    options: Any = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    one, other = (client.chat.completions.create(messages=each, **options) for each in (TALK, messages))
    assert one.choices[0].message.content == other.choices[0].message.content


# Completions.


def test_completions_of_texts_and_of_tokens(client: openai.OpenAI, plain: Plain) -> None:
    prompts = ["Hello", "Once upon"]
    wanted = [plain.tokenizer.decode(plain.greedy(each, 16), skip_special_tokens=True) for each in prompts]
    answer = client.completions.create(model="tiny", prompt=prompts, temperature=0)
    assert [choice.text for choice in answer.choices] == wanted
    tokens = [plain.tokenizer(each)["input_ids"] for each in prompts]
    assert [c.text for c in client.completions.create(model="tiny", prompt=tokens, temperature=0).choices] == wanted
    stream = client.completions.create(model="tiny", prompt=prompts[0], temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted[0]


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=5, logprobs=2).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 5
    assert found.text_offset is not None
    assert found.text_offset[0] == 0


def test_what_completions_do_not_have_is_said(client: openai.OpenAI) -> None:
    for field, value in (("prompt", ""), ("echo", True), ("suffix", "x"), ("best_of", 3), ("logit_bias", {"5": 1})):
        options: Any = {"model": "tiny", "prompt": "x", field: value}
        with pytest.raises(openai.BadRequestError, match=field):
            client.completions.create(**options)


# Asynchronous callers, and what goes wrong.


async def test_the_asynchronous_client_runs_calls_together(gateway: GatewayProcess, plain: Plain) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 24}
        answers = await asyncio.gather(*(client.chat.completions.create(**options) for _ in range(8)))
        assert {answer.choices[0].message.content for answer in answers} == {greedy(plain, 24)}
        stream = await client.chat.completions.create(**options, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == greedy(plain, 24)


def running(fleet: Fleet) -> int:
    with fleet.client() as own:
        counts = own.count()
        return counts.queued + counts.leased


def cancelled(fleet: Fleet) -> int:
    with fleet.client() as own:
        return own.count().cancelled


def test_a_stream_that_is_left_cancels_its_task(client: openai.OpenAI, fleet: Fleet) -> None:
    until(lambda: not running(fleet), 30)
    stream = client.chat.completions.create(model="tiny", messages=TALK, stream=True)
    next(iter(stream))
    assert running(fleet) == 1
    before = cancelled(fleet)
    stream.close()
    until(lambda: cancelled(fleet) == before + 1)


def test_a_call_that_is_left_cancels_its_task(gateway: GatewayProcess, fleet: Fleet) -> None:
    until(lambda: not running(fleet), 30)
    connection = gateway.connect()
    body = json.dumps({"model": "tiny", "messages": TALK})
    connection.request("POST", "/v1/chat/completions", body)
    until(lambda: running(fleet), 10)
    before = cancelled(fleet)
    connection.close()
    until(lambda: cancelled(fleet) == before + 1)


@pytest.mark.slow
def test_an_answer_survives_its_worker(client: openai.OpenAI, fleet: Fleet, plain: Plain) -> None:
    options: Any = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 600}
    wanted = client.chat.completions.create(**options).choices[0].message.content
    pieces = []
    for number, chunk in enumerate(client.chat.completions.create(**options, stream=True)):
        pieces.append(chunk.choices[0].delta.content or "")
        if number == 20:
            (busy,) = [worker.worker_id for worker in fleet.list_workers() if worker.leases]
            fleet.workers[busy].kill()
            fleet.start_worker(busy)
    assert "".join(pieces) == wanted


def test_a_retry_with_the_same_key_generates_once(client: openai.OpenAI, fleet: Fleet) -> None:
    options: Any = {"model": "tiny", "messages": TALK, "max_tokens": 8, "extra_headers": {"Idempotency-Key": "order-1"}}
    first, second = (client.chat.completions.create(**options).choices[0].message.content for _ in range(2))
    assert first == second
    with fleet.client() as own:
        assert own.get("order-1").attempts == 1
    with pytest.raises(openai.ConflictError, match="the Idempotency-Key belongs to another request"):
        client.chat.completions.create(**options | {"max_tokens": 9})


@pytest.mark.slow
def test_an_answer_survives_its_master(client: openai.OpenAI, fleet: Fleet) -> None:
    """Only a durable one does: the key makes it that."""
    options: Any = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 400}
    wanted = client.chat.completions.create(**options).choices[0].message.content
    with ThreadPoolExecutor(1) as pool:
        headers = {"Idempotency-Key": "survivor"}
        answer = pool.submit(lambda: client.chat.completions.create(**options, extra_headers=headers))
        until(lambda: running(fleet), 10)
        fleet.restart_master()
        assert answer.result(60).choices[0].message.content == wanted


def test_a_full_queue_is_a_rate_limit(client: openai.OpenAI, fleet: Fleet) -> None:
    with multigpu.AdminClient(fleet.address) as admin:
        admin.pause_queue("small")
        admin.set_queue_limits("small", tasks_max=1)
        with fleet.client() as own:
            handle = own.submit("echo", b"", queue="small")
            with pytest.raises(openai.RateLimitError, match="queue 'small' holds its limit of 1 tasks") as caught:
                client.embeddings.create(input="x", model=MODEL, extra_headers={"X-Multigpu-Queue": "small"})
            headers = caught.value.response.headers
            assert int(headers["retry-after"]) >= 1
            assert int(headers["retry-after-ms"]) > 0
            handle.cancel()


def test_headers_choose_queue_and_priority(client: openai.OpenAI, fleet: Fleet) -> None:
    headers = {"X-Multigpu-Queue": "night", "X-Multigpu-Priority": "4"}
    with multigpu.AdminClient(fleet.address) as admin, ThreadPoolExecutor(1) as pool:
        admin.pause_queue("night")
        answer = pool.submit(lambda: client.embeddings.create(input="x", model=MODEL, extra_headers=headers))
        (task,) = until(lambda: list(admin.list_tasks(queue="night")), 20)
        assert task.message.spec.priority == 4
        admin.resume_queue("night")
        assert answer.result(60).data
    for name, value in (
        ("X-Multigpu-Priority", "9"),
        ("X-Multigpu-Durable", "perhaps"),
        ("Idempotency-Key", "x" * 201),
    ):
        with pytest.raises(openai.BadRequestError, match="is to"):
            client.embeddings.create(input="x", model=MODEL, extra_headers={name: value})


def test_a_stream_that_waits_takes_little_memory(client: openai.OpenAI, gateway: GatewayProcess, fleet: Fleet) -> None:
    streams, name, talk = 1000, "waiting", [{"role": "user", "content": "x" * 1000}]
    body = json.dumps({"model": "tiny", "messages": talk, "stream": True}).encode()
    request = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head = f"{request}X-Multigpu-Queue: {name}\r\nContent-Length: {len(body)}"
    client.chat.completions.create(model="tiny", messages=TALK, max_tokens=1)  # what is imported late

    def resident_kib() -> int:
        pages = int(Path(f"/proc/{gateway.daemon.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 1024

    with multigpu.AdminClient(fleet.address) as admin, fleet.client() as tasks, contextlib.ExitStack() as stack:
        admin.pause_queue(name)
        before = resident_kib()
        host, _, port = gateway.address.rpartition(":")
        for _ in range(streams):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: tasks.count(queue=name).queued == streams, 30)
        assert (resident_kib() - before) / streams < 23  # 27 with the request kept beside its payload, and a queue
